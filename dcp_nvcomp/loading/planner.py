"""The planner of our own `load`: plans with the caller's, or as DCP's default one does, but quickly for plain tensors.

DCP finds out for each tensor which of its saved shards it overlaps, in about 20 us. A plain tensor that was saved as
one shard of the same size overlaps that, as a whole. Everything else is left to DCP's default planner.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_nvcomp.calls.suggestions import missing_key
from dcp_nvcomp.calls.values import PLAIN_TENSORS, is_default_planner, unwrapped
from dcp_nvcomp.errors import CheckpointError, DtypeMismatchError, MissingKeyError, ShapeMismatchError
from dcp_nvcomp.format.collector import collector_paused

__all__ = ["UnwrappingPlanner", "planner_for"]


def planner_for(
    planner: LoadPlanner | None, failure: CheckpointError | None = None, *, may_cast: bool = True
) -> UnwrappingPlanner:
    """Return the planner of one load.

    Args:
        planner: the caller's; None for DCP's default.
        may_cast: False if a destination of another dtype is an error. Planners of other classes decide themselves.
        failure: why there is nothing to load into on this rank; raised where DCP tells the other ranks of it.
    """
    if planner is None:
        planner = _WholeTensorPlanner(may_cast=may_cast)
    elif is_default_planner(planner, DefaultLoadPlanner):
        assert isinstance(planner, DefaultLoadPlanner)
        planner = _WholeTensorPlanner(
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            allow_partial_load=planner.allow_partial_load,
            may_cast=may_cast,
        )
    return UnwrappingPlanner(planner, failure)


class UnwrappingPlanner(LoadPlanner):
    """Plans a load into what lies under one key.

    Args:
        planner: plans it.
        failure: why there is nothing to load into.

    Attributes:
        failure: why nothing can be loaded; raised where DCP tells the other ranks of it.
    """

    def __init__(self, planner: LoadPlanner, failure: CheckpointError | None) -> None:
        self._planner = planner
        self.failure = failure

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if self.failure is not None:
            raise self.failure
        self._planner.set_up_planner(unwrapped(state_dict), metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        return self._planner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return self._planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._planner.finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._planner.load_bytes(read_item, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        return self._planner.resolve_bytes(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._planner.commit_tensor(read_item, tensor)


class _WholeTensorPlanner(DefaultLoadPlanner):
    """DCP's default planner, quick for plain tensors saved as one shard, and clear about what can't be loaded.

    Args:
        may_cast: False if a destination of another dtype is an error.
        **options: of DCP's planner.
    """

    def __init__(self, *, may_cast: bool, **options: Any) -> None:
        super().__init__(**options)
        self._may_cast = may_cast

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                _check(fqn, value, saved.get(fqn), may_cast=self._may_cast)
        try:
            return self._planned(saved)
        except RuntimeError as error:  # a key is missing, also by its name of earlier releases
            missing = [fqn for fqn in self.state_dict if fqn not in saved]
            if not missing or self.allow_partial_load:
                raise
            raise MissingKeyError(missing_key(missing[0], saved)) from error

    def _planned(self, saved: Mapping[str, Any]) -> LoadPlan:
        assert self.metadata is not None
        if len(saved) > len(self.state_dict) or not all(fqn in self.state_dict for fqn in saved):
            # a key that is not asked for may be a key of the state under its name of earlier releases
            return super().create_local_plan()
        items, others = list[ReadItem](), dict[str, Any]()
        with collector_paused():
            for fqn, value in self.state_dict.items():
                if type(value) in PLAIN_TENSORS and _is_one_shard(saved.get(fqn), value):
                    items.append(_whole(fqn, value))
                else:
                    others[fqn] = value
        rest = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        return LoadPlan(items + rest.items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        value = self.state_dict.get(read_item.dest_index.fqn)
        if type(value) in PLAIN_TENSORS and isinstance(value, torch.Tensor) and value.shape == read_item.lengths:
            return value
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor


def _check(fqn: str, value: torch.Tensor, saved: Any, *, may_cast: bool) -> None:
    """Refuse a destination that differs from what was saved, before anything is loaded."""
    if saved is None:
        return
    if not isinstance(saved, TensorStorageMetadata):
        raise ShapeMismatchError("The destination is a tensor, but a Python object was saved.", fqn=fqn)
    if saved.size != value.shape:
        raise ShapeMismatchError(
            f"The destination has shape {tuple(value.shape)}, but {tuple(saved.size)} was saved.", fqn=fqn
        )
    if not may_cast and saved.properties.dtype != value.dtype:
        raise DtypeMismatchError(
            f"The destination has {value.dtype}, but {saved.properties.dtype} was saved: pass dtype='cast' to convert, "
            "or load into a tensor of that dtype.",
            fqn=fqn,
        )


def _is_one_shard(saved: Any, tensor: torch.Tensor) -> bool:
    if type(saved) is not TensorStorageMetadata or saved.size != tensor.shape or len(saved.chunks) != 1:
        return False
    shard = saved.chunks[0]
    return shard.sizes == saved.size and not any(shard.offsets) and tensor.numel() > 0


def _whole(fqn: str, tensor: torch.Tensor) -> ReadItem:
    origin, size = torch.Size([0] * tensor.dim()), tensor.shape
    index = MetadataIndex(fqn, origin, 0)
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size)

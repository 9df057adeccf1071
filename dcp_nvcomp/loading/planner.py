"""The planner of our own `load`: plans with the caller's, or as DCP's default one does, but quickly for plain tensors.

DCP finds out for each tensor which of its saved shards it overlaps, in about 20 us. A plain tensor that was saved as
one shard of the same size overlaps that, as a whole. Everything else is left to DCP's default planner.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_nvcomp.calls.suggestions import missing_key
from dcp_nvcomp.calls.values import PLAIN_TENSORS, is_default_planner, unwrapped
from dcp_nvcomp.errors import (
    CheckpointError,
    ConfigurationError,
    DtypeMismatchError,
    MissingKeyError,
    ShapeMismatchError,
)
from dcp_nvcomp.format.collector import collector_paused

__all__ = ["UnwrappingPlanner", "planner_for"]

# What certainly takes no tensor. Other values may: a ShardedTensor is none of torch's tensors.
_NO_TENSORS: Final = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)


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

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        odd = [
            (path, value) for path, value in _leaves(state_dict, ()) if isinstance(value, Mapping) or _is_meta(value)
        ]
        for path, value in odd:
            if isinstance(value, Mapping):
                if is_coordinator and metadata is not None and self.flatten_state_dict:
                    _warn_of_empty_dict(path, metadata.state_dict_metadata)
            elif not (dist.is_available() and dist.is_initialized()):  # else DCP puts it on the group's device
                raise ConfigurationError(
                    "The destination is on the meta device, which holds no values: make it first, as by to_empty().",
                    fqn=".".join(map(str, path)),
                )
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                _check(fqn, value, saved.get(fqn), may_cast=self._may_cast)
            elif isinstance(value, _NO_TENSORS):
                _check_object(fqn, value, saved.get(fqn))
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
    if type(value) in PLAIN_TENSORS and _shares_elements(value):
        raise ConfigurationError(
            "Elements of the destination share their memory, as those of an expanded tensor do: load into a clone.",
            fqn=fqn,
        )
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


def _check_object(fqn: str, value: Any, saved: Any) -> None:
    if isinstance(saved, TensorStorageMetadata):
        raise ShapeMismatchError(
            f"The destination is a Python object ({type(value).__name__}), but a tensor was saved, of shape "
            f"{tuple(saved.size)} and {saved.properties.dtype}: load into such a tensor.",
            fqn=fqn,
        )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _shares_elements(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return 0 in [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _warn_of_empty_dict(path: tuple[Any, ...], saved: Collection[str]) -> None:
    """Warn of a dict that stays empty although the checkpoint has something for it."""
    prefix = "".join(f"{part}." for part in path)
    keys = [fqn for fqn in saved if fqn.startswith(prefix)]
    if path and keys:
        warnings.warn(
            f"Nothing is loaded into {prefix[:-1]!r}, which is an empty dict, though the checkpoint has {len(keys)} "
            f"keys for it, such as {keys[0]!r}: only what the state dict has is loaded. An optimizer has its state "
            "from the first step on; get_state_dict of torch.distributed.checkpoint.state_dict makes it before.",
            UserWarning,
            stacklevel=2,
        )


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what is in nested dicts and lists that is none with anything in it, with its path."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, (*path, key))
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from _leaves(one, (*path, number))
    else:
        yield path, value


def _is_one_shard(saved: Any, tensor: torch.Tensor) -> bool:
    if type(saved) is not TensorStorageMetadata or saved.size != tensor.shape or len(saved.chunks) != 1:
        return False
    shard = saved.chunks[0]
    return shard.sizes == saved.size and not any(shard.offsets) and tensor.numel() > 0


def _whole(fqn: str, tensor: torch.Tensor) -> ReadItem:
    origin, size = torch.Size([0] * tensor.dim()), tensor.shape
    index = MetadataIndex(fqn, origin, 0)
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size)

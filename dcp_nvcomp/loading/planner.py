"""The planner of our own `load`: plans with the caller's, or as DCP's default one does, but quickly for plain tensors.

DCP finds out for each tensor which of its saved shards it overlaps, in about 20 us. A plain tensor that was saved as
one shard of the same size overlaps that, as a whole. Everything else is left to DCP's default planner.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_nvcomp.calls.values import PLAIN_TENSORS, is_default_planner, unwrapped
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.collector import collector_paused

__all__ = ["UnwrappingPlanner", "planner_for"]


def planner_for(planner: LoadPlanner | None, failure: CheckpointError | None = None) -> UnwrappingPlanner:
    """Return the planner of one load.

    Args:
        planner: the caller's; None for DCP's default.
        failure: why there is nothing to load into on this rank; raised where DCP tells the other ranks of it.
    """
    if planner is None:
        planner = _WholeTensorPlanner()
    elif is_default_planner(planner, DefaultLoadPlanner):
        assert isinstance(planner, DefaultLoadPlanner)
        planner = _WholeTensorPlanner(
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            allow_partial_load=planner.allow_partial_load,
        )
    return UnwrappingPlanner(planner, failure)


class UnwrappingPlanner(LoadPlanner):
    """Plans a load into what lies under one key.

    Args:
        planner: plans it.
        failure: why there is nothing to load into.
    """

    def __init__(self, planner: LoadPlanner, failure: CheckpointError | None) -> None:
        self._planner = planner
        self._failure = failure

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if self._failure is not None:
            raise self._failure
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
    """DCP's default planner, quick for plain tensors that were saved as one shard."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
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


def _is_one_shard(saved: Any, tensor: torch.Tensor) -> bool:
    if type(saved) is not TensorStorageMetadata or saved.size != tensor.shape or len(saved.chunks) != 1:
        return False
    shard = saved.chunks[0]
    return shard.sizes == saved.size and not any(shard.offsets) and tensor.numel() > 0


def _whole(fqn: str, tensor: torch.Tensor) -> ReadItem:
    origin, size = torch.Size([0] * tensor.dim()), tensor.shape
    index = MetadataIndex(fqn, origin, 0)
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size)

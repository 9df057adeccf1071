"""DCP's own load planner, but with objects under the keys that the destination has.

It makes text of all keys of dicts: what was saved under 7 it puts under "7", beside the old value of 7.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from dcp_nvcomp.calls.flattening import Key, Path, flatten_as_stock, replace_at
from dcp_nvcomp.calls.values import is_default_planner
from dcp_nvcomp.errors import ConfigurationError

__all__ = ["with_own_keys"]


def with_own_keys(planner: LoadPlanner) -> LoadPlanner:
    """Return a planner that knows the destination's keys; the given one, unless it is DCP's and some are no text."""
    if not is_default_planner(planner, DefaultLoadPlanner):
        return planner
    assert isinstance(planner, DefaultLoadPlanner)
    if not planner.flatten_state_dict:
        return planner
    try:
        paths = flatten_as_stock(planner.original_state_dict).paths
    except ConfigurationError:  # two keys of one name, of which DCP knows one
        return planner
    odd = {fqn: path for fqn, path in paths.items() if any(type(part) is Key for part in path)}
    return _OwnKeys(planner, odd) if odd else planner


class _OwnKeys(LoadPlanner):
    """DCP's planner for all but objects under such keys.

    Args:
        planner: DCP's.
        paths: the places of these objects.
    """

    def __init__(self, planner: DefaultLoadPlanner, paths: dict[str, Path]) -> None:
        self._planner, self._paths = planner, paths

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._planner.set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        return self._planner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return self._planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._planner.finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self._paths.get(read_item.dest_index.fqn)
        if path is None:
            self._planner.load_bytes(read_item, value)
        else:
            replace_at(self._planner.original_state_dict, path, torch.load(value, weights_only=False))

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        return self._planner.resolve_bytes(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = self._planner.resolve_tensor(read_item)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._planner.commit_tensor(read_item, tensor)

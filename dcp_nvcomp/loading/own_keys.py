"""DCP's own load planner, but with objects under the keys that the destination has.

It makes text of all keys of dicts: what was saved under 7 it puts under "7", beside the old value of 7.
"""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp_nvcomp.calls.flattening import Key, Path, flatten_as_stock, replace_at
from dcp_nvcomp.calls.values import is_default_planner
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.loading.planner import UnwrappingPlanner


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


class _OwnKeys(UnwrappingPlanner):
    """DCP's planner for all but objects under such keys."""

    def __init__(self, planner: DefaultLoadPlanner, paths: dict[str, Path]) -> None:
        super().__init__(planner, None)
        self._state_dict, self._paths = planner.original_state_dict, paths

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self._paths.get(read_item.dest_index.fqn)
        if path is None:
            super().load_bytes(read_item, value)
        else:
            replace_at(self._state_dict, path, torch.load(value, weights_only=False))

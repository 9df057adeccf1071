"""A warning of what a load leaves: saved values below the destination's containers that have no place in it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.calls.flattening import Path
from dcp_nvcomp.format.metadata.paths import paths_of


def warn_of_left(state: Mapping[str, Any], metadata: Metadata, loaded: Collection[str]) -> None:
    """Warn of saved values that have no place in the dicts and lists of a destination."""
    if metadata.state_dict_metadata.keys() <= set(loaded):
        return
    containers = {key for key, value in state.items() if isinstance(value, Mapping | list)}
    left = {fqn: path for fqn, path in paths_of(metadata).items() if fqn not in loaded and path[0] in containers}
    if not left:
        return
    shown = ", ".join(map(repr, list(left)[:3]))
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    message = (
        f"{len(left)} saved value(s) were not loaded, as the destination has no place for them: {shown}{more}. A load "
        "fills what the state dict has; CheckpointManager.restore brings back all that was saved, and open_checkpoint "
        "reads any of it."
    )
    if any(_is_below_empty(state, path) for path in left.values()):
        message += (
            " A dict that they belong to is empty: an optimizer has its state from the first step on; get_state_dict "
            "of torch.distributed.checkpoint.state_dict makes it before."
        )
    warnings.warn(message, UserWarning, stacklevel=2)


def _is_below_empty(state: Mapping[str, Any], path: Path) -> bool:
    value: Any = state
    for part in path:
        if not isinstance(value, Mapping):
            return False
        if not value:
            return True
        value = value.get(part if isinstance(part, str) else getattr(part, "value", None))
    return False

"""The values of a state dict: Stateful ones, and the one key under which DCP is given all of them.

DCP asks of each value of the dict whether it is Stateful: saving once, loading twice. This takes 34 us each, as long as
saving a small tensor. So our own calls ask first, of few, and DCP finds a single value, which `unwrapped` undoes in the
planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_nvcomp.errors import CheckpointError, ConfigurationError

__all__ = [
    "PLAIN_TENSORS",
    "ExpectsCheckpoint",
    "check_state_dict",
    "is_default_planner",
    "is_stateful",
    "try_check",
    "try_values_of",
    "unwrapped",
    "wrapped",
]

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_KEY = "state"
_PLAIN = (torch.Tensor, dict, list, tuple, int, float, str, bytes, type(None))


@runtime_checkable
class ExpectsCheckpoint(Protocol):
    """A Stateful value whose state dict depends on what the checkpoint has that is loaded next."""

    def expect(self, entries: Any) -> None:
        """Say what that checkpoint has below this value: `SavedEntry`s; None once the load is over."""


def is_stateful(value: Any) -> bool:
    """Return what `isinstance(value, Stateful)` does, quickly."""
    return type(value) not in _PLAIN and not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def check_state_dict(call: str, state_dict: Any) -> None:
    """Refuse what is no state dict.

    Args:
        call: name of the called function.
        state_dict: what it was given.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(state_dict, torch.nn.Module | torch.optim.Optimizer):
        raise ConfigurationError(
            f"{call} needs a dict, not a {type(state_dict).__name__}: pass {{'model': model.state_dict()}}, or "
            "get_state_dict of torch.distributed.checkpoint.state_dict."
        )
    if not isinstance(state_dict, dict):
        raise ConfigurationError(f"{call} needs a dict, not a {type(state_dict).__name__}: pass {{'state': ...}}.")
    for key in state_dict:
        if not isinstance(key, str):
            raise ConfigurationError(f"The keys of a state dict are text, and {key!r} is not.")


def try_check(call: str, state_dict: Any, *, alone: bool) -> ConfigurationError | None:
    """Check a state dict as `check_state_dict` does, but where other ranks wait only return what is wrong.

    Args:
        call: name of the called function.
        state_dict: what it was given.
        alone: whether no other rank takes part.

    Raises:
        ConfigurationError: it is none, and this process is alone.
    """
    try:
        check_state_dict(call, state_dict)
    except ConfigurationError as error:
        if alone:
            raise
        return error
    return None


def try_values_of(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], CheckpointError | None]:
    """Return a state dict with the state dicts of its Stateful values in their places.

    Returns:
        The values; and what was raised by one of them, for which the other ranks must not wait in vain.
    """
    values = {}
    for key, value in state_dict.items():
        try:
            values[key] = value.state_dict() if is_stateful(value) else value
        except CheckpointError as error:
            error.fqn = f"{key}.{error.fqn}" if error.fqn else key
            return {}, error
        except Exception as error:
            failure = CheckpointError(f"state_dict() raised {type(error).__name__}: {error}", fqn=key)
            failure.__cause__ = error
            return {}, failure
    return values, None


def is_default_planner(planner: object, kind: type) -> bool:
    """Return True if a planner is of this class of DCP's itself, and nobody has put methods of their own into it."""
    return type(planner) is kind and not any(map(callable, vars(planner).values()))


def wrapped(values: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with one value, to be given to DCP with a planner that knows of it."""
    return {_KEY: values}


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what was wrapped."""
    values: dict[str, Any] = state_dict[_KEY]
    return values

"""The values of a state dict: Stateful ones, at any depth, and the one key under which DCP is given all of them.

DCP knows Stateful values at the top of a state dict only, and asks of each value whether it is one, which takes as long
as saving a small tensor. So our calls ask first, and give DCP a single value, which the planner unwraps.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, MissingKeyError

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_KEY = "state"
_PLAIN = (torch.Tensor, dict, list, tuple, int, float, str, bytes, type(None))
_LEAVES = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, bytes, type(None))


@runtime_checkable
class ExpectsCheckpoint(Protocol):
    """A Stateful value whose state dict depends on what the checkpoint has that is loaded next."""

    def expect(self, entries: Any) -> None:
        """Say what that checkpoint has below this value: `SavedEntry`s; None once the load is over."""


def is_stateful(value: Any) -> bool:
    """Return what `isinstance(value, Stateful)` does, quickly; False for a class, whose objects may be Stateful."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | type):
        return False
    return hasattr(value, "state_dict") and isinstance(value, Stateful)


def check_state_dict(call: str, state_dict: Any) -> None:
    """Refuse what is no state dict."""
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
    """Check a state dict as `check_state_dict` does, but where other ranks wait only return what is wrong."""
    try:
        check_state_dict(call, state_dict)
    except ConfigurationError as error:
        if alone:
            raise
        return error
    return None


def try_values_of(
    state_dict: Mapping[str, Any], objects: Collection[str] = ()
) -> tuple[dict[str, Any], CheckpointError | None]:
    """Return a state dict with the state dicts of its Stateful values in their places."""
    values = {}
    for key, value in state_dict.items():
        try:
            values[key] = _state_dict_of(value) if is_stateful(value) else values_of(value, objects, str(key))
        except CheckpointError as error:
            error.fqn = f"{key}.{error.fqn}" if error.fqn else key
            return {}, error
        except RecursionError:
            return {}, ConfigurationError(
                "The state is nested too deeply, or contains itself, so it can't be saved or loaded: flatten it, or "
                "save parts of it.",
                fqn=key,
            )
        except Exception as error:  # of a container of the user's own
            failure = CheckpointError(f"Looking through this value raised {type(error).__name__}: {error}", fqn=key)
            failure.__cause__ = error
            return {}, failure
    return values, None


def values_of(value: Any, objects: Collection[str] = (), fqn: str = "") -> Any:
    """Return a value with the state dicts of the Stateful ones below it in their places."""
    if isinstance(value, MutableMapping | list):
        changed = {}
        for key, one in _items_of(value):
            if type(one) in _LEAVES:
                continue
            name = f"{fqn}.{key}" if fqn else str(key)
            try:
                found = _below(one, objects, name, is_object=fqn in objects)
            except CheckpointError as error:
                error.fqn = f"{key}.{error.fqn}" if error.fqn else str(key)
                raise
            if found is not one:
                changed[key] = found
        if changed:
            value = copy.copy(value)
            for key, one in changed.items():
                value[key] = one
    elif isinstance(value, tuple | set | frozenset | deque | Mapping):
        odd = _stateful_in(value.values() if isinstance(value, Mapping) else value)
        if odd is not None:
            raise ConfigurationError(
                f"A {type(odd).__name__}, which has state_dict and load_state_dict, lies in a {type(value).__name__}, "
                "which is saved as one object, so it could not be given back its state: put it into a dict or a list, "
                "or its state_dict() in its place."
            )
    return value


def _below(value: Any, objects: Collection[str], fqn: str, *, is_object: bool) -> Any:
    if not is_stateful(value):
        return values_of(value, {*objects, fqn} if is_object else objects, fqn)
    if isinstance(value, ExpectsCheckpoint):
        raise ConfigurationError(
            f"A {type(value).__name__} has to be at the top of the state dict, not in another dict or list: give it a "
            "key of its own."
        )
    return None if is_object or fqn in objects else _state_dict_of(value)


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(container.items()) if isinstance(container, Mapping) else list(enumerate(container))


def _stateful_in(values: Iterable[Any]) -> Any:
    """Return a Stateful value in nested containers; None if there is none."""
    for value in values:
        if is_stateful(value):
            return value
        if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            found = _stateful_in(value.values() if isinstance(value, Mapping) else value)
            if found is not None:
                return found
    return None


def _state_dict_of(value: Any) -> Any:
    try:
        return value.state_dict()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"state_dict() raised {type(error).__name__}: {error}") from error


def has_stateful(value: Any) -> bool:
    """Return True if there is a Stateful value below dicts and lists, or this is one."""
    return _stateful_in([value]) is not None


def check_given(own: Any, loaded: Any, fqn: str = "") -> None:
    """Refuse a Stateful value for which nothing was loaded."""
    if own is loaded or is_stateful(own) or not has_stateful(own):
        return
    is_dict = isinstance(own, Mapping) and isinstance(loaded, Mapping)
    if not is_dict and not (isinstance(own, list) and isinstance(loaded, list)):
        raise MissingKeyError(f"A {type(loaded).__name__} was saved here, with nothing for the values below.", fqn=fqn)
    there = dict(_items_of(loaded))
    for key, one in _items_of(own):
        name = f"{fqn}.{key}" if fqn else str(key)
        if key in there:
            check_given(one, there[key], name)
        elif has_stateful(one):
            raise MissingKeyError("Nothing was saved for this value.", fqn=name)


def give(own: Any, loaded: Any) -> None:
    """Give a Stateful value what was loaded, or what a whole object has that was loaded."""
    own.load_state_dict(loaded.state_dict() if is_stateful(loaded) else loaded)


def given_back(own: Any, loaded: Any) -> Any:
    """Return a value of a state dict after a load, in which Stateful ones have been given theirs."""
    if own is loaded:
        return own
    if is_stateful(own):
        give(own, loaded)
        return own
    is_dict = isinstance(own, MutableMapping) and isinstance(loaded, Mapping)
    if is_dict or (isinstance(own, list) and isinstance(loaded, list)):
        if is_dict:
            for key, value in loaded.items():
                own[key] = given_back(own[key], value) if key in own else value
        else:
            kept = [given_back(one, value) for one, value in zip(own, loaded, strict=False)]
            own[:] = [*kept, *loaded[len(kept) :]]
        return own
    return loaded


def check_given_storage(call: str, given: object, wanted: type, role: str, options: Collection[str]) -> None:
    """Refuse a storage writer or reader of another kind, and options beside one."""
    if not isinstance(given, wanted):
        is_other = isinstance(given, StorageReader if role == "writer" else StorageWriter)
        does = "loading" if role == "writer" else "saving"
        advice = f"it is for {does}" if is_other else f"use dcp.{call} with other {role}s"
        raise ConfigurationError(f"{call} needs an {wanted.__name__}, not a {type(given).__name__}: {advice}.")
    if options:
        raise ConfigurationError(f"Give {', '.join(sorted(options))} to the {role}: there is a storage_{role}.")


def is_default_planner(planner: object, kind: type) -> bool:
    """Return True if a planner is of this class of DCP's itself, without methods that were put into it."""
    return type(planner) is kind and not any(map(callable, vars(planner).values()))


def wrapped(values: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with one value, to be given to DCP with a planner that knows of it."""
    return {_KEY: values}


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what was wrapped."""
    values: dict[str, Any] = state_dict[_KEY]
    return values

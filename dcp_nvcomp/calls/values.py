"""The values of a state dict: Stateful ones, at any depth, and nested ones by name, as DCP names them.

DCP knows Stateful values at the top of a state dict only, and asks of each value whether it is one, which takes as long
as saving a small tensor. So our calls ask first, and give DCP a single value, which the planner unwraps.

Unlike in DCP's `flatten_state_dict`, a path has each key of a dict as it is, not as text, an empty dict is a value, and
so is, as a whole, a dict with keys that no path can have, such as members of an enum.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import torch
from torch.distributed.checkpoint.stateful import Stateful

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


def expects_checkpoint(value: Any) -> TypeGuard[ExpectsCheckpoint]:
    """Return what `isinstance(value, ExpectsCheckpoint)` does, which takes 10 us for each tensor of a state."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | type):
        return False
    return isinstance(value, ExpectsCheckpoint)


def check_state_dict(call: str, state_dict: Any) -> None:
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
    if expects_checkpoint(value):
        raise ConfigurationError(
            f"A {type(value).__name__} has to be at the top of the state dict, not in another dict or list: give it a "
            "key of its own."
        )
    return None if is_object or fqn in objects else _state_dict_of(value)


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(container.items()) if isinstance(container, Mapping) else list(enumerate(container))


def _stateful_in(values: Iterable[Any]) -> Any:
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


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is no dict, list or tuple in nested containers."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from leaves(one)


def has_stateful(value: Any) -> bool:
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


def is_default_planner(planner: object, kind: type) -> bool:
    """Return True if a planner is of this class of DCP's itself, without methods that were put into it."""
    return type(planner) is kind and not any(map(callable, vars(planner).values()))


def wrapped(values: dict[str, Any]) -> dict[str, Any]:
    return {_KEY: values}


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = state_dict[_KEY]
    return values


_SCALAR_KEYS: Final = (bool, int, float, bytes, type(None))
_MAX_DEPTH: Final = 16


@dataclass(frozen=True)
class Key:
    """A part of a path that is a key of a dict and no text."""

    value: Any  # an int, bool, float, None, bytes, or a tuple of these and of text

    def __str__(self) -> str:
        return str(self.value)


class Vacant:
    """The place of a value that is not there yet, in lists and dicts that are taken apart for it."""


# Text and `Key`s are keys of dicts, numbers are positions in lists.
Path = tuple["str | int | Key", ...]


@dataclass(frozen=True)
class Flattened:
    values: dict[str, Any]  # what is no container, by name
    paths: dict[str, Path]  # the place of each value in the state, by name


def flatten(state: Mapping[str, Any]) -> Flattened:
    return _flatten(state, _is_value)


def flatten_as_stock(state: Mapping[str, Any]) -> Flattened:
    """Take a state apart into the names that DCP gives; paths have the keys as they are."""
    return _flatten(
        state, lambda value, _: not isinstance(value, Mapping) and (not isinstance(value, list) or _is_flat(value))
    )


def flatten_as_2_3(state: Mapping[str, Any]) -> Flattened:
    """Take a state apart as DCP did up to torch 2.3: a dict or list without tensors was a value."""
    return _flatten(state, lambda value, _: not isinstance(value, Mapping | list) or not _has_tensors(value))


def _flatten(state: Mapping[str, Any], is_value: Callable[[Any, str], bool]) -> Flattened:
    found = Flattened({}, {})
    for key, value in state.items():
        part = _part(key)
        _take(value, str(part), (part,), is_value, found)
    return found


def _take(value: Any, fqn: str, path: Path, is_value: Callable[[Any, str], bool], found: Flattened) -> None:
    if isinstance(value, torch.Tensor) or is_value(value, fqn):
        if fqn in found.values:
            places = f"at {_shown(found.paths[fqn])} and at {_shown(path)}"
            raise ConfigurationError(f"Two values have this name, {places}: rename one of their keys.", fqn=fqn)
        found.values[fqn], found.paths[fqn] = value, path
    elif isinstance(value, Mapping):
        for key, one in value.items():
            part = key if type(key) is str else _part(key)
            _take(one, f"{fqn}.{part}", (*path, part), is_value, found)
    else:
        for number, one in enumerate(value):
            _take(one, f"{fqn}.{number}", (*path, number), is_value, found)


def _is_value(value: Any, fqn: str) -> bool:
    if isinstance(value, Mapping):
        if all(map(is_key, value)):
            return not value
        if _has_tensors(value):
            odd = next(key for key in value if not is_key(key))
            raise ConfigurationError(
                f"A key of this dict is {odd!r}, a {type(odd).__name__}: where a dict has tensors in it, its keys have "
                "to be text, numbers, bytes, None, or tuples of these.",
                fqn=fqn,
            )
        return True
    return not isinstance(value, list) or _is_flat(value)


def _is_flat(values: list[Any]) -> bool:
    """Return True for a list with neither tensors nor dicts in it, which DCP does not take apart."""
    kinds = (torch.Tensor, Mapping, Vacant)
    return not any(isinstance(one, kinds) or (isinstance(one, list) and not _is_flat(one)) for one in values)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def is_key(key: Any, depth: int = 0) -> bool:
    if isinstance(key, str):
        return type(key) is str or str(key) == key  # unlike a member of an enum that is text
    if type(key) is tuple:
        return depth < _MAX_DEPTH and all(is_key(part, depth + 1) for part in key)
    if isinstance(key, float):
        return not math.isnan(key)  # which is equal to no key
    return isinstance(key, _SCALAR_KEYS) or _is_integer(key)


def _is_integer(key: Any) -> bool:
    return type(key).__module__ == "numpy" and hasattr(key, "__index__")


def _part(key: Any) -> str | Key:
    return str(key) if isinstance(key, str) else Key(_plain(key))


def _plain(key: Any) -> Any:
    """Return the plain value that is equal to a key, such as an int instead of a numpy integer."""
    kinds: tuple[type[Any], ...] = (str, bool, float, bytes)
    for kind in kinds:
        if isinstance(key, kind):
            return kind(key)
    if isinstance(key, tuple):
        return tuple([_plain(part) for part in key]) if is_key(key) else key
    return operator.index(key) if isinstance(key, int) or _is_integer(key) else key


def fqn_of(path: Sequence[object]) -> str:
    return ".".join(map(str, path))


def _shown(path: Path) -> str:
    return "".join(f"[{part.value if isinstance(part, Key) else part!r}]" for part in path)


def nested(paths: Mapping[str, Path], values: Mapping[str, Any]) -> Any:
    """Put values together in dicts and lists; a list of which parts are missing becomes a dict."""
    root = _Node()
    for fqn, path in paths.items():
        node: Any = root
        for part in path[:-1]:
            node = node.setdefault(part, _Node())
            if type(node) is not _Node:
                raise CheckpointError("This value lies in another one, which is no dict or list.", fqn=fqn)
        if path[-1] in node:
            raise CheckpointError("Another value is in the place of this one.", fqn=fqn)
        node[path[-1]] = values[fqn]
    return _with_lists(root)


class _Node(dict[Any, Any]):
    """A dict or list that was flattened: not to be taken for a value that is a dict."""


def _with_lists(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    is_list = node and all(type(part) is int for part in node) and node.keys() == set(range(len(node)))
    if is_list:
        return [_with_lists(node[number]) for number in range(len(node))]
    return {part.value if type(part) is Key else part: _with_lists(value) for part, value in node.items()}


def replace_at(state: MutableMapping[str, Any], path: Path, value: Any) -> None:
    container: Any = state
    for part in path[:-1]:
        container = container[part.value if type(part) is Key else part]
    last = path[-1]
    container[last.value if type(last) is Key else last] = value

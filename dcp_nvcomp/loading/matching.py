"""What of a checkpoint goes where in a nested destination.

A value goes to the one of the same name unless their keys differ: 7 is not "7" (in stock checkpoints all keys are text,
so there names alone count). `_orig_mod.w` takes `w`, and the other way round. `ParameterNames` does the same for the
names that the state of an optimizer has as values and keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_nvcomp.calls.flattening import Flattened, Key, Path, canonical_name, flatten, flatten_as_2_3, flatten_as_stock
from dcp_nvcomp.calls.values import PLAIN_TENSORS
from dcp_nvcomp.errors import MissingKeyError
from dcp_nvcomp.format.metadata.paths import has_keys, paths_of

_EXTRA_STATE: Final = "_extra_state"

_GROUPS: Final = "param_groups"
_STATE: Final = "state"
_NAMES: Final = ("params", "param_names")


@dataclass(frozen=True)
class Matched:
    """The values of a destination."""

    values: dict[str, Any]  # by the names of the checkpoint; those that it lacks by their own
    paths: dict[str, Path]  # their places in the destination
    made: frozenset[str]  # the names of tensors that are not in the destination, and have to take the place of what is


def match(state: Mapping[str, Any], metadata: Metadata) -> Matched:
    """Match the values of a destination with those of a checkpoint."""
    saved = metadata.state_dict_metadata
    flat = flatten(state) if has_keys(metadata) else _flatten_as_saved(state, metadata)
    values = {fqn: value for fqn, value in flat.values.items() if fqn in saved or not _is_empty(value)}
    names = saved_names(values, saved)
    paths = {names[fqn]: flat.paths[fqn] for fqn in values}
    if has_keys(metadata):
        _refuse_other_keys(paths, metadata)
    found, made = {}, set()
    for fqn, value in values.items():
        name = names[fqn]
        found[name] = _place_of(value, saved.get(name)) if is_extra_state(name) else value
        if found[name] is not value and isinstance(found[name], torch.Tensor):
            made.add(name)
    return Matched(found, paths, frozenset(made))


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _flatten_as_saved(state: Mapping[str, Any], metadata: Metadata) -> Flattened:
    """Take a destination apart as DCP did that wrote the checkpoint: torch 2.3 and before had other names."""
    flat = flatten_as_stock(state)
    others = metadata.state_dict_metadata.keys() - flat.values.keys()
    if others:
        older = flatten_as_2_3(state)
        if older.values.keys() & others:
            return older
    return flat


def saved_names(names: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Return for each name that of the checkpoint: the same, or the one that differs in wrappers of modules only."""
    found = {fqn: fqn for fqn in names}
    if any(fqn not in saved for fqn in names):
        there, wanted = _by_canonical_name(saved), _by_canonical_name(names)
        for fqn in names:
            name = canonical_name(fqn)
            if fqn not in saved and len(wanted[name]) == 1 == len(there.get(name, ())):
                found[fqn] = there[name][0]
    return found


def _by_canonical_name(names: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for fqn in names:
        found.setdefault(canonical_name(fqn), []).append(fqn)
    return found


def _refuse_other_keys(paths: Mapping[str, Path], metadata: Metadata) -> None:
    saved = paths_of(metadata)
    for fqn, path in paths.items():
        there = saved.get(fqn, ())
        if len(path) != len(there):
            continue  # other nesting, as of flat names: the keys are not the same in number
        for own, other in zip(path, there, strict=True):
            if {type(own), type(other)} == {Key, str}:
                own, other = (part.value if type(part) is Key else part for part in (own, other))
                raise MissingKeyError(
                    f"The destination has the key {own!r} of type {type(own).__name__}, but {other!r} of type "
                    f"{type(other).__name__} was saved: use that key.",
                    fqn=fqn,
                )


def is_extra_state(fqn: str) -> bool:
    """Return True for what modules make of themselves by `get_extra_state`, and take back whatever it has become."""
    return fqn == _EXTRA_STATE or fqn.endswith(f".{_EXTRA_STATE}")


def _place_of(value: Any, item: Any) -> Any:
    """Return what to load extra state into: the value if it fits, else a new tensor; None for an object."""
    if not isinstance(item, TensorStorageMetadata):
        return None if isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor) and type(value) not in PLAIN_TENSORS:
        return value
    dtype = item.properties.dtype
    if isinstance(value, torch.Tensor) and value.shape == item.size and value.dtype == dtype:
        return value
    return torch.empty(item.size, dtype=dtype, device=value.device if isinstance(value, torch.Tensor) else "cpu")


class ParameterNames:
    """The names that optimizers of a destination have."""

    def __init__(self, flat: Flattened) -> None:
        self._own: dict[Path, dict[str, None]] = {}
        for fqn, path in flat.paths.items():
            if is_place_of_names(path):
                self._add(path[:-3], flat.values[fqn])
            elif path[-1] == _GROUPS and isinstance(flat.values[fqn], list):  # as a whole, of torch 2.3 and before
                for group in flat.values[fqn]:
                    for key in _NAMES:
                        self._add(path[:-1], group.get(key) if isinstance(group, dict) else None)

    def _add(self, place: Path, names: Any) -> None:
        if _are_names(names):
            self._own.setdefault(place, {}).update(dict.fromkeys(names))

    def renamed(self, value: Any, path: Path) -> Any:
        """Return a value that was loaded, with the destination's names of parameters if it consists of such."""
        if path[-1] == _GROUPS and isinstance(value, list) and self._own:
            return [
                {key: self.renamed(one, (*path, number, key)) for key, one in group.items()}
                if type(group) is dict
                else group
                for number, group in enumerate(value)
            ]
        if not is_place_of_names(path) or not _are_names(value):
            return value
        own = self._own_of(path[:-3], value)
        return [own.get(name, name) for name in value]

    def moved(self, paths: Iterable[Path]) -> dict[Path, Path]:
        """Return for places of state of parameters where it belongs in the destination, if that is elsewhere."""
        found: dict[Path, list[Path]] = {}
        for path in paths:
            place = self._optimizer_of(path)
            if place is not None:
                found.setdefault(place, []).append(path)
        moved: dict[Path, Path] = {}
        for place, ones in found.items():
            at = len(place) + 1
            own = self._own_of(place, {str(path[at]) for path in ones})
            moved |= {path: (*path[:at], own[name], *path[at + 1 :]) for path in ones if (name := str(path[at])) in own}
        return moved

    def _optimizer_of(self, path: Path) -> Path | None:
        places = (path[:at] for at in range(len(path) - 1) if path[at] == _STATE and isinstance(path[at + 1], str))
        return next((place for place in places if place in self._own), None)

    def _own_of(self, place: Path, saved: Iterable[str]) -> dict[str, str]:
        names = saved_names(self._own.get(place, {}), list(dict.fromkeys(saved)))
        return {name: own for own, name in names.items()}


def is_place_of_names(path: Path) -> bool:
    """Return True for the place of the parameters of a group."""
    return len(path) > 2 and path[-3] == _GROUPS and type(path[-2]) is int and path[-1] in _NAMES


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)

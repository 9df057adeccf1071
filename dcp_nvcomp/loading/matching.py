"""What of a checkpoint goes where in a nested destination.

A value goes to the one of the same name unless their keys differ: 7 is not "7" (in stock checkpoints all keys are text,
so there names alone count). `_orig_mod.w` takes `w`, and the other way round. `ParameterNames` does the same for the
names that the state of an optimizer has as values and keys.

A `WholeValue` comes back as it was saved, whatever the destination has room for: it is loaded into nested containers as
they were saved, with tensors of the destination where it has them; its own containers get what these hold.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_nvcomp.calls.values import (
    PLAIN_TENSORS,
    Flattened,
    Key,
    Path,
    Vacant,
    check_given,
    flatten,
    flatten_as_2_3,
    flatten_as_stock,
    give,
    is_stateful,
    nested,
    values_of,
)
from dcp_nvcomp.errors import CheckpointError, MissingKeyError
from dcp_nvcomp.format.metadata.paths import SavedEntry, has_keys, paths_of
from dcp_nvcomp.loading.mixed_kinds import of_one_kind

# What torch.compile, DDP, activation checkpointing and FSDP1 put into the names of parameters.
_WRAPPERS: Final = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_EXTRA_STATE: Final = "_extra_state"

_GROUPS: Final = "param_groups"
_STATE: Final = "state"
_NAMES: Final = ("params", "param_names")


@dataclass(frozen=True)
class Matched:
    values: dict[str, Any]  # by the names of the checkpoint; those that it lacks by their own
    paths: dict[str, Path]  # their places in the destination
    made: frozenset[str]  # the names of tensors that are not in the destination, and have to take the place of what is


def match(state: Mapping[str, Any], metadata: Metadata) -> Matched:
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


def canonical_name(fqn: str) -> str:
    """Return a name without what wrappers of modules put into it."""
    if "_" not in fqn and "module" not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


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
    return len(path) > 2 and path[-3] == _GROUPS and type(path[-2]) is int and path[-1] in _NAMES


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


class WholeValue:
    def __init__(self, value: Any) -> None:
        self.value = value
        self._own: Any = None
        self._entries: Sequence[SavedEntry] | None = None

    def expect(self, entries: Sequence[SavedEntry] | None) -> None:
        """Take what the checkpoint has for the value; see `ExpectsCheckpoint`."""
        self._entries = entries

    def state_dict(self) -> Any:
        objects = [one.fqn for one in self._entries or () if not isinstance(one.item, TensorStorageMetadata)]
        self._own = self.value.state_dict() if is_stateful(self.value) else values_of(self.value, objects)
        return self._own if self._entries is None else completed(self._own, self._entries, _stateful_in(self.value))

    def load_state_dict(self, loaded: Any) -> None:
        if is_stateful(self.value):
            # in new containers: what it gave may be its own
            self.value.load_state_dict(_of_its_kind(self._own, loaded))
        else:
            check_given(self.value, loaded)
            self.value = _replaced(self.value, self._own, loaded, set())


def completed(own: Any, entries: Sequence[SavedEntry], given: Collection[Path] = ()) -> Any:
    """Return nested containers with a place for each saved value."""
    entries = of_one_kind(own, entries)
    if not entries:
        return own
    if not entries[0].path and not isinstance(own, Mapping):  # a value that is no container
        return _place_for(entries[0], own)
    flat = flatten(own) if isinstance(own, Mapping) else flatten({"": own})
    if not isinstance(own, Mapping):
        flat = Flattened(
            {fqn.removeprefix("."): value for fqn, value in flat.values.items() if fqn},
            {fqn.removeprefix("."): path[1:] for fqn, path in flat.paths.items() if fqn},
        )
    saved = {entry.fqn: entry for entry in entries}
    names = {name: fqn for fqn, name in saved_names(flat.values, saved).items()}
    moved = ParameterNames(flat).moved(entry.path for fqn, entry in saved.items() if fqn not in names)
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for fqn, entry in saved.items():
        own_fqn = names.get(fqn)
        value = None if own_fqn is None else flat.values[own_fqn]
        is_own = own_fqn is not None and (not entry.has_keys or _has_its_keys(flat.paths[own_fqn], entry.path, value))
        paths[fqn] = flat.paths[own_fqn] if is_own and own_fqn is not None else moved.get(entry.path, entry.path)
        is_data = _is_in_list(paths[fqn]) or _is_opaque(paths[fqn])
        fits = is_own and not (is_data and _has_another_shape(value, entry))
        values[fqn] = _place_for(entry, value if fits else None)
        if fits and isinstance(value, torch.Tensor) and not is_data and not _is_below(paths[fqn], given):
            values[fqn] = value  # if an object was saved, the load raises
    places = {entry.path: entry for entry in entries}
    containers = {entry.path[:end]: entry for entry in entries for end in range(len(entry.path))}
    for name, own_fqn in names.items():
        path = flat.paths[own_fqn]
        is_missed = isinstance(flat.values[own_fqn], torch.Tensor) and not (_is_in_list(path) or _is_opaque(path))
        if name in saved or not is_missed:
            continue
        above = next((places[path[:end]] for end in range(len(path)) if path[:end] in places), None)
        if above is None and path not in containers:
            values[name], paths[name] = flat.values[own_fqn], path  # which the load reports as missing
        elif not _is_below(path, given):
            there = _kind_of(above) if above else f"a dict or list in its place, with {containers[path].fqn!r}"
            raise MissingKeyError(
                f"The destination has a tensor here, but there is none in the checkpoint, which has {there}.",
                fqn=own_fqn,
            )
    return nested(paths, values) if entries[0].path else values[entries[0].fqn]


def _kind_of(above: SavedEntry) -> str:
    kind = "a tensor" if isinstance(above.item, TensorStorageMetadata) else "an object, such as an empty dict,"
    return f"{kind} in the place of a dict above it"


def _stateful_in(value: Any, path: Path = ()) -> list[Path]:
    if is_stateful(value):
        return [path]
    if not isinstance(value, Mapping | list):
        return []
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [
        found for key, one in items if not isinstance(one, torch.Tensor) for found in _stateful_in(one, (*path, key))
    ]


def _is_below(path: Path, places: Collection[Path]) -> bool:
    plain = tuple(part.value if type(part) is Key else part for part in path)
    return any(plain[: len(place)] == place for place in places)


def _is_in_list(path: Path) -> bool:
    """Return True for what is data as a whole, such as a buffer of samples; a dict's tensors may be a module's."""
    return any(type(part) is int for part in path)


def _is_opaque(path: Path) -> bool:
    """Return True for what only a module's `set_extra_state` understands."""
    return any(isinstance(part, str) and is_extra_state(part) for part in path)


def _has_another_shape(own: Any, entry: SavedEntry) -> bool:
    item = entry.item
    return type(own) is torch.Tensor and isinstance(item, TensorStorageMetadata) and own.shape != item.size


def _has_its_keys(own: Path, saved: Path, value: Any) -> bool:
    """Return whether an own path may be that of a saved value: a list has positions where another rank has keys."""
    if len(own) != len(saved):
        return True
    differing = [
        {type(one), type(other)} for one, other in zip(own, saved, strict=True) if type(one) is not type(other)
    ]
    return not differing or (isinstance(value, torch.Tensor) and {Key, str} not in differing)


def _place_for(entry: SavedEntry, own: Any) -> Any:
    item = entry.item
    if not isinstance(item, TensorStorageMetadata):
        # names are compared with those that are loaded
        return own if is_place_of_names(entry.path) and isinstance(own, list) else Vacant()
    if isinstance(own, torch.Tensor):
        return own
    if len(item.chunks) > 1:
        raise CheckpointError(
            f"This was saved in {len(item.chunks)} shards and has no place in the destination, so it is not known how "
            "to shard it: let the state have such a tensor before it is restored, as get_state_dict of "
            "torch.distributed.checkpoint.state_dict and TrainingState do for optimizers.",
            fqn=entry.fqn,
        )
    return torch.empty(item.size, dtype=item.properties.dtype)


def _replaced(own: Any, given: Any, loaded: Any, filled: set[int]) -> Any:
    """Return what was loaded, in the containers that the destination has; one that it has twice is copied."""
    if is_stateful(own):
        give(own, _of_its_kind(given, loaded))
        return own
    if id(own) in filled:
        return _of_its_kind(own, loaded) if given is own else own
    if isinstance(own, MutableMapping) and isinstance(loaded, Mapping):
        filled.add(id(own))
        for key in [key for key in own if key not in loaded]:
            del own[key]
        for key, value in loaded.items():
            own[key] = _replaced(own[key], given[key], value, filled) if key in own else value
        return own
    if isinstance(own, list) and isinstance(loaded, list):
        filled.add(id(own))
        kept = [_replaced(*three, filled) for three in zip(own, given, loaded, strict=False)]
        own[:] = [*kept, *loaded[len(kept) :]]
        return own
    return loaded


def _of_its_kind(own: Any, loaded: Any) -> Any:
    """Return what was loaded, in new containers of the kinds that the destination has."""
    is_dict = isinstance(own, MutableMapping) and isinstance(loaded, Mapping)
    if not is_dict and not (isinstance(own, list) and isinstance(loaded, list)):
        return loaded
    made = copy.copy(own)
    made.clear()
    if is_dict:
        for key, value in loaded.items():
            made[key] = _of_its_kind(own[key], value) if key in own else value
    else:
        kept = [_of_its_kind(one, value) for one, value in zip(own, loaded, strict=False)]
        made.extend([*kept, *loaded[len(kept) :]])
    return made

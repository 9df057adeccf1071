"""Values that come back as they were saved, whatever the destination has room for.

They are loaded into nested containers as they were saved, with tensors of the destination where it has them; afterwards
the destination's own containers get what these hold.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_nvcomp.calls.flattening import Flattened, Key, Path, Vacant, flatten, nested
from dcp_nvcomp.calls.values import check_given, give, is_stateful, values_of
from dcp_nvcomp.errors import CheckpointError, MissingKeyError
from dcp_nvcomp.format.metadata.paths import SavedEntry
from dcp_nvcomp.loading.matching import ParameterNames, is_extra_state, is_place_of_names, saved_names


class WholeValue:
    """A value of a state dict that is loaded as a whole; Stateful, for `load`."""

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
        is_own = own_fqn is not None and (not entry.has_keys or _has_its_keys(flat.paths[own_fqn], entry.path))
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
    """Return the places of the Stateful values in nested containers."""
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


def _has_its_keys(own: Path, saved: Path) -> bool:
    return len(own) != len(saved) or all(
        {type(one), type(other)} != {Key, str} for one, other in zip(own, saved, strict=True)
    )


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

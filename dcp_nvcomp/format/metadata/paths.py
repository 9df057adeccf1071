"""Where each value was in the nested state, as `.metadata` has it: in planner_data, which is DCP's own place for that.

    planner_data["seen.7"] = ("seen", "7")                        as DCP stores it: keys of dicts are text
    planner_data[".keys"]  = ((("seen", "7"), 7), ...)            those that were not text

If a value has the name `.keys` itself, the first of `..keys`, `...keys` that is free is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from dcp_nvcomp.calls.values import Key, Path, fqn_of, is_key
from dcp_nvcomp.errors import ConfigurationError

_KEYS: Final = ".keys"
# A state is not nested so deeply: DCP and pickle take it apart by recursion.
_MAX_PARTS: Final = 256

_Stored = tuple["str | int", ...]


@dataclass(frozen=True)
class SavedEntry:
    """A value of a checkpoint, as `.metadata` describes it."""

    fqn: str
    path: Path  # its place in the nested state
    item: TensorStorageMetadata | BytesStorageMetadata
    has_keys: bool = True


StoredPaths = tuple[Mapping[str, Any], Mapping[_Stored, Any]]  # as DCP stores them; and the keys that were not text


def paths_to_store(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return paths as `.metadata` has them."""
    stored, keys = stored_paths(paths)
    return {**stored, _name_of_keys(stored): tuple(keys.items())}


def stored_paths(paths: Mapping[str, Path]) -> StoredPaths:
    """Return paths as DCP stores them, and which of their parts were not text."""
    stored: dict[str, Any] = dict(paths)
    keys: dict[_Stored, Any] = {}
    for fqn, path in paths.items():
        if Key in map(type, path):
            stored[fqn] = _as_stored(path)
            keys |= {_as_stored(path[: at + 1]): part.value for at, part in enumerate(path) if type(part) is Key}
    if keys:
        for path in paths.values():
            for at, part in enumerate(path):
                begin = _as_stored(path[: at + 1])
                if begin in keys and (type(part) is not Key or repr(part.value) != repr(keys[begin])):
                    raise ConfigurationError(
                        f"Two keys of a dict look alike here, {keys[begin]!r} and {getattr(part, 'value', part)!r}: "
                        "rename one of them.",
                        fqn=fqn_of(begin),
                    )
    return stored, keys


def split_paths(stored: Mapping[str, Any], fqns: Collection[str]) -> StoredPaths:
    """Return apart what `paths_to_store` has put together; `fqns` are names of values, perhaps of other ranks too."""
    name = _name_of_keys({fqn for fqn in stored if fqn in fqns})
    return {fqn: path for fqn, path in stored.items() if fqn != name}, dict(stored.get(name, ()))


def merged_paths(parts: Iterable[StoredPaths], fqns: Collection[str]) -> dict[str, Any]:
    """Return the stored paths of several ranks as one; where they differ, the first rank's count."""
    merged: dict[str, Any] = {}
    keys: dict[_Stored, Any] = {}
    of_ranks = list(parts)
    for paths, own in of_ranks:
        for begin, key in own.items():
            keys.setdefault(begin, key)
        for fqn, path in paths.items():
            merged.setdefault(fqn, path)
    if keys:
        for paths, own in of_ranks:
            for begin in {path[: at + 1] for path in paths.values() for at in range(len(path))} & keys.keys():
                if begin not in own or repr(own[begin]) != repr(keys[begin]):
                    raise ConfigurationError(
                        f"Ranks have different keys here that look alike, one of them {keys[begin]!r}.",
                        fqn=fqn_of(begin),
                    )
    merged[_name_of_keys(fqns)] = tuple(keys.items())
    return merged


def _name_of_keys(fqns: Collection[str]) -> str:
    name = _KEYS
    while name in fqns:
        name = f".{name}"
    return name


def _as_stored(path: Path) -> _Stored:
    return tuple([str(part) if isinstance(part, Key) else part for part in path])


def _planner_data(metadata: Metadata) -> Mapping[str, Any]:
    return metadata.planner_data if isinstance(metadata.planner_data, dict) else {}


def has_keys(metadata: Metadata) -> bool:
    """Return True if a checkpoint says which keys were not text; False for those of stock DCP."""
    return _name_of_keys(metadata.state_dict_metadata) in _planner_data(metadata)


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """Return for each value of a checkpoint its place in the state; its name, if none was stored."""
    stored, keys = _planner_data(metadata), _keys_of(metadata)
    paths: dict[str, Path] = {}
    described = metadata.state_dict_metadata
    for fqn in dict.fromkeys([*(fqn for fqn in stored if fqn in described), *described]):
        given: Any = stored.get(fqn)
        path: _Stored = tuple(given) if isinstance(given, tuple | list) and _is_stored(tuple(given)) else (fqn,)
        paths[fqn] = path
        if keys:
            parts = [(path[: at + 1], part) for at, part in enumerate(path)]
            paths[fqn] = tuple([Key(keys[begin]) if begin in keys else part for begin, part in parts])
    return paths


def _keys_of(metadata: Metadata) -> dict[_Stored, Any]:
    """Return the keys that were not text by their stored paths; only those that a path can have, as DCP writes them."""
    stored = _planner_data(metadata)
    noted = stored.get(_name_of_keys(metadata.state_dict_metadata))
    if not isinstance(noted, tuple | list):
        return {}
    pairs = [pair for pair in noted if isinstance(pair, tuple | list) and len(pair) == 2]
    return {path: key for path, key in pairs if _is_stored(path) and is_key(key) and str(key) == path[-1]}


def _is_stored(path: Any) -> bool:
    if not isinstance(path, tuple) or not 0 < len(path) <= _MAX_PARTS:
        return False
    return all(type(part) in (str, int) for part in path)


def saved_entries(metadata: Metadata, keys: Collection[str]) -> dict[str, list[SavedEntry]]:
    """Return the values of a checkpoint at and below some keys of the state, with names and places from there on."""
    found: dict[str, list[SavedEntry]] = {key: [] for key in keys}
    is_known = has_keys(metadata)
    for fqn, path in paths_of(metadata).items():
        if path[0] in found:
            below = path[1:]
            item = metadata.state_dict_metadata[fqn]
            found[str(path[0])].append(SavedEntry(fqn_of(below), below, item, is_known))
    return found


def paths_below(paths: Mapping[str, Path], key: str) -> dict[str, Path]:
    """Return the values below a place, each with its place from there on."""
    found = {}
    for fqn, path in paths.items():
        length = _length_of(path, key) if fqn.startswith(f"{key}.") else 0
        if length:
            found[fqn] = path[length:]
    return found


def _length_of(path: Sequence[object], key: str) -> int:
    """Return how many parts of a path have this name together; 0 if none have."""
    return max((length for length in range(1, len(path)) if fqn_of(path[:length]) == key), default=0)

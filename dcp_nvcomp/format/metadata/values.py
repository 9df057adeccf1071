"""The parts of `.metadata` that are not DCP's own: plain values, what the user trusts, and the planner's data."""

from __future__ import annotations

from typing import Any, Final

import torch

from dcp_nvcomp.errors import MetadataError, UnsafeMetadataError
from dcp_nvcomp.format.metadata.allowed_globals import Global, PickledDict, PickledList, PickledPath, TrustedCall, shown

_MAX_DEPTH: Final = 32
_SCALARS: Final = (bool, int, float, str, bytes, torch.Size, torch.layout, torch.memory_format)
_PATH_KINDS: Final = {str, int}


class ValueReader:
    """Turns parts of one tree into Python values, from one budget: time and memory are linear in the file's size."""

    def __init__(self, data_nbytes: int) -> None:
        self._budget = (1 << 16) + data_nbytes

    def spend(self, amount: int) -> None:
        """Pay for visiting `amount` parts; raise UnsafeMetadataError if the file is too small for so many."""
        self._budget -= amount
        if self._budget < 0:
            raise UnsafeMetadataError("The metadata repeats its parts more often than its size allows.")

    def planner_data(self, node: object) -> Any:
        """Return the planner's data: any plain values. The default planner stores each key's path in the state dict."""
        if type(node) is not PickledDict:
            return self.value(node, 0)
        paths = {}
        last_indices: dict[tuple[Any, ...], int] = {}
        pairs = pairs_of(node, "planner_data")
        for fqn, path in zip(pairs[::2], pairs[1::2], strict=True):
            if type(fqn) is not str:
                raise MetadataError(f"A key of planner_data is {shown(fqn)}, not text.")
            self.spend(1)
            paths[fqn] = self._path_in_state_dict(path, last_indices)
        # DCP's loader makes each list as long as its last index, before anything is loaded.
        if sum(last_indices.values()) > self._budget:
            raise UnsafeMetadataError("planner_data names list indices beyond any list that this file could describe.")
        return paths

    def _path_in_state_dict(self, path: Any, last_indices: dict[tuple[Any, ...], int]) -> Any:
        """Return a value of planner_data, and record the list indices in it by the path to their list."""
        if type(path) is PickledDict and not all(type(key) is str for key in path[::2]):
            raise MetadataError("planner_data has a dict with keys that are not text.")
        if type(path) is not tuple and type(path) is not PickledList:
            return self.value(path, 0)
        self.spend(len(path))
        kinds = {type(part) for part in path}
        if not kinds <= _PATH_KINDS:
            if int in kinds or float in kinds:
                raise MetadataError("planner_data has a path that leads nowhere.")
            return self.value(path, 0)
        if int in kinds:
            self._note_indices(tuple(path), last_indices)
        return path if type(path) is tuple else list(path)

    def _note_indices(self, path: tuple[Any, ...], last_indices: dict[tuple[Any, ...], int]) -> None:
        if type(path[0]) is not str:
            raise MetadataError("planner_data has a path that leads nowhere.")
        for position, part in enumerate(path):
            if type(part) is int:
                self.spend(position)
                prefix = path[:position]
                last_indices[prefix] = max(part, last_indices.get(prefix, 0))

    def value(self, node: Any, depth: int) -> Any:
        """Return a plain Python value, or one of a class that the user trusts; `depth` is its nesting."""
        self.spend(1)
        if depth > _MAX_DEPTH:
            raise UnsafeMetadataError(f"The metadata nests values more than {_MAX_DEPTH} deep, or inside themselves.")
        if node is None or isinstance(node, _SCALARS):
            return node
        if type(node) is tuple:
            return tuple([self.value(value, depth + 1) for value in node])
        if type(node) is PickledList:
            return [self.value(value, depth + 1) for value in node]
        if type(node) is PickledDict:
            return self._plain_dict(node, depth)
        if type(node) is TrustedCall:
            return self.trusted(node, depth)
        if type(node) is Global and node.value is not None:
            return node.value
        if type(node) is PickledPath and all(type(part) is str for part in node.parts):
            self.spend(sum(map(len, node.parts)))
            return node.kind(*node.parts)
        raise MetadataError(f"There is {shown(node)} where a plain value must be.")

    def _plain_dict(self, node: PickledDict, depth: int) -> dict[Any, Any]:
        keys = [self.value(key, depth + 1) for key in node[::2]]
        try:
            check_hashes([hash(key) for key in keys])
        except TypeError as error:
            raise MetadataError(f"A dict has a key that can't be hashed: {error}.") from error
        return {key: self.value(value, depth + 1) for key, value in zip(keys, node[1::2], strict=True)}

    def trusted(self, node: TrustedCall, depth: int) -> Any:
        """Make the call of a global that the user trusts, as Python's unpickler would."""
        if node.built is not None:
            return node.built
        depth += 1
        args = [self.value(value, depth) for value in node.args]
        list_items = [self.value(value, depth) for value in node.list_items]
        dict_items = self._plain_dict(PickledDict(node.dict_items), depth)
        state = self.value(node.state, depth)
        target = node.kind.value
        try:
            built = target.__new__(target, *args) if node.is_new else target(*args)
            if list_items:
                built.extend(list_items)
            for key, value in dict_items.items():
                built[key] = value
            if state is not None:
                _set_state(built, state)
        except Exception as error:
            raise MetadataError(f"{node.kind.name} can't be built: {type(error).__name__}: {error}.") from error
        node.built = built
        return built


def pairs_of(node: object, what: str) -> PickledDict:
    """Return the flat keys and values of a part that must be a dict; `what` is its name."""
    if type(node) is not PickledDict:
        raise MetadataError(f"{what} is {shown(node)}, not a dict.")
    return node


def check_hashes(hashes: list[int]) -> None:
    """Refuse colliding keys: numbers hash alike in every process, so a file could make a dict quadratic."""
    if len(set(hashes)) + 100 < len(hashes):
        raise UnsafeMetadataError("The metadata has a dict whose keys are equal, or made to collide.")


def _set_state(built: Any, state: Any) -> None:
    if hasattr(built, "__setstate__"):
        built.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    built.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(built, name, value)

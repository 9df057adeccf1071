"""Names of parameters that the state of an optimizer has as values and keys, as the destination calls them.

    {"state": {"0.weight": {...}}, "param_groups": [{"params": ["0.weight"], "lr": 0.1}]}

Keys are matched across wrappers of modules, and these follow them: torch's `set_state_dict` passes over the options of
a group whose parameters it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dcp_nvcomp.calls.flattening import Flattened, Path
from dcp_nvcomp.loading.matching import saved_names

_GROUPS: Final = "param_groups"
_STATE: Final = "state"
_NAMES: Final = ("params", "param_names")


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

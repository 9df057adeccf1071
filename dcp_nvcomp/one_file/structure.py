"""Nested state taken apart into tensors and a skeleton, and put together again.

dicts, lists, tuples  ->  {"dict": [[key, part], ...]}, {"list": [...]}, {"tuple": [...]}
tensors               ->  {"tensor": number}, the same elements of memory once, so that what is tied stays tied
anything else         ->  {"value": it}, pickled with the skeleton
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_nvcomp.engines.tensors import is_transparent, memory_of
from dcp_nvcomp.errors import CheckpointError


@dataclass(frozen=True)
class Parts:
    """A state in parts.

    Attributes:
        skeleton: nested plain containers.
        tensors: by key; the skeleton has their positions.
    """

    skeleton: Any
    tensors: Mapping[str, torch.Tensor]


def take_apart(state: Any) -> Parts:
    """Return a state in parts; nothing is copied."""
    taker = _Taker()
    try:
        return Parts(taker.part(state, ""), taker.tensors)
    except RecursionError:
        raise CheckpointError(
            "The state is nested too deeply, or contains itself, so it can't be saved: flatten it, or save parts of it."
        ) from None


class _Taker:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[Hashable, int] = {}

    def part(self, value: Any, key: str) -> dict[str, Any]:
        kind = type(value)
        if kind in (dict, OrderedDict):
            name = "dict" if kind is dict else "ordered"
            return {name: [[one, self.part(part, _below(key, one))] for one, part in value.items()]}
        if kind in (list, tuple):
            return {kind.__name__: [self.part(one, _below(key, at)) for at, one in enumerate(value)]}
        if kind in (torch.Tensor, torch.nn.Parameter) and is_transparent(value) and value.layout == torch.strided:
            return self._tensor(value, key)
        return {"value": value}

    def _tensor(self, tensor: torch.Tensor, key: str) -> dict[str, Any]:
        memory = memory_of(tensor)
        number = self._numbers.get(memory)
        if number is None:
            number = self._numbers[memory] = len(self.tensors)
            self.tensors[_unused(key or "state", self.tensors)] = tensor
        found: dict[str, Any] = {"tensor": number}
        if isinstance(tensor, torch.nn.Parameter):
            found["parameter"] = True
        if tensor.requires_grad:
            found["requires_grad"] = True
        return found


def _below(key: str, part: object) -> str:
    return f"{key}.{part}" if key else str(part)


def _unused(key: str, used: Mapping[str, Any]) -> str:
    """Return a key that is not used yet: keys such as 1 and "1" look alike."""
    number, found = 1, key
    while found in used:
        number, found = number + 1, f"{key}#{number}"
    return found


def together(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the state."""
    made: dict[tuple[int, bool, bool], torch.Tensor] = {}

    def build(part: Any) -> Any:
        if "dict" in part:
            return {key: build(one) for key, one in part["dict"]}
        if "ordered" in part:
            return OrderedDict((key, build(one)) for key, one in part["ordered"])
        if "list" in part:
            return [build(one) for one in part["list"]]
        if "tuple" in part:
            return tuple([build(one) for one in part["tuple"]])
        if "tensor" in part:
            return tensor(part)
        return part["value"]

    def tensor(part: Any) -> torch.Tensor:
        number = int(part["tensor"])
        is_parameter, has_gradient = bool(part.get("parameter")), bool(part.get("requires_grad"))
        found = made.get((number, is_parameter, has_gradient))
        if found is None:
            found = tensors[number].detach()  # objects of their own that share the memory
            found = torch.nn.Parameter(found, has_gradient) if is_parameter else found.requires_grad_(has_gradient)
            made[number, is_parameter, has_gradient] = found
        return found

    return build(skeleton)

"""Whether two loaded Python objects are the same: containers by what is in them, tensors and floats bit for bit."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import torch

from dcp_nvcomp.engines.tensors import without_lazy_bits


def is_same(one: Any, other: Any) -> bool:
    """Return whether two objects are the same. What only prints alike is not."""
    try:
        return _is_same(one, other)
    except RecursionError:  # something is in itself
        return bool(_pickled(one) == _pickled(other))


def differing_elements(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return for each element of two strided tensors of the same shape and dtype whether its bits differ; flat."""
    flat = [without_lazy_bits(tensor).reshape(-1) for tensor in (one, other)]
    if not one.numel():
        return torch.empty(0, dtype=torch.bool)
    a, b = (tensor.view(torch.uint8).view(-1, one.element_size()) for tensor in flat)
    return (a != b).any(1)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _is_same_tensor(one, other)
    if isinstance(one, Mapping):
        return bool(one.keys() == other.keys()) and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return struct.pack("2d", one.real, one.imag) == struct.pack("2d", other.real, other.imag)
    try:
        if bool(one == other):
            return True
    except Exception:  # comparisons that are ambiguous or fail
        pass
    return bool(_pickled(one) == _pickled(other))


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return bool(_pickled(one) == _pickled(other))
    return not bool(differing_elements(one, other).any())


def _pickled(value: Any) -> Any:
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except Exception:  # it was loaded, so this is of an odd class
        return id(value)
    return data.getvalue()

"""Comparing and blanking of whole state dicts."""

from __future__ import annotations

from typing import Any

import torch

from .values import assert_same_bits, opposite_of


def assert_same_state(actual: Any, expected: Any, where: str = "state") -> None:
    """Fail unless both have the same keys, the same objects, and tensors of the same bits."""
    if isinstance(expected, torch.Tensor):
        assert_same_bits(actual, expected, where)
    elif isinstance(expected, dict):
        assert sorted(actual, key=str) == sorted(expected, key=str), where
        for key in expected:
            assert_same_state(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_same_state(mine, theirs, f"{where}[{number}]")
    else:
        assert type(actual) is type(expected) and actual == expected, where


def blank(state: Any) -> Any:
    """A state dict to load into in which no byte of a tensor is right yet."""
    if isinstance(state, torch.Tensor):
        return opposite_of(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(blank(value) for value in state)
    return None if isinstance(state, str) else 0

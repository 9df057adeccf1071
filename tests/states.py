"""Small state dicts, blank copies to load into, and comparison bit for bit, for the tests of every folder."""

from __future__ import annotations

from typing import Any

import torch

State = dict[str, Any]


def small_state(seed: int = 0) -> State:
    """Return coded, stored and packed tensors and a Python object: a few KB, all different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(700, generator=generator).bfloat16(),
        "v": torch.rand(50, 30, generator=generator),
        "b": torch.randn(3, generator=generator),
        "step": {"number": seed},
    }


def constant_state(seed: int = 0, count: int = 3) -> State:
    """Return tensors of one value each, different for each key and seed, so that a failed test shows what is mixed."""
    return {f"k{number}": torch.full((1000,), seed * 100.0 + number) for number in range(count)}


def blank(state: Any) -> Any:
    """Return a state dict to load into: no byte of a tensor and no object in it is right yet."""
    if isinstance(state, torch.Tensor):
        return opposite_of(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(blank(value) for value in state)
    return 0 if state is None else None


def assert_same(actual: Any, expected: Any, where: str = "state") -> None:
    """Fail unless both have the same keys, the same objects, and tensors of the same bits."""
    if isinstance(expected, torch.Tensor):
        assert_same_bits(actual, expected, where)
    elif isinstance(expected, dict):
        assert sorted(actual, key=str) == sorted(expected, key=str), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{number}]")
    else:
        assert type(actual) is type(expected) and actual == expected, where


def same(actual: Any, expected: Any) -> bool:
    """True if both have the same keys, the same objects, and tensors of the same bits."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Fail unless dtype, shape and every byte agree."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    wrong = (raw_bytes(actual) != raw_bytes(expected)).nonzero()
    if wrong.numel():
        first = int(wrong[0])
        raise AssertionError(f"{what}: {wrong.numel()} of {expected.nbytes} bytes differ, the first at {first}")


def opposite_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same dtype, shape and device in which every byte is wrong."""
    if tensor.dtype == torch.bool:
        return tensor.detach().logical_not().contiguous()
    return (~raw_bytes(tensor)).view(tensor.dtype).reshape(tensor.shape).to(tensor.device)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the tensor's elements in logical order, as a new 1-d uint8 tensor on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
    return plain.reshape(-1).view(torch.uint8)

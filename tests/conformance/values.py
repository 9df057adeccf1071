"""Tensors of every kind that a checkpoint must give back bit for bit, by name, each the same on every call."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch

from tests.states import raw_bytes

# Every dtype that stock DCP of torch 2.13 can save.
_DTYPE_NAMES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    float16 bfloat16 float32 float64 complex32 complex64 complex128
"""
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in re.findall(r"\w+", _DTYPE_NAMES))


def _generator(seed: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(seed.encode()))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: str = "") -> torch.Tensor:
    """Every bit at random: NaNs of all payloads, infinities and subnormals among them."""
    generator = _generator(f"{dtype}{shape}{seed}")
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    sizes = (*shape[:-1], shape[-1] * dtype.itemsize) if shape else (dtype.itemsize,)
    octets = torch.randint(0, 256, sizes, dtype=torch.uint8, generator=generator)
    return octets.view(dtype).reshape(shape)


def trained(dtype: torch.dtype, shape: tuple[int, ...], seed: str = "") -> torch.Tensor:
    """Floats as training leaves them: skewed exponents, random mantissas."""
    return (torch.randn(shape, generator=_generator(f"trained{dtype}{shape}{seed}")) * 0.02).to(dtype)


def trained_state(seed: str) -> dict[str, Any]:
    """Return a large tensor, a small one and an object, all different for each seed."""
    return {"w": trained(torch.float32, (300, 500), seed), "b": trained(torch.bfloat16, (77,), seed), "seed": seed}


def _from_patterns(bits: torch.dtype, dtype: torch.dtype, patterns: list[int]) -> torch.Tensor:
    width = 8 * bits.itemsize
    signed = [pattern - (1 << width) if pattern >> (width - 1) else pattern for pattern in patterns]
    return torch.tensor(signed * 40, dtype=bits).view(dtype)


def _specials(bits: torch.dtype, dtype: torch.dtype, exponent_bits: int) -> torch.Tensor:
    """Quiet and signalling NaNs of both signs with payloads, infinities, both zeros, the extreme subnormals."""
    width = 8 * bits.itemsize
    mantissa_bits = width - 1 - exponent_bits
    sign, quiet = 1 << (width - 1), 1 << (mantissa_bits - 1)
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    largest_mantissa = (1 << mantissa_bits) - 1
    positive = [0, 1, largest_mantissa, infinity, infinity | 1, infinity | quiet, infinity | quiet | 5]
    positive += [infinity | largest_mantissa, 1 << mantissa_bits, infinity - 1]
    return _from_patterns(bits, dtype, positive + [sign | pattern for pattern in positive])


def _unaligned() -> torch.Tensor:
    raw = bytearray(4 * 33 + 1)
    raw[1:] = raw_bytes(trained(torch.float32, (33,))).numpy().tobytes()
    return torch.frombuffer(raw, dtype=torch.float32, offset=1)


def _with_grad_fn() -> torch.Tensor:
    return trained(torch.float32, (9, 4)).requires_grad_() * 3


_SPECIALS: dict[str, Callable[[], torch.Tensor]] = {
    "specials-float16": lambda: _specials(torch.int16, torch.float16, 5),
    "specials-bfloat16": lambda: _specials(torch.int16, torch.bfloat16, 8),
    "specials-float32": lambda: _specials(torch.int32, torch.float32, 8),
    "specials-float64": lambda: _specials(torch.int64, torch.float64, 11),
    "specials-in-many-blocks": lambda: _specials(torch.int32, torch.float32, 8).repeat(700),
}

_CONTENTS: dict[str, Callable[[], torch.Tensor]] = {
    "trained-bfloat16": lambda: trained(torch.bfloat16, (1031, 1201)),
    "trained-float16": lambda: trained(torch.float16, (701, 803)),
    "trained-float32": lambda: trained(torch.float32, (1031, 701)),
    "trained-float64": lambda: trained(torch.float64, (401, 503)),
    "trained-float8": lambda: trained(torch.float8_e4m3fn, (1031, 1201)),
    "second-moment": lambda: trained(torch.float32, (701, 803)) ** 2,
    "all-negative": lambda: -trained(torch.bfloat16, (701, 803)).abs(),
    "embedding-gradient": lambda: trained(torch.float32, (997, 512)) * (torch.arange(997) % 50 == 0)[:, None],
    "zeros": lambda: torch.zeros(1 << 20),
    "negative-zeros": lambda: -torch.zeros(5003),
    "constant": lambda: torch.full((300, 1001), 0.1, dtype=torch.bfloat16),
    "counter": lambda: torch.arange(200_003),
    "mask": lambda: trained(torch.float32, (1009, 1013)) > 0,
    "one-long-row": lambda: trained(torch.float32, (1, 600_011)),
    "one-long-column": lambda: trained(torch.float32, (300_007, 1)),
    "eight-dimensions": lambda: trained(torch.float32, (2, 3, 1, 4, 1, 2, 3, 2)),
}

_SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "0-d-float32": lambda: torch.tensor(-0.0),
    "0-d-bfloat16": lambda: random_bits(torch.bfloat16, ()),
    "0-d-int64": lambda: torch.tensor(-(2**63)),
    "0-d-bool": lambda: torch.tensor(True),
    "0-d-complex64": lambda: random_bits(torch.complex64, ()),
    "0-d-view": lambda: torch.arange(10)[7],
    "empty": lambda: torch.empty(0),
    "empty-0x5": lambda: torch.empty(0, 5, dtype=torch.bfloat16),
    "empty-3x0x2": lambda: torch.empty(3, 0, 2, dtype=torch.int64),
    "empty-slice": lambda: torch.arange(10.0)[4:4],
    "one-element": lambda: torch.tensor([7], dtype=torch.uint8),
}

_LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: trained(torch.float32, (301, 203)).t(),
    "permuted": lambda: trained(torch.bfloat16, (17, 19, 23)).permute(2, 0, 1),
    "strided-slice": lambda: trained(torch.float32, (200, 301))[::2, 1::3],
    "column": lambda: trained(torch.float32, (200, 301))[:, 7],
    "diagonal": lambda: trained(torch.float32, (200, 301)).diagonal(),
    "expanded": lambda: trained(torch.float32, (1, 50)).expand(70, 50),
    "expanded-scalar": lambda: torch.tensor(2.5).expand(1000),
    "overlapping": lambda: torch.arange(50.0).as_strided((10, 10), (3, 2)),
    "channels-last": lambda: trained(torch.float16, (2, 3, 5, 7)).to(memory_format=torch.channels_last),
    "channels-last-3d": lambda: trained(torch.float32, (2, 3, 4, 5, 6)).to(memory_format=torch.channels_last_3d),
    "view-of-larger-storage": lambda: trained(torch.float32, (5000,))[1234:1250],
    "reinterpreted": lambda: trained(torch.float32, (40, 6)).view(torch.int16)[:, 3:9],
    "odd-strides-of-size-1": lambda: torch.arange(6.0).as_strided((1, 6), (1000, 1)),
    "conj-complex32": lambda: random_bits(torch.complex32, (33, 7)).conj(),
    "conj-complex64": lambda: random_bits(torch.complex64, (33, 7)).conj(),
    "conj-complex128-transposed": lambda: random_bits(torch.complex128, (33, 7)).conj().t(),
    "neg-float32": lambda: random_bits(torch.complex64, (33, 7)).conj().imag,
    "neg-float64": lambda: random_bits(torch.complex128, (33, 7)).conj().imag[::2],
    "conj-and-neg": lambda: torch._neg_view(random_bits(torch.complex64, (33, 7)).conj()),
    "unaligned": _unaligned,
    "parameter": lambda: torch.nn.Parameter(trained(torch.float32, (12, 5))),
    "requires-grad": lambda: trained(torch.float32, (12, 5)).requires_grad_(),
    "with-grad-fn": _with_grad_fn,
}

VALUES: dict[str, Callable[[], torch.Tensor]] = {
    **{f"random-{dtype}".replace("torch.", ""): lambda dtype=dtype: random_bits(dtype, (37, 52)) for dtype in DTYPES},
    **_SPECIALS,
    **_CONTENTS,
    **_SHAPES,
    **_LAYOUTS,
}


@functools.cache
def all_values() -> dict[str, torch.Tensor]:
    """Each of VALUES, made once: to be read only."""
    return {name: make() for name, make in VALUES.items()}

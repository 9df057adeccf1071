"""Strategies of hypothesis for this folder: codec chains, and floats whose bits are awkward."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, RowCol, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES, Coder, ElementType
from dcp_nvcomp.codecs.transforms import PLANE_NAMES

CHAINS = {
    "none": CodecChain(Bytes()),
    "zstd": CodecChain(Bytes(), Zstd(256)),
    "zstd-literals": CodecChain(Bytes(), Zstd(256, literals_only=True)),
    "deflate": CodecChain(Bytes(), Deflate(256)),
    "deflate-literals": CodecChain(Bytes(), Deflate(256, literals_only=True)),
}

slice_sizes = st.sampled_from([16, 32, 48, 112, 1024, 131072])
coders: st.SearchStrategy[Coder] = st.one_of(
    st.builds(Zstd, slice_sizes, st.sampled_from([1, 3, 19]), st.booleans()),
    st.builds(Deflate, slice_sizes, st.sampled_from([1, 6]), st.booleans()),
)
element_types = st.sampled_from(list(ELEMENT_TYPES.values()))


@st.composite
def chains(draw: st.DrawFn, element: ElementType) -> CodecChain:
    """Any chain that fits the element type."""
    coder = draw(st.none() | coders)
    if not element.float_nbytes or draw(st.booleans()):
        return CodecChain(Bytes(), coder)
    if coder is not None and element.name in ("bfloat16", "float32") and draw(st.booleans()):
        return CodecChain(RowCol(element.float_nbytes, draw(st.sampled_from([1, 3, 8, 20, 600]))), coder)
    names = PLANE_NAMES if element.float_nbytes > 2 else PLANE_NAMES[1:]
    coded = [name for name in names if coder is not None and draw(st.booleans())]
    return CodecChain(Planes(element.float_nbytes, tuple(coded)), coder)


@st.composite
def elements(draw: st.DrawFn, element: ElementType, count: int) -> bytes:
    """`count` elements: random or compressible, of one sign or both, NaN payloads, -0 and subnormals among them."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = element.float_nbytes or element.nbytes
    parts = count * (element.nbytes // width)
    if draw(st.booleans()):
        values = np.frombuffer(random.bytes(parts * width), np.uint8).copy()
    else:
        values = np.tile(np.frombuffer(random.bytes(width), np.uint8), parts)
    if element.float_nbytes and parts:
        top = values.reshape(parts, width)[:, -1]
        sign = draw(st.sampled_from(["any", "positive", "negative", "positive but the last", "zeros"]))
        if sign == "zeros":
            values[:] = 0
        if sign == "negative":
            top |= 0x80
        elif sign != "any":
            top &= 0x7F
        if sign == "positive but the last":
            top[-1] |= 0x80
    return values.tobytes()


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A shape of up to 600 elements or so, and a block shape for it."""
    limit = draw(st.sampled_from([(0, 600), (1, 24), (2, 8), (3, 5)]))
    shape = [draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, limit[1])) for _ in range(limit[0])]
    if limit[0] == 0 and draw(st.booleans()):
        shape = [draw(st.integers(1, limit[1]))]
    return shape, [draw(st.integers(1, size + 2)) for size in shape]


def moments(width: int, rows: int, columns: int, sign: str) -> bytes:
    """Floats of `width` bytes, each row and each column of a scale of its own, and an infinity in every third row."""
    random = np.random.default_rng(1)
    scales = np.exp2(random.normal(-20, 3, (rows, 1)) + random.normal(0, 3, columns))
    values = (scales * np.exp2(random.normal(0, 0.5, (rows, columns)))).astype(np.float32)
    values[::3, 1] = np.inf
    values *= {"positive": 1, "negative": -1}.get(sign) or random.choice([-1, 1], values.shape)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits if width == 4 else (bits >> 16).astype(np.uint16)).astype(f"<u{width}").tobytes()


def floats(dtype: str, count: int, sign: str, seed: int) -> bytes:
    """Values like those of trained weights, with NaN payloads, -0, infinities and subnormals at the front."""
    element = ELEMENT_TYPES[dtype]
    width, random = element.float_nbytes, np.random.default_rng(seed)
    parts = count * (element.nbytes // width)
    exponent_nbits = {"float16": 5, "complex32": 5, "float64": 11, "complex128": 11}.get(dtype, 8)
    mantissa_nbits = 8 * width - 1 - exponent_nbits
    bias = (1 << exponent_nbits - 1) - 1
    exponents = np.clip(bias - random.geometric(0.4, parts), 0, None).astype(np.uint64)
    bits = exponents << np.uint64(mantissa_nbits) | random.integers(0, 1 << mantissa_nbits, parts, np.uint64)
    special = (1 << exponent_nbits) - 1 << mantissa_nbits
    for at, value in enumerate(
        [special, special | 1, special | 5 << mantissa_nbits - 3, 0, 1, 3 << mantissa_nbits - 4]
    ):
        bits[at] = value
    if sign != "positive":
        top = random.integers(0, 2, parts, np.uint64) if sign == "any" else np.ones(parts, np.uint64)
        bits |= top << np.uint64(8 * width - 1)
    return bits.astype(f"<u{width}").tobytes()

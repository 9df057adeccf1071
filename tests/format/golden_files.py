"""The contents of the golden data files. A name and its contents never change: each file must remain readable.

`records(name)` makes the records that were once written into `golden/<name>.distcp`; only make_golden.py needs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES

Records = list[tuple[dict[str, Any], CodecChain | None, bytes]]

SLICE_NBYTES = 256
CHAINS = {
    "none": CodecChain(Bytes()),
    "zstd": CodecChain(Bytes(), Zstd(SLICE_NBYTES)),
    "zstd-literals": CodecChain(Bytes(), Zstd(SLICE_NBYTES, literals_only=True)),
    "deflate": CodecChain(Bytes(), Deflate(SLICE_NBYTES)),
    "deflate-literals": CodecChain(Bytes(), Deflate(SLICE_NBYTES, literals_only=True)),
}
FLOATS = [name for name, kind in ELEMENT_TYPES.items() if kind.float_nbytes]
INTEGERS = [name for name, kind in ELEMENT_TYPES.items() if not kind.float_nbytes]
PLANES = [f"planes-{coder}-{width}" for coder in ("stored", "zstd", "deflate") for width in (2, 4, 8)]
NAMES = [*PLANES, *(f"bytes-{name}" for name in CHAINS), "packs", "items", "shards", "aligned", "empty"]


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


def whole_numbers(dtype: str, count: int, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    nbytes = ELEMENT_TYPES[dtype].nbytes
    if dtype == "bool":
        return random.integers(0, 2, count, np.uint8).tobytes()
    if nbytes == 1 and dtype.startswith("float"):
        return (np.cumsum(random.integers(0, 3, count)) % 256).astype(np.uint8).tobytes()
    return (np.arange(count) * 3 - 100 + random.integers(0, 4, count)).astype(f"<i{nbytes}").tobytes()


def tensor(fqn: str, dtype: str, shape: list[int], block_shape: list[int], **fields: Any) -> dict[str, Any]:
    return {"fqn": fqn, "shape": shape, "dtype": dtype, "block_shape": block_shape, **fields}


def records(name: str) -> Records:
    """The records of one golden file."""
    family, _, rest = name.partition("-")
    if family == "planes":
        coder, _, width = rest.partition("-")
        return _planes(coder, int(width))
    if family == "bytes":
        return _bytes(CHAINS[rest])
    return {"packs": _packs, "items": _items, "shards": _shards, "aligned": _aligned, "empty": list}[family]()


def _planes(coder: str, width: int) -> Records:
    if coder == "stored":
        chains = [CodecChain(Planes(width, ()))]
    else:
        make = Zstd if coder == "zstd" else Deflate
        chains = [
            CodecChain(Planes(width), make(SLICE_NBYTES, literals_only=True)),
            CodecChain(Planes(width, Planes(width).plane_names), make(SLICE_NBYTES)),
        ]
    dtypes = [name for name in FLOATS if ELEMENT_TYPES[name].float_nbytes == width]
    cases = [(chains[0], dtype, sign) for dtype in dtypes for sign in ("any", "positive", "negative")]
    cases += [(chain, dtypes[0], "any") for chain in chains[1:]]
    made: Records = []
    for seed, (chain, dtype, sign) in enumerate(cases):
        # 37 x 9 = 333 elements in blocks of 90, 90, 90 and 63: multiples of eight floats and not
        rows = 37 if ELEMENT_TYPES[dtype].nbytes == width else 18
        fqn = f"{dtype}.{sign}.{'-'.join(getattr(chain.array_to_bytes, 'coded', ()))}"
        made.append((tensor(fqn, dtype, [rows, 9], [10, 9]), chain, floats(dtype, rows * 9, sign, seed)))
    return made


def _bytes(chain: CodecChain) -> Records:
    made: Records = [
        (tensor(dtype, dtype, [150], [100]), chain, whole_numbers(dtype, 150, seed))
        for seed, dtype in enumerate(INTEGERS)
    ]
    for seed, dtype in enumerate(FLOATS):
        made.append((tensor(dtype, dtype, [50], [50]), chain, floats(dtype, 50, "any", seed)))
    return made


def pack(dtype: str, count: int, block: int) -> dict[str, Any]:
    return {"kind": "pack", "shape": [count], "dtype": dtype, "block_shape": [block]}


def member(fqn: str, shape: list[int], place: list[int], **fields: Any) -> tuple[dict[str, Any], None, bytes]:
    return {"fqn": fqn, "shape": shape, "pack": place, **fields}, None, b""


def _packs() -> Records:
    return [
        (pack("float32", 63, 63), CodecChain(Planes(4), Zstd(256)), floats("float32", 63, "positive", 1)),
        member("scalar", [], [0, 0]),
        member("vector", [50], [0, 1]),
        member("matrix", [3, 4], [0, 51], offsets=[3, 0], global_shape=[6, 4]),
        (pack("int64", 40, 16), CodecChain(Bytes(), Deflate(256)), whole_numbers("int64", 40, 2)),
        member("step", [], [4, 39]),
        member("across blocks", [2, 15], [4, 5]),
        member("nothing", [0], [4, 40]),
        (pack("uint8", 30, 30), CodecChain(Bytes()), whole_numbers("uint8", 30, 3)),
        member("item", [20], [8, 3], kind="bytes"),
        member("hidden", [7], [8, 23], kind="torch_save", offsets=[], global_shape=[]),
    ]


def _items() -> Records:
    text = b"what torch.save wrote, " * 30
    nbytes = len(text)
    inside = {"kind": "torch_save", "offsets": [1, 0], "global_shape": [2, 5]}
    awkward = 'key with \u00fc, \u2603, \U0001f40d and "quotes"'
    return [
        (tensor("plain", "uint8", [nbytes], [256], kind="bytes"), CodecChain(Bytes()), text),
        (tensor(awkward, "uint8", [5], [5], kind="bytes"), CodecChain(Bytes(), Zstd(256)), text[:5]),
        (tensor("", "uint8", [0], [1], kind="bytes"), CodecChain(Bytes(), Zstd(256)), b""),
        (tensor("hidden", "uint8", [nbytes], [nbytes], **inside), CodecChain(Bytes(), Deflate(256)), text),
    ]


def _shards() -> Records:
    chain = CodecChain(Planes(2), Zstd(256))
    first = tensor("w", "bfloat16", [4, 3, 10], [3, 2, 4], offsets=[0, 3, 0], global_shape=[8, 6, 10])
    second = tensor("w", "bfloat16", [4, 3, 10], [1, 1, 10], offsets=[4, 0, 0], global_shape=[8, 6, 10])
    return [
        (first, chain, floats("bfloat16", 120, "any", 1)),
        (second, chain, floats("bfloat16", 120, "negative", 2)),
        (tensor("scalar", "bfloat16", [], []), chain, floats("bfloat16", 8, "any", 3)[:2]),
        (tensor("empty", "bfloat16", [3, 0], [1, 1], offsets=[1, 0], global_shape=[9, 0]), chain, b""),
    ]


def _aligned() -> Records:
    chain = CodecChain(Bytes(), Zstd(1 << 16))
    return [(tensor(str(i), "int32", [1000], [500]), chain, whole_numbers("int32", 1000, 0)) for i in range(3)]

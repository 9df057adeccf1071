"""A data file made by hand from docs/format.md, without the package; every field can be made wrong before `build`."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import zstandard
from crc32c import crc32c

MAGIC = bytes([0x89, 0x44, 0x43, 0x50, 0x4E, 0x56, 0x0D, 0x0A])


def padded(data: bytes, multiple: int = 16) -> bytes:
    return data + bytes(-len(data) % multiple)


def split_bf16(elements: bytes) -> tuple[bytes, bytes]:
    """The planes `rest` and `exponent`, one float after the other."""
    rest, exponent = bytearray(), bytearray()
    for (bits,) in struct.iter_unpack("<H", elements):
        rest.append(bits & 0x7F | bits >> 15 << 7)
        exponent.append(bits >> 7 & 0xFF)
    return bytes(rest), bytes(exponent)


@dataclass
class Forgery:
    """The parts of a data file.

    `rows` are those of the block table: encoded bytes, flags, decoded bytes. `build` derives sizes, sums and CRCs from
    them; what `overrides` names is put in their place.
    """

    description: dict[str, Any]
    rows: list[tuple[bytes, int, bytes]]
    slices: list[int]
    header: bytes = MAGIC + struct.pack("<II", 1, 0)
    overrides: dict[str, Any] = field(default_factory=dict)

    def build(self) -> bytes:
        def get(name: str, value: Any) -> Any:
            return self.overrides.get(name, value)

        gap = self.description["data_offset"] - 16 if type(self.description.get("data_offset")) is int else 0
        front = self.header + bytes(min(max(gap, 0), 4096)) + b"".join(row[0] for row in self.rows)
        text = get("json", None) or json.dumps(self.description).encode()
        columns = [
            get("encoded_nbytes", [len(row[0]) for row in self.rows]),
            get("flags", [row[1] for row in self.rows]),
            get("encoded_crc", [crc32c(row[0]) for row in self.rows]),
            get("uncompressed_crc", [crc32c(row[2]) for row in self.rows]),
            get("slices", self.slices),
        ]
        footer = padded(text, 8) + b"".join(struct.pack(f"<{len(column)}I", *column) for column in columns)
        head = struct.pack(
            "<QQQI",
            get("footer_offset", len(front)),
            get("footer_nbytes", len(footer)),
            get("json_nbytes", len(text)),
            get("version", 1),
        )
        crc = get("footer_crc", crc32c(footer + head))
        return front + footer + head + struct.pack("<I", crc) + get("magic", MAGIC[::-1])


def zstd_frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def deflate_stream(data: bytes) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush()


# 12 x 8 bfloat16 values, all positive in the first block and of both signs in the second.
WEIGHT = struct.pack("<96H", *(0x3F80 - i | (i % 3 == 0 and i >= 64) << 15 for i in range(96)))
NUMBERS = struct.pack("<100q", *range(-50, 50))
SMALL = struct.pack("<6f", 1.0, -0.0, float("inf"), 1e-45, -2.5, 3.0)
ITEM = b"what torch.save wrote" * 10


def small_forgery() -> Forgery:
    """One record of each kind but `torch_save`: planes with zstd, bytes with deflate, a pack, a bytes item."""
    first, second = WEIGHT[:128], WEIGHT[128:]
    rest, exponent = split_bf16(first)
    # 64 floats of one sign: m = 8, the bits of floats 56 to 63 ride on bit 7 of the first 56 bytes
    packed = bytearray(rest[:56])
    for j in range(8):
        for k in range(7):
            packed[8 * k + j] |= (rest[56 + j] >> k & 1) << 7
    slices: list[int] = []
    rows: list[tuple[bytes, int, bytes]] = []

    def coded(plane: bytes, slice_nbytes: int, encode: Any) -> bytes:
        encoded = b""
        for start in range(0, len(plane), slice_nbytes):
            raw = plane[start : start + slice_nbytes]
            frame = encode(raw)
            frame = frame if len(frame) < len(raw) else raw
            slices.append(len(frame))
            encoded += padded(frame)
        return encoded

    rows.append((padded(bytes(packed)) + coded(exponent, 48, zstd_frame), 1, first))
    rest, exponent = split_bf16(second)
    rows.append((padded(rest) + coded(exponent, 48, zstd_frame) + bytes(32), 0, second))
    rows.append((coded(NUMBERS, 512, deflate_stream), 0, NUMBERS))
    rows.append((padded(SMALL), 0, SMALL))
    rows.append((coded(ITEM, 512, deflate_stream), 0, ITEM))
    description = {
        "save_id": "1" * 32,
        "file_id": "2" * 32,
        "rank": 3,
        "writer": {"hand": "left"},
        "features": [],
        "data_offset": 64,
        "blocks": len(rows),
        "slices": len(slices),
        "codecs": [
            [
                {"name": "planes", "configuration": {"float_nbytes": 2, "coded": ["exponent"]}},
                {"name": "zstd", "configuration": {"slice_nbytes": 48}},
            ],
            [{"name": "bytes", "configuration": {}}, {"name": "deflate", "configuration": {"slice_nbytes": 512}}],
            [{"name": "bytes", "configuration": {}}],
        ],
        "records": [
            {
                "fqn": "weight",
                "shape": [12, 8],
                "offsets": [4, 0],
                "global_shape": [16, 8],
                "dtype": "bfloat16",
                "block_shape": [8, 8],
                "codec": 0,
                "of the future": {"ignored": True},
            },
            {"fqn": "numbers", "shape": [100], "dtype": "int64", "block_shape": [100], "codec": 1},
            {"kind": "pack", "shape": [6], "dtype": "float32", "block_shape": [6], "codec": 2},
            {"fqn": "small.scalar", "shape": [], "pack": [2, 0]},
            {"fqn": "small.matrix", "shape": [1, 5], "offsets": [1, 0], "global_shape": [2, 5], "pack": [2, 1]},
            {"fqn": "empty", "shape": [0, 3], "dtype": "uint8", "block_shape": [1, 3], "codec": 1},
            {"kind": "bytes", "fqn": "item", "shape": [210], "dtype": "uint8", "block_shape": [512], "codec": 1},
        ],
        "of the future": [1, 2],
    }
    return Forgery(description, rows, slices)


SMALL_CONTENTS = {
    ("weight", (4, 0)): ("tensor", "bfloat16", (12, 8), (16, 8), WEIGHT),
    ("numbers", (0,)): ("tensor", "int64", (100,), (100,), NUMBERS),
    ("small.scalar", ()): ("tensor", "float32", (), (), SMALL[:4]),
    ("small.matrix", (1, 0)): ("tensor", "float32", (1, 5), (2, 5), SMALL[4:]),
    ("empty", (0, 0)): ("tensor", "uint8", (0, 3), (0, 3), b""),
    ("item", (0,)): ("bytes", "uint8", (210,), (210,), ITEM),
}

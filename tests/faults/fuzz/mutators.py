"""Mutations that know the structure: opcodes of a pickle, values of a JSON, rows of a table, files of an archive.

libFuzzer's own mutations of bytes (`mutate_bytes`) are mixed in: half of the time, and for what has no structure here.
"""

from __future__ import annotations

import copy
import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

import zstandard

from tests.format.metadata import assembler as asm

from .parts import REPAIR_ALL, FileParts

MutateBytes = Callable[[bytes, int], bytes]
Mutator = Callable[[bytes, int, random.Random, MutateBytes], bytes]

# ---- pickles ----

_ARGUMENTS = {0x68: 1, 0x6A: 4, 0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8, 0x71: 1, 0x72: 4, 0x95: 8, 0x80: 1}
_COUNTED = {0x8C: 1, 0x58: 4, 0x8A: 1, 0x43: 1, 0x42: 4}


def _opcodes(data: bytes) -> list[bytes]:
    """A pickle cut into its opcodes with their arguments."""
    found, position = [], 0
    while position < len(data):
        opcode, stop = data[position], position + 1
        if opcode in _COUNTED:
            width = _COUNTED[opcode]
            stop += width + int.from_bytes(data[stop : stop + width], "little")
        elif opcode == 0x63:  # GLOBAL
            stop += sum(len(line) for line in data[stop:].split(b"\n", 2)[:2]) + 2
        else:
            stop += _ARGUMENTS.get(opcode, 0)
        found.append(data[position:stop])
        position = stop
    return found


_HUGE = [asm.number(value) for value in (-1, 1 << 31, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 500)]
_PIECES = [
    *_HUGE,
    *(asm.number(value) for value in (0, 1, 2, 7)),
    *(asm.get(slot) for slot in range(4)),
    *(asm.text(text) for text in ("w", "", "../x", "a//b", "s3://b", "a\0", "offsets", "sizes", "chunks")),
    *(asm.named(asm.METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(asm.named("torch", name) for name in ("Size", "float32", "bfloat16", "complex128")),
    *(asm.named(*name) for name in (("pathlib", "Path"), ("os", "system"), ("torch.serialization", "_get_layout"))),
    *(b"cbuiltins\nbytearray\n", b"ctorch\nSize\n", b"X\xff\xff\xff\x7f", b"G\x7f\xf8" + bytes(6)),
    *(bytes([opcode]) for opcode in b"\x94)}](\x81Rb.N\x88\x89\x85\x86\x87testua\x93Q0"),
    asm.size(0, 0), asm.size(4, 6), asm.size(1 << 60, 1 << 60), asm.shard(asm.size(0, 0), asm.size(2, 6)),
    asm.tensor(), asm.index(), asm.file(), asm.info(), asm.sequence(asm.file(), asm.number(0)), asm.properties(),
    asm.listed(), asm.mapping(), asm.built("BytesStorageMetadata"), asm.fresh("Metadata"),
    asm.call(asm.named("pathlib", "PosixPath")),
]  # fmt: skip


def _mutate_opcodes(data: bytes, draw: random.Random) -> bytes:
    opcodes = _opcodes(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(opcodes) + 1)
        stop = min(len(opcodes), at + draw.choice((0, 1, 1, 2, 8)))
        kind = draw.randrange(4)
        if kind == 0:
            opcodes[at:stop] = [draw.choice(_PIECES)]
        elif kind == 1:
            opcodes[at:at] = [draw.choice(_PIECES)]
        elif kind == 2:
            opcodes[at:at] = opcodes[(start := draw.randrange(len(opcodes) + 1)) : start + draw.choice((1, 2, 8, 32))]
        else:
            del opcodes[at:stop]
    return b"".join(opcodes)


def _pickle(data: bytes, limit: int, draw: random.Random, mutate_bytes: MutateBytes) -> bytes:
    return mutate_bytes(data, limit) if draw.random() < 0.3 else _mutate_opcodes(data, draw)[:limit]


# ---- data files ----

_NUMBERS: list[Any] = [0, 1, 2, 3, 8, 15, 16, 17, 48, 64, 100, -1, 0.5, 1e300, True]
_NUMBERS += [1 << bits for bits in (12, 16, 20, 24, 26, 31)]
_NUMBERS += [1 << 32, 1 << 60, 1 << 62, 1 << 63, 1 << 64, 10**4299, (16 << 20) + 16, (1 << 62) + 1]
_VALUES: list[Any] = [
    *(None, "", [], {}, [0], [1 << 60], [8, 8], [1] * 64, [1] * 65, [2] * 62, "DEEP", "\ud800"),
    *("pack", "bytes", "tensor", "torch_save", "zstd", "deflate", "planes", "ans"),
    *("bfloat16", "float32", "float64", "uint8", "int64", "exponent", "low", "rest", ["exponent"], ["low", "rest"]),
    {"name": "bytes", "configuration": {}},
    {"name": "zstd", "configuration": {"slice_nbytes": 16}},
    {"fqn": "m", "shape": [1], "pack": [2, 0]},
    {"fqn": "n", "shape": [64], "dtype": "uint8", "block_shape": [16], "codec": 1},
]


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) and depth < 8 else ()
    )
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key], depth + 1)]


def _mutate_json(text: bytes, description: Any, draw: random.Random) -> bytes:
    try:
        _change_json(description, draw)
        changed = json.dumps(description, separators=(",", ":")).encode()
    except (ValueError, RecursionError):  # too deep to be copied or written
        return text
    depth = draw.choice((90, draw.randrange(900, 1000)))  # Python gives up at about 1000, a little sooner or later
    return changed.replace(b'"DEEP"', b"[" * depth + b"]" * depth)


def _change_json(description: Any, draw: random.Random) -> None:
    places = _places(description)
    for _ in range(draw.choice((1, 1, 2, 3)) if places else 0):
        container, key = draw.choice(places)
        if key not in container if isinstance(container, dict) else key >= len(container):
            continue  # removed a moment ago
        kind = draw.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif kind == 2:
            other, other_key = draw.choice(places)
            found = other.get(other_key) if isinstance(other, dict) else other[other_key : other_key + 1]
            container[key] = copy.deepcopy(found)
        elif kind == 3 and type(container[key]) is int:
            container[key] += draw.choice((-16, -1, 1, 16))
        else:
            container[key] = copy.deepcopy(draw.choice(_NUMBERS if kind < 5 else _VALUES))


def _mutate_table(table: bytes, draw: random.Random) -> bytes:
    rows = [table[at : at + 4] for at in range(0, len(table), 4)] or [bytes(4)]
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(rows))
        value = int.from_bytes(rows[at], "little") + draw.choice((-16, -1, 1, 2, 3, 16, 32, draw.getrandbits(32)))
        rows[at] = draw.choice((value, 0, 1, 2, 3, 16, 0xFFFFFFF0)).to_bytes(9, "little", signed=True)[:4]
        if draw.random() < 0.1:
            rows[at:at] = [rows[at]] * draw.choice((1, 4))
    return b"".join(rows)


def _data_file(data: bytes, limit: int, draw: random.Random, mutate_bytes: MutateBytes, *, with_blocks: bool) -> bytes:
    parts = FileParts.split(data)
    repair, text, tables, blocks = parts.repair, parts.text, parts.tables, parts.blocks
    kind = draw.choice("jjjttb" if not with_blocks else "jjttbbbb")
    description = parts.description() if kind == "j" else None
    if description is not None:
        text = _mutate_json(text, description, draw)
    elif kind == "j":
        text = mutate_bytes(text, limit)
    elif kind == "t":
        tables = _mutate_table(tables, draw)
    elif with_blocks:
        blocks = mutate_bytes(blocks, limit)
    else:
        text = mutate_bytes(text, limit)
    if draw.random() < 0.02:
        repair ^= 1 << draw.randrange(5)
    elif draw.random() < 0.05:
        repair |= REPAIR_ALL
    return FileParts(repair, text, tables, blocks).join()[:limit]


def _footer(data: bytes, limit: int, draw: random.Random, mutate_bytes: MutateBytes) -> bytes:
    return _data_file(data, limit, draw, mutate_bytes, with_blocks=False)


def _decode(data: bytes, limit: int, draw: random.Random, mutate_bytes: MutateBytes) -> bytes:
    return _data_file(data, limit, draw, mutate_bytes, with_blocks=True)


# ---- stock items ----


def _stock(data: bytes, limit: int, draw: random.Random, mutate_bytes: MutateBytes) -> bytes:
    head, content = data[:1] or b"\0", data[1:]
    if draw.random() < 0.05:
        head = bytes([draw.randrange(8)])
    if draw.random() < 0.5:
        return (head + mutate_bytes(content, limit - 1))[:limit]
    if head[0] & 1:
        try:
            content = zstandard.ZstdDecompressor().decompressobj().decompress(content[:300])
        except zstandard.ZstdError:
            return (head + mutate_bytes(content, limit - 1))[:limit]
    content = _mutate_archive(content[: 4 * limit], draw, mutate_bytes)
    if head[0] & 1:
        content = zstandard.ZstdCompressor(level=1).compress(content)
    return (head + content)[:limit]


def _mutate_archive(content: bytes, draw: random.Random, mutate_bytes: MutateBytes) -> bytes:
    """One file of an archive, mutated; the archive's own fields are right again."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = [(member.filename, archive.read(member)) for member in archive.infolist()[:6]]
    except Exception:  # whatever it is, it is no archive
        return mutate_bytes(content, len(content) + 64)
    changed, output = draw.randrange(len(files) or 1), io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        for number, (name, held) in enumerate(files):
            if number == changed or name.endswith(".pkl"):
                new = _pickle if name.endswith(".pkl") else _raw
                held = new(held, len(held) + 64, draw, mutate_bytes)
            archive.writestr(zipfile.ZipInfo(name), held)
    return output.getvalue()


def _raw(data: bytes, limit: int, draw: random.Random, mutate_bytes: MutateBytes) -> bytes:
    return mutate_bytes(data, limit)


MUTATORS: dict[str, Mutator] = {
    "metadata": _pickle,
    "rank": _raw,
    "footer": _footer,
    "decode": _decode,
    "stock": _stock,
}

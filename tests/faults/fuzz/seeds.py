"""The files that the fuzzer begins with: small valid ones of each kind."""

from __future__ import annotations

import copy
import io
import json
import zipfile

import numpy as np
import torch
import zstandard

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Derived, Planes, RowCol, Zstd
from dcp_nvcomp.codecs.base import Coder
from dcp_nvcomp.format.framing import TRAILER_NBYTES, decode_trailer
from tests.format.forgery import deflate_stream, padded, small_forgery
from tests.format.library import write_file
from tests.format.metadata import assembler as asm
from tests.format.strategies import CHAINS, floats, moments

from .parts import REPAIR_ALL, FileParts


def _parts(file: bytes, more: int = 0) -> bytes:
    """A data file as an input."""
    trailer = decode_trailer(file[-TRAILER_NBYTES:], path="", file_nbytes=len(file))
    end = trailer.footer_offset + trailer.json_nbytes
    text = file[trailer.footer_offset : end]
    tables = file[end + -trailer.json_nbytes % 8 : -TRAILER_NBYTES]
    return FileParts(REPAIR_ALL | more, text, tables, file[16 : trailer.footer_offset]).join()


def _metadata() -> list[bytes]:
    lists = asm.sequence(asm.text("w"), asm.number(2), asm.text("v"))
    path = asm.call(asm.named("pathlib", "PosixPath"), asm.text("run"), asm.text("x"))
    meta = asm.built("StorageMeta", checkpoint_id=path, modules=asm.listed(asm.text("a")))
    items = asm.mapping(asm.text("w"), asm.tensor(), asm.text("o"), asm.built("BytesStorageMetadata"))
    stock = asm.mapping(asm.index(), asm.info(transform_descriptors=asm.listed(asm.text("stream.zstd/1"))))
    beside = asm.sequence(asm.text("x.distcp"), *map(asm.number, (100, 8, 1)), asm.text("step-1"))
    memo = asm.tensor(asm.size(8), asm.shard(asm.size(0), asm.size(4)), asm.shard(asm.size(4), asm.size(4)))
    return [
        asm.metadata(),
        asm.metadata(planner_data=asm.mapping(asm.text("w"), lists), storage_meta=meta),
        asm.metadata(state_dict_metadata=items),
        asm.metadata(storage_data=stock),
        asm.metadata(storage_data=asm.mapping(asm.index(), asm.sequence(beside, asm.number(0)))),
        asm.metadata(state_dict_metadata=asm.mapping(asm.text("w"), memo + asm.MEMOIZE), later=asm.get(0)),
        asm.metadata(planner_data=asm.listed(asm.mapping(asm.text("k"), asm.sequence(asm.number(1), b"N\x88")))),
    ]


def _rank() -> list[bytes]:
    halves = bytes([1, 1, 8, 0, 1, 0, 4, 1, 1, 0, 0, 1, 4, 4, 1, 1, 0])
    return [halves, bytes([2, 3, 4, 4] + [0, 2, 0, 0, 2, 0, 2, 4, 2, 4, 1, 1, 0] * 4), bytes(8)]


def _records(chain: CodecChain, dtype: str, count: int, sign: str = "any") -> bytes:
    description = {"fqn": "w", "shape": [count], "dtype": dtype, "block_shape": [count // 2]}
    return _parts(write_file([(description, chain, floats(dtype, count, sign, 1))]))


def _predicted(width: int, dtype: str, sign: str) -> bytes:
    description = {"fqn": "w", "shape": [24, 16], "dtype": dtype, "block_shape": [24, 16]}
    return _parts(write_file([(description, CodecChain(RowCol(width, 16), Zstd(256)), moments(width, 24, 16, sign))]))


def _derived() -> bytes:
    master = np.frombuffer(floats("float32", 128, "any", 1), np.uint32)
    weight = (master + 0x8000 >> 16).astype(np.uint16)
    base = {"fqn": "w", "shape": [128], "dtype": "bfloat16", "block_shape": [64]}
    derived = {"fqn": "m", "shape": [128], "dtype": "float32", "block_shape": [64]}
    chain = CodecChain(Planes(2), Zstd(256))
    return _parts(write_file([(base, chain, weight.tobytes()), (derived, CodecChain(Derived()), master.tobytes())]))


def zstd_bomb(blocks: int) -> bytes:
    """A zstd frame of RLE blocks: each 4 bytes long, and 128 KiB of zeros when decoded. It does not say its size."""
    block, last = (((1 << 17) << 3 | 1 << 1 | is_last).to_bytes(3, "little") + b"\0" for is_last in (0, 1))
    return b"\x28\xb5\x2f\xfd\x00\x38" + block * (blocks - 1) + last


def _bomb(coder: Coder, frame: bytes) -> bytes:
    """One block of one slice, which decodes to more than the block has room for."""
    forgery = small_forgery()
    one = {"fqn": "w", "shape": [coder.slice_nbytes], "dtype": "uint8", "block_shape": [coder.slice_nbytes], "codec": 0}
    forgery.description.update(records=[one], codecs=[CodecChain(Bytes(), coder).to_json()], blocks=1, slices=1)
    forgery.rows, forgery.slices = [(padded(frame), 0, b"")], [len(frame)]
    return _parts(forgery.build())


def _decode() -> list[bytes]:
    found = [_parts(small_forgery().build()), _parts(small_forgery().build(), 2 << 3)]
    for coder in (Zstd(48), Deflate(48), Zstd(1024, literals_only=True), Deflate(64, literals_only=True)):
        found += [_records(CodecChain(Planes(2), coder), "bfloat16", 64, "positive")]
        found += [_records(CodecChain(Planes(4, ("low", "exponent")), coder), "float32", 48, "negative")]
        found += [_records(CodecChain(Bytes(), coder), "float32", 40)]
    found += [_predicted(2, "bfloat16", "positive"), _predicted(4, "float32", "any"), _derived()]
    found += [_records(CodecChain(Planes(8, ("rest", "exponent")), Zstd(64)), "float64", 24)]
    found += [_bomb(Zstd(4096), zstd_bomb(1000)), _bomb(Deflate(1 << 20), deflate_stream(bytes(1 << 21)))]
    found += [_records(CodecChain(Planes(4, ()), None), "float32", 32), _records(CHAINS["none"], "float16", 16)]
    return found


def _footer() -> list[bytes]:
    forgery = small_forgery()
    found = [_parts(small_forgery().build()), _parts(write_file([]))]
    parts = FileParts.split(found[0])
    description = copy.deepcopy(forgery.description)
    description["records"][0].update(shape=[1 << 60], global_shape=[1 << 61], offsets=[4], block_shape=[1 << 55])
    found.append(FileParts(REPAIR_ALL, json.dumps(description).encode(), parts.tables, b"").join())
    deep = {**forgery.description, "features": json.loads("[" * 900 + "]" * 900)}
    found.append(FileParts(REPAIR_ALL, json.dumps(deep).encode(), parts.tables, b"").join())
    return [FileParts(one.repair, one.text, one.tables, b"").join() for one in map(FileParts.split, found)]


def _saved(value: object) -> bytes:
    saved, small = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(small, "w") as smaller:
        for name in archive.namelist():  # without the padding, which is most of it
            if name.rpartition("/")[2] in ("data.pkl", "byteorder", "version", "0"):
                smaller.writestr(name, archive.read(name))
    return small.getvalue()


def _archive(pickled: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in (("a/data.pkl", pickled), ("a/byteorder", b"little"), ("a/version", b"3\n")):
            archive.writestr(name, data)
    return made.getvalue()


def _stock() -> list[bytes]:
    tensor, item = _saved(torch.arange(16.0)), _saved({"lr": 0.1, "betas": (1, [2])})
    packed, streamed = zstandard.ZstdCompressor(level=3), zstandard.ZstdCompressor(level=1).compressobj()
    return [
        b"\x02" + tensor,
        b"\x04" + item,
        b"\x03" + packed.compress(tensor),
        b"\x05" + packed.compress(item) + packed.compress(b""),
        b"\x01" + streamed.compress(item) + streamed.flush(),
        b"\x01" + packed.compress(bytes(1 << 20)),
        b"\x01" + zstd_bomb(1000),
        b"\x03" + zstd_bomb(1000),
        b"\x01\x28\xb5\x2f\xfd\x00\x88" + bytes(100),  # asks for a window of 128 MiB
        b"\x04" + _archive(b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x40\x85R."),  # of 1 GiB
    ]


def _all() -> dict[str, list[bytes]]:
    makers = {"metadata": _metadata, "rank": _rank, "footer": _footer, "decode": _decode, "stock": _stock}
    return {name: make() for name, make in makers.items()}


SEEDS = _all()

"""A corrupt slice that passes its CRC: whoever wrote it made that right too."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from crc32c import crc32c

from dcp_nvcomp import errors
from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import BlockRow
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.format.footer import parse_footer
from dcp_nvcomp.format.framing import TRAILER_NBYTES, decode_footer, decode_trailer, encode_footer
from tests.checkpoints import assert_loads, data_file, load
from tests.format.forgery import deflate_stream, padded
from tests.states import same

from .hostile import STATE, cheap_refusal, peak_nbytes, refusal, republish, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def forge_slice(path: Path, frame: Callable[[bytes], bytes]) -> None:
    """Another first slice in the first block, with all sizes and CRCs as if it were an honest one."""
    file = data_file(path)
    content = file.read_bytes()
    trailer = decode_trailer(content[-TRAILER_NBYTES:], path="", file_nbytes=len(content))
    text = content[trailer.footer_offset : -TRAILER_NBYTES]
    description, tables = decode_footer(text, content[-TRAILER_NBYTES:], trailer, path="")
    footer = parse_footer(description, tables, trailer, path="")
    start, stop = (int(position) for position in footer.block_offsets[:2])
    record = footer.records[0]
    assert record.chain is not None
    pieces = record.chain.layout(int(footer.block_nbytes[0]), int(tables.flags[0]))
    first = next(number for number, piece in enumerate(pieces) if piece.coded)
    at = start + sum(-(-piece.nbytes // 16) * 16 for piece in pieces[:first])
    nbytes = int(tables.slice_nbytes[0])
    assert nbytes < pieces[first].nbytes, "it must be a coded one"
    new = frame(content[at : at + nbytes])
    block = content[start:at] + new + bytes(-len(new) % 16) + content[at + -(-nbytes // 16) * 16 : stop]
    columns = {name: np.array(getattr(tables, name)) for name in tables.__dataclass_fields__}
    columns["encoded_nbytes"][0], columns["encoded_crc"][0] = len(block), crc32c(block)
    columns["slice_nbytes"][0] = len(new)
    front = content[:start] + block + content[stop : trailer.footer_offset]
    tail = encode_footer(description, type(tables)(**columns), len(front))
    file.write_bytes(front + tail)
    end = decode_trailer(tail[-TRAILER_NBYTES:], path="", file_nbytes=len(front) + len(tail))
    republish(path, lambda old: (file.name, end.file_nbytes, end.footer_nbytes, end.footer_crc))


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 20)


def _again(coder: str, change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Decode the frame, change what it holds, and encode that: an honest frame of something else."""

    def frame(data: bytes) -> bytes:
        if coder == "zstd":
            return zstandard.ZstdCompressor().compress(change(_zstd(data)))
        compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
        return compressor.compress(change(zlib.decompress(data, -15))) + compressor.flush()

    return frame


CHAINS = {
    "zstd": CodecChain(Bytes(), Zstd(4096)),
    "planes-zstd": CodecChain(Planes(4), Zstd(4096)),
    "deflate": CodecChain(Bytes(), Deflate(4096)),
    "planes-deflate": CodecChain(Planes(4), Deflate(4096)),
}
FORGED: dict[str, Callable[[str], Callable[[bytes], bytes]]] = {
    "too little": lambda coder: _again(coder, lambda data: data[:-1]),
    "too much": lambda coder: _again(coder, lambda data: data + b"\0"),
    "far too much": lambda coder: _again(coder, lambda data: bytes(1 << 26)),
    "junk behind": lambda coder: lambda data: data + b"junk",
    "cut off": lambda coder: lambda data: data[:-1],
    "two of them": lambda coder: lambda data: data + data,
    "no frame": lambda coder: lambda data: b"\xff" * len(data),
}


SLOW = pytest.mark.slow
IGNORED = {("deflate", "junk behind"), ("deflate", "two of them")}  # what follows a stream


@pytest.mark.parametrize("verify", ["stored", pytest.param("full", marks=SLOW), pytest.param("off", marks=SLOW)])
@pytest.mark.parametrize("how", list(FORGED))
@pytest.mark.parametrize("chain", list(CHAINS))
def test_forged_slice_that_decodes_to_another_size(tmp_path: Path, chain: str, how: str, verify: str) -> None:
    path = saved(tmp_path / "run", codec=CHAINS[chain])
    coder = chain.rpartition("-")[2]
    forge_slice(path, FORGED[how](coder))
    if (coder, how) in IGNORED:
        assert same(load(path, STATE, verify=verify, engine="cpu"), STATE)
        return
    error = cheap_refusal(path, verify=verify, engine="cpu")
    assert isinstance(error, errors.CorruptDataError)
    assert (error.path, error.fqn) == (str(data_file(path)), "w") and error.byte_range is not None


@pytest.mark.parametrize("chain", list(CHAINS))
def test_forged_slice_of_the_right_size(tmp_path: Path, chain: str) -> None:
    """Nothing but the CRC of the decoded bytes can tell; whoever forges that one too has made another checkpoint."""
    path = saved(tmp_path / "run", codec=CHAINS[chain])
    forge_slice(path, _again(chain.rpartition("-")[2], lambda data: data[:-1] + bytes([data[-1] ^ 1])))
    error = refusal(path, verify="full", engine="cpu")
    assert isinstance(error, errors.CorruptDataError) and "decoded bytes fail their CRC" in str(error)
    assert error.fqn == "w" and error.byte_range is not None
    assert not same(load(path, STATE, verify="stored", engine="cpu"), STATE)


def test_the_forgery_itself_is_sound(tmp_path: Path) -> None:
    for name, chain in CHAINS.items():
        path = saved(tmp_path / name, codec=chain)
        forge_slice(path, lambda data: data)
        assert_loads(path, STATE, verify="full")


def test_deflate_stream_that_inflates_a_thousandfold() -> None:
    """A slice may be 128 KiB long and decode to no more; deflate makes 120 MiB of that."""
    stream = deflate_stream(bytes(120 << 20))
    assert len(stream) < 128 << 10
    data, out = padded(stream), np.empty(128 << 10, np.uint8)
    row = BlockRow(0, (len(stream),), crc32c(data), 0)

    def refused() -> None:
        with pytest.raises(errors.CorruptDataError):
            CpuEngine().decode(memoryview(data), row, CodecChain(Bytes(), Deflate()), out, verify="stored")

    assert peak_nbytes(refused) < 4 << 20

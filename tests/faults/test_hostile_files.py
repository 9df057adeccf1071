"""Checkpoints made to do harm, through the whole of a load: refused with a named error, in little memory.

What a single function refuses is tested where it is: `.metadata` in tests/metadata/test_attacks.py, footers and frames
in tests/format/test_hostile.py and test_bad_files.py. Here are links, forged blocks, objects, and what all of it costs.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

from dcp_nvcomp import NvcompReader, NvcompWriter, errors, records
from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import layout_block
from dcp_nvcomp.datafile import read_footer
from dcp_nvcomp.filesystem import check_relative_path, open_filesystem
from dcp_nvcomp.footer import parse_footer
from dcp_nvcomp.format import MAX_FOOTER_NBYTES, TRAILER_NBYTES, decode_footer, decode_trailer, encode_footer
from dcp_nvcomp.metadata import METADATA_NAME, parse_metadata, serialize_metadata
from dcp_nvcomp.safe_objects import SafeLoader, load_tensor_safely
from dcp_nvcomp.stock import StockItem, read_stock_bytes, read_stock_tensor
from tests.format.forgery import MAGIC

from .fuzz.seeds import zstd_bomb

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.arange(4096.0) % 7}


def save(path: Path, state: dict[str, Any] | None = None, **options: Any) -> Path:
    dcp.save(state or STATE, storage_writer=NvcompWriter(path, **options), no_dist=True)
    return path


def load(path: Path, into: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    into = into or {"w": torch.zeros(4096)}
    dcp.load(into, storage_reader=NvcompReader(path, **options), no_dist=True)
    return into


def refusal(path: Path, into: dict[str, Any] | None = None, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(path, into, **options)
    return caught.value.failures[0][0]


def data_file(path: Path) -> Path:
    return next(path.glob("**/*.distcp"))


def republish(path: Path, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Another file tuple for all records."""
    metadata = parse_metadata((path / METADATA_NAME).read_bytes(), path="")
    new = {index: (change(file), record) for index, (file, record) in metadata.storage_data.items()}
    metadata.storage_data = new
    (path / METADATA_NAME).write_bytes(serialize_metadata(metadata))


# ---- links and special files


def test_data_file_behind_a_link(tmp_path: Path) -> None:
    file = data_file(save(tmp_path / "run"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    error = refusal(tmp_path / "run")
    assert isinstance(error, errors.UnsafePathError) and error.path == str(file)


def test_directory_part_that_is_a_link(tmp_path: Path) -> None:
    file = data_file(save(tmp_path / "run"))
    (tmp_path / "elsewhere").mkdir()
    file.rename(tmp_path / "elsewhere" / file.name)
    (tmp_path / "run" / "inside").symlink_to(tmp_path / "elsewhere")
    republish(tmp_path / "run", lambda old: (f"inside/{file.name}", *old[1:]))
    assert isinstance(refusal(tmp_path / "run"), errors.UnsafePathError)
    # it is the link that is refused, not the directory
    (tmp_path / "run" / "inside").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "inside")
    assert torch.equal(load(tmp_path / "run")["w"], STATE["w"])


@pytest.mark.parametrize("leads_to", ["elsewhere", "nothing", ".metadata"])
def test_metadata_that_is_a_link(tmp_path: Path, leads_to: str) -> None:
    """An unpacked archive may hold links: what `.metadata` leads to would be parsed, and quoted in messages."""
    path = save(tmp_path / "run")
    shutil.copy(path / METADATA_NAME, path / "__0.metadata")  # what must not be fallen back to
    (path / METADATA_NAME).rename(tmp_path / "elsewhere")
    (path / METADATA_NAME).symlink_to(tmp_path / leads_to if leads_to != METADATA_NAME else leads_to)
    with pytest.raises(errors.UnsafePathError, match="Symbolic links"):
        NvcompReader(path).read_metadata()
    assert "Symbolic links" in str(refusal(path))


def test_rank_local_metadata_that_is_a_link(tmp_path: Path) -> None:
    path = save(tmp_path / "run")
    (path / METADATA_NAME).rename(tmp_path / "elsewhere")
    (path / "__0.metadata").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CheckpointNotFoundError):  # links are not listed
        NvcompReader(path).read_metadata(rank=0)
    refusal(path)


def test_checkpoint_that_is_a_link_is_the_callers_choice(tmp_path: Path) -> None:
    """`latest -> step_100` is common, and the caller named it; only what is inside comes from somebody else."""
    save(tmp_path / "step_100")
    (tmp_path / "latest").symlink_to(tmp_path / "step_100")
    assert torch.equal(load(tmp_path / "latest")["w"], STATE["w"])


@pytest.mark.timeout(60)
def test_fifos_are_not_waited_for(tmp_path: Path) -> None:
    path = save(tmp_path / "run")
    file = data_file(path)
    file.unlink()
    os.mkfifo(file)
    assert isinstance(refusal(path), errors.StorageError)
    (path / METADATA_NAME).unlink()
    os.mkfifo(path / METADATA_NAME)
    assert "no `.metadata` was found" in str(refusal(path))


NAMES = st.lists(
    st.sampled_from(["..", ".", "", "a", "b.distcp", "/", "\\", "\0", "s3:", "file://", "::", "\n", "C:", "~"])
)


@settings(max_examples=1000, deadline=None)
@given(NAMES.map("".join) | NAMES.map("/".join) | st.text(max_size=12))
def test_no_name_leaves_the_checkpoint(name: str) -> None:
    try:
        check_relative_path(name, path="run")
    except errors.UnsafePathError:
        return
    joined = os.path.join("/root/run", name)
    assert os.path.normpath(joined) == joined and joined.startswith("/root/run/")
    assert not set("\0\n\\") & set(name) and "://" not in name


# ---- what a refusal costs


def peak_nbytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_footer_of_a_sparse_file(tmp_path: Path) -> None:
    """A file of a terabyte that takes no room: a footer as long as that would fill the memory with zeros."""
    path = save(tmp_path / "run")
    file, nbytes = data_file(path), 1 << 40
    with file.open("r+b") as opened:
        opened.truncate(nbytes - TRAILER_NBYTES)
        opened.seek(0, os.SEEK_END)
        opened.write(struct.pack("<QQQII", 16, nbytes - 56, 100, 1, 0) + MAGIC[::-1])
    assert file.stat().st_size == nbytes
    republish(path, lambda old: (old[0], nbytes, 100, 0))
    found: list[BaseException] = []
    assert peak_nbytes(lambda: found.append(refusal(path))) < 64 << 20
    assert isinstance(found[0], errors.FormatError) and "at most" in str(found[0])


def test_footer_longer_than_any() -> None:
    tail = struct.pack("<QQQII", 16, (1 << 40) - 56, 100, 1, 0) + MAGIC[::-1]
    with pytest.raises(errors.FormatError, match="at most"):
        decode_trailer(tail, path="", file_nbytes=1 << 40)


def test_footer_that_metadata_makes_up() -> None:
    """No more is read than a footer may be, whatever `.metadata` says that it is."""
    asked: list[int] = []

    class Sparse:
        def location(self, name: str) -> str:
            return name

        def file_nbytes(self, name: str) -> int:
            return 1 << 50

        def read(self, name: str, start: int, stop: int) -> bytes:
            asked.append(stop - start)
            return bytes(TRAILER_NBYTES)

    with pytest.raises(errors.WrongMagicError):
        read_footer(Sparse(), ("a", 1 << 50, 1 << 49, 0))  # type: ignore[arg-type]
    assert asked == [MAX_FOOTER_NBYTES + TRAILER_NBYTES]


@pytest.mark.parametrize("nbytes", [1 << 40, 1 << 62])
def test_sizes_that_metadata_makes_up(tmp_path: Path, nbytes: int) -> None:
    path = save(tmp_path / "run")
    republish(path, lambda old: (old[0], nbytes, nbytes // 2, 0))
    found: list[BaseException] = []
    assert peak_nbytes(lambda: found.append(refusal(path))) < 64 << 20
    assert isinstance(found[0], errors.TruncatedFileError)


def test_bombs_of_stock_items(tmp_path: Path) -> None:
    """400 KB that become 13 GB: as an object, and as a tensor of which the shape is known but not the dtype."""
    bomb = zstd_bomb(100_000)
    (tmp_path / "a.distcp").write_bytes(bomb)
    item = StockItem("a.distcp", 0, len(bomb), ("stream.zstd/1",))
    filesystem = open_filesystem(tmp_path)

    def tensor() -> None:
        with pytest.raises(errors.CorruptDataError, match="decodes to more than"):
            read_stock_tensor(filesystem, item, sizes=(16,))

    assert peak_nbytes(tensor) < 64 << 20
    small = StockItem("a.distcp", 0, 8000, ("stream.zstd/1",))
    with pytest.raises(errors.CorruptDataError, match=f"more than {16 << 20} bytes"):
        read_stock_bytes(filesystem, small)


def test_stock_window(tmp_path: Path) -> None:
    """A frame of 200 bytes may ask for a window of 128 MiB, which libzstd would take."""
    for log, refused in ((23, False), (24, True), (27, True)):
        frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(log - 10) << 3]) + (1 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"x"
        (tmp_path / "a.distcp").write_bytes(frame)
        item = StockItem("a.distcp", 0, len(frame), ("stream.zstd/1",))
        if refused:
            with pytest.raises(errors.CorruptDataError, match="memory"):
                read_stock_bytes(open_filesystem(tmp_path), item)
        else:
            assert read_stock_bytes(open_filesystem(tmp_path), item).getvalue() == b"x"


def test_layouts_of_many_slices_are_not_kept() -> None:
    """64 blocks, each of another size and of 65,536 slices, would be a gigabyte of pieces."""
    chain = CodecChain(Bytes(), Zstd(16))
    for number in range(20):
        assert len(chain.layout((1 << 16) - 16 * number, 0)) == (1 << 12) - number
    assert not chain._layouts
    assert chain.layout(1024, 0) is chain.layout(1024, 0)
    assert chain.layout(1024, 0) == layout_block(chain, 1024, 0)


# ---- a corrupt slice that passes its CRC


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


@pytest.mark.parametrize("verify", ["stored", pytest.param("full", marks=SLOW), pytest.param("off", marks=SLOW)])
@pytest.mark.parametrize("how", list(FORGED))
@pytest.mark.parametrize("chain", list(CHAINS))
def test_forged_slice_that_decodes_to_another_size(tmp_path: Path, chain: str, how: str, verify: str) -> None:
    path = save(tmp_path / "run", codec=CHAINS[chain])
    forge_slice(path, FORGED[how](chain.rpartition("-")[2]))
    found: list[BaseException] = []
    peak = peak_nbytes(lambda: found.append(refusal(path, verify=verify, engine="cpu")))
    assert isinstance(found[0], errors.CorruptDataError)
    assert (found[0].path, found[0].fqn) == (str(data_file(path)), "w") and found[0].byte_range is not None
    assert peak < 64 << 20


@pytest.mark.parametrize("chain", list(CHAINS))
def test_forged_slice_of_the_right_size(tmp_path: Path, chain: str) -> None:
    """Nothing but the CRC of the decoded bytes can tell; whoever forges that one too has made another checkpoint."""
    path = save(tmp_path / "run", codec=CHAINS[chain])
    forge_slice(path, _again(chain.rpartition("-")[2], lambda data: data[:-1] + bytes([data[-1] ^ 1])))
    error = refusal(path, verify="full", engine="cpu")
    assert isinstance(error, errors.CorruptDataError) and "decoded bytes fail their CRC" in str(error)
    assert error.fqn == "w" and error.byte_range is not None
    assert not torch.equal(load(path, verify="stored", engine="cpu")["w"], STATE["w"])


def test_the_forgery_itself_is_sound(tmp_path: Path) -> None:
    for name, chain in CHAINS.items():
        path = save(tmp_path / name, codec=chain)
        forge_slice(path, lambda data: data)
        assert torch.equal(load(path, verify="full")["w"], STATE["w"])


# ---- stored objects


class Attack:
    """Executed by whoever unpickles it without limits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def saved(path: Path, by: str, item: object) -> Path:
    state = {"w": STATE["w"], "o": item}
    extensions = [ZStandard()] if by == "stock zstd" else None
    writer = NvcompWriter(path) if by == "ours" else FileSystemWriter(path, _extensions=extensions)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return path


@pytest.mark.parametrize("by", ["ours", "stock", "stock zstd"])
def test_nothing_in_an_object_is_executed(tmp_path: Path, by: str) -> None:
    path, executed = saved(tmp_path / "run", by, Attack(tmp_path / "executed")), tmp_path / "executed"
    assert not executed.exists()
    into = {"w": torch.zeros(4096), "o": None}
    error = refusal(path, into, safe_objects=True)
    assert isinstance(error, errors.UnsafeObjectError) and error.fqn == "o"
    assert not executed.exists()
    refusal(path, into, safe_objects=True, trusted_globals=("pathlib.Path",))
    assert not executed.exists()
    load(path, into)  # the default, as DCP does: so the attack is a real one
    assert executed.exists()


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_planner_never_sees_an_unsafe_object(tmp_path: Path, by: str) -> None:
    seen: list[str] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen.append(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    def run(item: Any, **options: Any) -> None:
        into = {"w": torch.zeros(4096), "o": item}
        dcp.load(into, storage_reader=NvcompReader(path, **options), planner=Planner(), no_dist=True)

    path = saved(tmp_path / "bad", by, Attack(tmp_path / "executed"))
    with pytest.raises(CheckpointException):
        run(None, safe_objects=True)
    assert seen == [] and not (tmp_path / "executed").exists()
    path = saved(tmp_path / "good", by, {"lr": 0.1})
    run({"lr": 0.0}, safe_objects=True)
    assert seen == ["o.lr"]


def test_payload_is_always_read_safely(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(Attack(tmp_path / "executed"), stream)
    with pytest.raises(errors.UnsafeObjectError):
        SafeLoader((), check_objects=False).load_tensor(stream, "w")
    assert not (tmp_path / "executed").exists()


def test_payload_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was stored as `torch.save` writes it; the footer's shape is that of its bytes, not its own."""
    real = records.saved_payload
    monkeypatch.setattr(records, "is_transparent", lambda tensor: False)
    assert torch.equal(load(save(tmp_path / "honest"))["w"], STATE["w"])
    for number, shape in enumerate(([4095], [1], [], [4096, 1], [1, 4096])):
        monkeypatch.setattr(records, "saved_payload", lambda tensor, shape=shape: real(torch.ones(shape)))
        error = refusal(save(tmp_path / str(number)))
        assert isinstance(error, errors.CorruptDataError) and error.fqn == "w" and "shape" in str(error)


def archive(pickled: bytes, *more: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as opened:
        for name, data in (("a/data.pkl", pickled), ("a/byteorder", b"little"), ("a/version", b"3\n"), *more):
            opened.writestr(name, data)
    return io.BytesIO(made.getvalue())


def test_bytearray_of_any_size() -> None:
    """Forty bytes that take a gigabyte: weights_only allows bytearray, and what it is called with."""
    attack = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x10\x85R."
    assert peak_nbytes(lambda: torch.load(archive(attack), weights_only=True)) > 256 << 20  # the attack is real

    def refused() -> None:
        with pytest.raises(errors.UnsafeObjectError, match="builtins.bytearray"):
            SafeLoader((), check_objects=True).checked(archive(attack), "o")
        with pytest.raises(errors.UnsafeObjectError, match="builtins.bytearray"):
            load_tensor_safely(archive(attack))

    assert peak_nbytes(refused) < 16 << 20
    honest = io.BytesIO()
    torch.save(bytearray(b"abc"), honest)
    SafeLoader(("builtins.bytearray",), check_objects=True).checked(honest, "o")


def test_archive_that_inflates() -> None:
    data = archive(b"\x80\x02N.", ("a/data/0", bytes(1 << 26)), compression=zipfile.ZIP_DEFLATED)
    assert data.getbuffer().nbytes < 1 << 18

    def refused() -> None:
        with pytest.raises(errors.CorruptDataError, match="compressed"):
            load_tensor_safely(data)

    assert peak_nbytes(refused) < 16 << 20


def test_archive_whose_files_are_one() -> None:
    """Each of a thousand storages would be a copy of the same megabyte."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        opened.writestr("a/data.pkl", b"\x80\x02N.")
        opened.writestr("a/data/0", bytes(1000))
        opened.filelist *= 100
    with pytest.raises(errors.CorruptDataError, match="overlap"):
        load_tensor_safely(made)


def test_storage_that_claims_more_than_there_is() -> None:
    honest = io.BytesIO()
    torch.save(torch.arange(4.0), honest)
    with zipfile.ZipFile(honest) as opened:
        files = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
    pickled = (
        files["data.pkl"].replace(b"K\x04tq", b"J\x00\x00\x00\x40tq").replace(b"K\x04\x85", b"J\x00\x00\x00\x40\x85")
    )
    assert torch.equal(load_tensor_safely(archive(files["data.pkl"], ("a/data/0", files["data/0"]))), torch.arange(4.0))
    with pytest.raises(errors.CorruptDataError):
        load_tensor_safely(archive(pickled, ("a/data/0", files["data/0"])))


@pytest.mark.parametrize("legacy", [True, False])
def test_formats_of_long_ago(legacy: bool) -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(4.0), stream, _use_new_zipfile_serialization=not legacy)
    if legacy:
        with pytest.raises(errors.CorruptDataError, match="not an archive"):
            load_tensor_safely(stream)
    else:
        assert torch.equal(load_tensor_safely(stream), torch.arange(4.0))

"""Checkpoints made to do harm, through the whole of a load: refused with a named error, in little memory.

What a single function refuses is tested where it is: `.metadata` in tests/format/metadata/test_attacks.py, footers and
frames in tests/format/test_hostile.py and test_bad_files.py. Here are links, and what a refusal costs.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp import NvcompReader, errors
from dcp_nvcomp.codecs import Bytes, CodecChain, Zstd
from dcp_nvcomp.codecs.base import layout_block
from dcp_nvcomp.format.data_file import read_footer
from dcp_nvcomp.format.framing import MAX_FOOTER_NBYTES, TRAILER_NBYTES, decode_trailer
from dcp_nvcomp.format.metadata.shards import StockItem
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.items import read_stock_bytes, read_stock_tensor
from dcp_nvcomp.storage.base import check_relative_path
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, data_file
from tests.effort import examples
from tests.format.forgery import MAGIC

from .fuzz.seeds import zstd_bomb
from .hostile import STATE, cheap_refusal, peak_nbytes, refusal, republish, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# ---- links and special files


def test_data_file_behind_a_link(tmp_path: Path) -> None:
    file = data_file(saved(tmp_path / "run"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    error = refusal(tmp_path / "run")
    assert isinstance(error, errors.UnsafePathError) and error.path == str(file)


def test_directory_part_that_is_a_link(tmp_path: Path) -> None:
    file = data_file(saved(tmp_path / "run"))
    (tmp_path / "elsewhere").mkdir()
    file.rename(tmp_path / "elsewhere" / file.name)
    (tmp_path / "run" / "inside").symlink_to(tmp_path / "elsewhere")
    republish(tmp_path / "run", lambda old: (f"inside/{file.name}", *old[1:]))
    assert isinstance(refusal(tmp_path / "run"), errors.UnsafePathError)
    # it is the link that is refused, not the directory
    (tmp_path / "run" / "inside").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "inside")
    assert_loads(tmp_path / "run", STATE)


@pytest.mark.parametrize("leads_to", ["elsewhere", "nothing", ".metadata"])
def test_metadata_that_is_a_link(tmp_path: Path, leads_to: str) -> None:
    """An unpacked archive may hold links: what `.metadata` leads to would be parsed, and quoted in messages."""
    path = saved(tmp_path / "run")
    shutil.copy(path / METADATA_NAME, path / "__0.metadata")  # what must not be fallen back to
    (path / METADATA_NAME).rename(tmp_path / "elsewhere")
    (path / METADATA_NAME).symlink_to(tmp_path / leads_to if leads_to != METADATA_NAME else leads_to)
    with pytest.raises(errors.UnsafePathError, match="Symbolic links"):
        NvcompReader(path).read_metadata()
    assert "Symbolic links" in str(refusal(path))


def test_rank_local_metadata_that_is_a_link(tmp_path: Path) -> None:
    path = saved(tmp_path / "run")
    (path / METADATA_NAME).rename(tmp_path / "elsewhere")
    (path / "__0.metadata").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CheckpointNotFoundError):  # links are not listed
        NvcompReader(path).read_metadata(rank=0)
    refusal(path)


def test_checkpoint_that_is_a_link_is_the_callers_choice(tmp_path: Path) -> None:
    """`latest -> step_100` is common, and the caller named it; only what is inside comes from somebody else."""
    saved(tmp_path / "step_100")
    (tmp_path / "latest").symlink_to(tmp_path / "step_100")
    assert_loads(tmp_path / "latest", STATE)


@pytest.mark.timeout(180)
def test_fifos_are_not_waited_for(tmp_path: Path) -> None:
    path = saved(tmp_path / "run")
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


@settings(max_examples=examples(1000), deadline=None)
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


def test_footer_of_a_sparse_file(tmp_path: Path) -> None:
    """A file of a terabyte that takes no room: a footer as long as that would fill the memory with zeros."""
    path = saved(tmp_path / "run")
    file, nbytes = data_file(path), 1 << 40
    with file.open("r+b") as opened:
        opened.truncate(nbytes - TRAILER_NBYTES)
        opened.seek(0, os.SEEK_END)
        opened.write(struct.pack("<QQQII", 16, nbytes - 56, 100, 1, 0) + MAGIC[::-1])
    assert file.stat().st_size == nbytes
    republish(path, lambda old: (old[0], nbytes, 100, 0))
    error = cheap_refusal(path)
    assert isinstance(error, errors.FormatError) and "at most" in str(error)


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
    assert asked == [MAX_FOOTER_NBYTES + TRAILER_NBYTES] * 2  # what looks damaged is read once more


@pytest.mark.parametrize("nbytes", [1 << 40, 1 << 62])
def test_sizes_that_metadata_makes_up(tmp_path: Path, nbytes: int) -> None:
    path = saved(tmp_path / "run")
    republish(path, lambda old: (old[0], nbytes, nbytes // 2, 0))
    assert isinstance(cheap_refusal(path), errors.TruncatedFileError)


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

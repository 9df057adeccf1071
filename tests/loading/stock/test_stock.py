"""Items of checkpoints that stock DCP wrote: of every release, plain and with zstd; and every way they can be bad."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_nvcomp.errors import (
    CheckpointError,
    CorruptDataError,
    StorageError,
    TruncatedFileError,
    UnknownCodecError,
    UnsafeObjectError,
)
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.metadata.shards import StockItem
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.items import read_stock_bytes, read_stock_tensor
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads
from tests.effort import sampled
from tests.faults import forked

from .make_golden import GOLDEN, KINDS, VERSIONS, golden_state


def metadata_of(path: Path) -> Metadata:
    return parse_metadata((path / METADATA_NAME).read_bytes(), path=str(path / METADATA_NAME))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_golden(version: str, kind: str) -> None:
    path = GOLDEN / f"{version}-{kind}"
    assert_loads(path, golden_state())
    metadata = metadata_of(path)
    assert metadata.version == "1.0.0" or version in ("2.9", "2.10", "2.11")
    assert metadata.planner_data["model.layers.1"] == ("model", "layers", 1)
    descriptors = ("stream.zstd/1",) if kind == "zstd" else ()
    assert {item.transform_descriptors for item in metadata.storage_data.values()} == {descriptors}


@pytest.mark.parametrize(("version", "fields"), [*((version, 5) for version in VERSIONS[:-1]), ("2.15", 6)])
def test_golden_tensor_properties(version: str, fields: int) -> None:
    """The golden files are really of their release."""
    states = []

    class Properties:
        def __setstate__(self, state: tuple[object, ...]) -> None:
            states.append(state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Properties if name == "TensorProperties" else super().find_class(module, name)

    Unpickler(io.BytesIO((GOLDEN / f"{version}-plain" / METADATA_NAME).read_bytes())).load()
    assert {len(state) for state in states} == {fields}


def test_crc_switched_off(tmp_path: Path) -> None:
    code = (
        "import sys, torch, warnings, torch.distributed.checkpoint as dcp\n"
        "from tests.loading.stock.make_golden import golden_state\n"
        "warnings.simplefilter('ignore'); torch.serialization.set_crc32_options(False)\n"
        "dcp.save(golden_state(), checkpoint_id=sys.argv[1], no_dist=True)\n"
    )
    done = forked.execute(code, str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    assert_loads(tmp_path / "c", golden_state())


# ---- bad input


def archive(value: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


TENSOR = torch.arange(1000, dtype=torch.float32)


class Store:
    """One item in a file of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.filesystem = open_filesystem(path)

    def put(self, data: bytes, *descriptors: str, more: int = 0) -> StockItem:
        (self.path / "a.distcp").write_bytes(b"before" + data)
        return StockItem("a.distcp", 6, len(data) + more, descriptors)

    def tensor(self, data: bytes, *descriptors: str, more: int = 0, **options: Any) -> torch.Tensor:
        return read_stock_tensor(self.filesystem, self.put(data, *descriptors, more=more), **options)

    def bytes(self, data: bytes, *descriptors: str, **options: Any) -> bytes:
        return read_stock_bytes(self.filesystem, self.put(data, *descriptors), **options).getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def frame_of_zeros(blocks: int) -> bytes:
    """A zstd frame of RLE blocks: each 4 bytes long, and 128 KiB of zeros when decoded."""
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (1 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * blocks + last


def located(call: Callable[[], object], kind: type[CheckpointError], match: str, store: Store) -> None:
    with pytest.raises(kind, match=match) as caught:
        call()
    assert caught.value.path == str(store.path / "a.distcp")
    assert caught.value.byte_range is not None and caught.value.byte_range[0] == 6


def test_descriptors_that_are_known(store: Store) -> None:
    for descriptor in ("stream.zstd/1", "stream.zstd", "stream.zstd/1.2"):
        assert torch.equal(store.tensor(zstd(archive(TENSOR)), descriptor), TENSOR)


@pytest.mark.parametrize(
    "descriptor", ["stream.zstd/2", "stream.zstd@home/1", "stream.lz4/1", "", "stream.zstd/11", "x" * 999]
)
def test_descriptors_that_are_not(store: Store, descriptor: str) -> None:
    located(lambda: store.tensor(zstd(archive(TENSOR)), descriptor), UnknownCodecError, "transform", store)


def test_file_that_ends_early(store: Store) -> None:
    with pytest.raises(TruncatedFileError) as caught:
        store.tensor(archive(TENSOR), more=1)
    assert caught.value.path == str(store.path / "a.distcp")


def test_file_that_is_missing(store: Store) -> None:
    with pytest.raises(StorageError):
        read_stock_bytes(store.filesystem, StockItem("missing.distcp", 0, 1, ()))


@pytest.mark.parametrize("keep", [0, 1, 10, 100, -1])
def test_zstd_frame_that_ends_early(store: Store, keep: int) -> None:
    data = zstd(archive(TENSOR))
    located(lambda: store.tensor(data[:keep], "stream.zstd/1"), TruncatedFileError, "inside a zstd frame", store)


def test_zstd_frames_one_after_the_other(store: Store) -> None:
    # what torch writes with pyzstd; its own reader with zstandard would stop after the first
    data = archive(TENSOR)
    frames = zstd(data[:100]) + zstd(data[100:200]) + zstd(data[200:])
    assert torch.equal(store.tensor(frames, "stream.zstd/1"), TENSOR)


@pytest.mark.parametrize("data", [b"not zstd at all", zstd(archive(TENSOR)) + b"junk"])
def test_what_is_not_zstd(store: Store, data: bytes) -> None:
    located(lambda: store.tensor(data, "stream.zstd/1"), CheckpointError, "zstd", store)


def test_zstd_bomb(store: Store) -> None:
    import tracemalloc

    bomb = frame_of_zeros(100_000)  # 400 KB, 13 GB
    tracemalloc.start()
    try:
        match = "decodes to more than"
        located(lambda: store.tensor(bomb, "stream.zstd/1", sizes=[8]), CorruptDataError, match, store)
        located(lambda: store.bytes(bomb, "stream.zstd/1", limit_nbytes=1 << 20), CorruptDataError, match, store)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    zeros = frame_of_zeros(3)
    assert store.bytes(zeros, "stream.zstd/1") == bytes(3 * (1 << 17) + 1)  # the frame itself is a good one


@pytest.mark.parametrize("packed", [False, True])
def test_no_flipped_bit_goes_unnoticed(store: Store, packed: bool) -> None:
    """torch.load does not check the CRCs that torch.save writes."""
    data = archive(TENSOR)
    position = data.index(TENSOR.numpy().tobytes()[:64])
    whole = zstd(data, level=-5) if packed else data
    every = range(position, position + 4000, 37) if not packed else range(0, len(whole), 11)
    for byte in sampled(every, 7):
        flipped = bytearray(whole)
        flipped[byte] ^= 0x10
        with contextlib.suppress(CheckpointError):
            loaded = store.tensor(bytes(flipped), *(["stream.zstd/1"] if packed else []))
            assert torch.equal(loaded, TENSOR), byte


def test_flipped_bits_anywhere(store: Store) -> None:
    data = archive(TENSOR[:4])
    for byte in sampled(range(len(data)), 7):
        flipped = bytearray(data)
        flipped[byte] ^= 0x04
        with contextlib.suppress(CheckpointError):
            loaded = store.tensor(bytes(flipped))
            assert torch.equal(loaded, TENSOR[:4]) and loaded.dtype == TENSOR.dtype, byte


def test_flipped_bit_in_an_object(store: Store) -> None:
    data = bytearray(archive({"lr": 12345.0}))
    data[data.index(struct.pack(">d", 12345.0)) + 3] ^= 1
    located(lambda: store.bytes(bytes(data)), CorruptDataError, "CRC", store)


def test_bytes_of_other_kinds_are_not_touched(store: Store) -> None:
    for data in (b"", b"PK", b"plain", pickle.dumps([1])):
        assert store.bytes(data) == data


class Untold:
    """A class of which torch was not told that it is safe; of others a library may have told it."""


def repacked(compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive(TENSOR))) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        (b"", CorruptDataError, "not an archive"),
        (b"junk" * 100, CorruptDataError, "not an archive"),
        (pickle.dumps(TENSOR.tolist()), CorruptDataError, "not an archive"),
        (archive(TENSOR)[:-1], CorruptDataError, "corrupt"),
        (archive(TENSOR)[:2000], CorruptDataError, "corrupt"),
        (repacked(zipfile.ZIP_DEFLATED), CorruptDataError, "compressed archive"),
        (archive([TENSOR]), CorruptDataError, "A list is stored"),
        (archive(Untold()), UnsafeObjectError, "weights_only"),
    ],
    # not of the bytes, which have the time in them
    ids=["empty", "junk", "pickle", "short by a byte", "cut", "compressed", "a list", "untold"],
)
def test_what_is_no_tensor(store: Store, data: bytes, kind: type[CheckpointError], match: str) -> None:
    located(lambda: store.tensor(data), kind, match, store)


def test_archive_whose_files_overlap(store: Store) -> None:
    """A thousand entries for one file: checking each CRC would take as many passes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("a", bytes(range(256)) * 1000)
        made.filelist *= 1000
    located(lambda: store.bytes(stream.getvalue()), CorruptDataError, "overlap|corrupt", store)


@pytest.mark.parametrize("options", [{"sizes": [999]}, {"sizes": [1000, 1]}, {"sizes": [10]}])
def test_not_the_tensor_that_metadata_names(store: Store, options: dict[str, Any]) -> None:
    assert torch.equal(store.tensor(archive(TENSOR), sizes=[1000]), TENSOR)
    located(lambda: store.tensor(archive(TENSOR), **options), CorruptDataError, "not what `.metadata` says", store)


def test_nothing_is_executed(store: Store, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    located(lambda: store.tensor(archive(Attack())), UnsafeObjectError, "weights_only", store)
    assert not (tmp_path / "executed").exists()


def test_items_can_be_pickled() -> None:
    item = StockItem("a", 1, 2, ("stream.zstd/1",))
    assert pickle.loads(pickle.dumps(item)) == item


def test_golden_shards_are_named_in_full() -> None:
    for item in metadata_of(GOLDEN / "2.13-plain").state_dict_metadata.values():
        if isinstance(item, TensorStorageMetadata):
            assert item.chunks[0].sizes == item.size

"""`.metadata` that is as it should be, of every kind and age, and all the ways in which it can be wrong."""

from __future__ import annotations

import collections
import contextlib
import enum
import os
import pathlib
import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp import open_checkpoint
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, MetadataError, UnsafeMetadataError
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.metadata.shards import StockItem
from tests.effort import examples

from . import assembler as asm

SAVE_ID = "5d" * 16
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


def parse(data: bytes, **options: Any) -> Metadata:
    return parse_metadata(data, path="run/.metadata", **options)


# ---- what is read


def small_metadata() -> Metadata:
    file = ("__0_0_" + SAVE_ID + ".distcp", 1000, 96, 7)
    size = torch.Size([4, 6])
    halves = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 6])) for row in (0, 2)]
    return Metadata(
        state_dict_metadata={
            "model.w": TensorStorageMetadata(TensorProperties(torch.bfloat16), size, halves),
            "step": BytesStorageMetadata(),
        },
        planner_data={"model.w": ("model", "w"), "step": ("step",)},
        storage_data={
            MetadataIndex("model.w", [0, 0], 0): (file, 0),
            MetadataIndex("model.w", [2, 0], 1): (file, 1),
            MetadataIndex("step"): (file, 2),
        },
        storage_meta=StorageMeta(checkpoint_id="run", save_id=SAVE_ID),
        version="1.0.0",
    )


def test_read_what_was_written() -> None:
    metadata = small_metadata()
    metadata.state_dict_metadata["tied"] = metadata.state_dict_metadata["model.w"]
    parsed = parse(serialize_metadata(metadata))
    items = parsed.state_dict_metadata
    assert parsed == metadata and items["tied"] is items["model.w"]
    assert type(items["model.w"].size) is torch.Size and type(parsed.storage_data) is dict
    assert [index.index for index in parsed.storage_data] == [0, 1, None], "which takes no part in the comparison"
    first, *others = (file for file, _ in parsed.storage_data.values())
    assert all(file is first for file in others)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("optimized", [False, True])
def test_protocols(protocol: int, optimized: bool) -> None:
    data = pickle.dumps(small_metadata(), protocol)
    assert parse(pickletools.optimize(data) if optimized else data) == small_metadata()


fqns = st.text(min_size=1, max_size=300)
dims = st.lists(st.integers(0, 1 << 20), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> TensorStorageMetadata:
    whole = draw(dims)
    shards = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = [draw(st.integers(0, length)) for length in whole]
        sizes = [draw(st.integers(0, length - offset)) for length, offset in zip(whole, offsets, strict=True)]
        shards.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    properties = TensorProperties(
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([torch.strided, torch.sparse_coo, torch.jagged])),
        draw(st.booleans()),
        draw(st.sampled_from(formats)),
        draw(st.booleans()),
    )
    return TensorStorageMetadata(properties, torch.Size(whole), shards)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 300), 1 << 300)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner, max_size=3)
    ),
    max_leaves=10,
)


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    items = draw(st.dictionaries(fqns, tensors() | st.builds(BytesStorageMetadata), max_size=5))
    names = st.from_regex(r"__[0-9]{1,4}_[0-9]_[0-9a-f]{32}\.distcp", fullmatch=True)
    crcs = st.integers(0, (1 << 32) - 1)
    files = draw(st.lists(st.tuples(names, st.just(1 << 40), st.integers(0, 1 << 40), crcs), min_size=1, max_size=3))
    records = st.tuples(st.sampled_from(files), st.integers(0, (1 << 32) - 1))
    indices = [
        index
        for fqn, item in items.items()
        for index in (
            [MetadataIndex(fqn)]
            if isinstance(item, BytesStorageMetadata)
            else [MetadataIndex(fqn, shard.offsets, n) for n, shard in enumerate(item.chunks)]
        )
    ]
    parts = st.lists(st.text(max_size=5) | st.integers(0, 100), max_size=3)
    paths = {fqn: (fqn, *draw(parts)) for fqn in items}
    return Metadata(
        state_dict_metadata=items,
        planner_data=draw(st.just(paths) | plain_values.filter(lambda value: not isinstance(value, dict))),
        storage_data={index: draw(records) for index in indices},
        storage_meta=draw(
            st.none() | st.builds(StorageMeta, st.text() | st.builds(Path, st.just("a/b")), st.just(SAVE_ID))
        ),
        version=draw(st.none() | st.text()),
    )


@settings(max_examples=examples(200), deadline=None)
@given(metadatas())
def test_round_trip(metadata: Metadata) -> None:
    assert parse(serialize_metadata(metadata)) == metadata


def as_stock_pickle_reads(data: bytes) -> Metadata:
    metadata: Metadata = pickle.loads(data)
    metadata.storage_data = {
        index: StockItem(where.relative_path, where.offset, where.length, tuple(where.transform_descriptors or ()))
        for index, where in metadata.storage_data.items()
    }
    return metadata


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_metadata_of_a_stock_save(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.zeros(3, 4), "half": torch.zeros(2, dtype=torch.bfloat16), "scalar": torch.tensor(1)},
        "lists": [torch.ones(2), [torch.ones(0, 3), {"x": torch.ones(1)}]],
        "object": {"lr": 0.1},
        7: "seven",
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert parse(data) == as_stock_pickle_reads(data)


@pytest.mark.parametrize("strides", [(b"N",), (asm.sequence(asm.number(6), asm.number(1)),), (b"N", asm.text("later"))])
def test_tensor_properties_with_more_fields(strides: tuple[bytes, ...]) -> None:
    tensor = asm.tensor(properties=asm.properties(*strides))
    parsed = parse(asm.metadata(state_dict_metadata=asm.mapping(asm.text("w"), tensor)))
    properties = parsed.state_dict_metadata["w"].properties
    assert properties.dtype == torch.float32 and properties.memory_format == torch.contiguous_format
    if hasattr(properties, "strides"):
        assert properties.strides == (None if strides[0] == b"N" else (6, 1))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"])
def test_checkpoint_id_is_a_path(module: str, name: str) -> None:
    path = asm.call(asm.named(module, name), asm.text("a"), asm.text("b"))
    meta = parse(asm.metadata(storage_meta=asm.built("StorageMeta", checkpoint_id=path))).storage_meta
    assert meta is not None
    kind = type(meta.checkpoint_id)
    assert issubclass(kind, pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath)
    assert issubclass(kind, Path) == (name == type(Path()).__name__)
    assert os.fspath(meta.checkpoint_id or "").replace("\\", "/") == "a/b"


@pytest.mark.parametrize("is_named", [False, True], ids=["number", "as early Python 3.11 has it"])
@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [
        (0, "TORCH_CONTIGUOUS_FORMAT", torch.contiguous_format),
        (1, "TORCH_CHANNELS_LAST", torch.channels_last),
        (2, "TORCH_PRESERVE_FORMAT", torch.preserve_format),
    ],
)
def test_memory_formats(number: int, name: str, expected: torch.memory_format, is_named: bool) -> None:
    kind = asm.named(asm.METADATA, "_MEM_FORMAT_ENCODING")
    encoded = asm.call(kind, asm.number(number))
    if is_named:
        encoded = asm.call(asm.named("builtins", "getattr"), kind, asm.text(name))
    written = asm.properties().replace(asm.call(kind, asm.number(0)), encoded)
    assert encoded in written
    parsed = parse(asm.metadata(state_dict_metadata=asm.mapping(asm.text("w"), asm.tensor(properties=written))))
    assert parsed.state_dict_metadata["w"].properties.memory_format == expected


def test_attributes_of_a_later_torch_are_ignored() -> None:
    later = {"later": asm.mapping(asm.text("a"), asm.number(1)), "also": asm.named("torch", "float32")}
    shard = asm.built("ChunkStorageMetadata", offsets=asm.size(0, 0), sizes=asm.size(4, 6), **later)
    tensor = asm.tensor(None, shard, **later)
    data = asm.metadata(
        state_dict_metadata=asm.mapping(
            asm.text("w"), tensor, asm.text("b"), asm.built("BytesStorageMetadata", **later)
        ),
        storage_data=asm.mapping(asm.index(**later), asm.info(**later)),
        storage_meta=asm.built("StorageMeta", checkpoint_id=b"N", **later),
        **later,
    )
    metadata = parse(data)
    assert metadata.state_dict_metadata["w"].size == torch.Size([4, 6])
    assert not any(hasattr(value, "later") for value in (metadata, metadata.storage_meta, *metadata.storage_data))


def test_stock_item_with_transforms() -> None:
    item = asm.info(offset=5, transform_descriptors=asm.listed(asm.text("stream.zstd/1")))
    parsed = parse(asm.metadata(storage_data=asm.mapping(asm.index(), item)))
    assert list(parsed.storage_data.values()) == [StockItem("__0_0.distcp", 5, 10, ("stream.zstd/1",))]


# ---- what is refused


def test_not_metadata_at_all() -> None:
    data = pickle.dumps(small_metadata(), 4)
    cut = [data[:length] for length in range(0, len(data), 7)]
    for other in (*cut, b".", b"\x80\x04.", b"\x80\x04N.", b"\x80\x00N.", b"\x80\x06N.", b"{}", b"PK\x03\x04" * 100):
        with pytest.raises(MetadataError):
            parse(other)


def test_framing_that_is_wrong() -> None:
    data = asm.metadata()
    for protocol in (0, 1, 6, 255):
        with pytest.raises(MetadataError, match=f"protocol {protocol};"):
            parse(b"\x80" + bytes([protocol]) + data[2:])
    for length in (len(data) - 1, 1 << 63):
        with pytest.raises(MetadataError, match="last frame"):
            parse(b"\x80\x04\x95" + length.to_bytes(8, "little") + data[2:])
    assert parse(b"\x80\x04\x95" + (len(data) - 2).to_bytes(8, "little") + data[2:])
    with pytest.raises(MetadataError, match="one value"):
        parse(pickle.dumps(small_metadata(), 4) + b"x")


@settings(max_examples=examples(300), deadline=30_000)
@given(st.data())
def test_flipped_bytes_raise_nothing_else(data: st.DataObject) -> None:
    content = bytearray(asm.metadata() if data.draw(st.booleans()) else pickle.dumps(small_metadata(), 4))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        assert isinstance(parse(bytes(content)), Metadata)


@settings(max_examples=examples(300), deadline=30_000)
@given(st.lists(st.sampled_from([op.code.encode("latin-1") for op in pickletools.opcodes] + [b"\x00", b"\x01"])))
def test_random_opcodes_raise_nothing_else(opcodes: list[bytes]) -> None:
    with pytest.raises(CheckpointError):
        parse(asm.pickled(*opcodes))


W = asm.text("w")
LAYOUT = asm.call(asm.named("torch.serialization", "_get_layout"), asm.text("torch.strided"))
RECORD = asm.sequence(asm.file(), asm.number(0))


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (b"N", "where a tensor or bytes item must be"),
        (asm.index(), "where a tensor or bytes item must be"),
        (asm.named(asm.METADATA, "TensorStorageMetadata"), "where a tensor or bytes item must be"),
        (asm.fresh("TensorStorageMetadata"), "has no attributes"),
        (asm.fresh("TensorStorageMetadata") + asm.sequence() + asm.BUILD, "has no attributes"),
        (asm.tensor(size=asm.text("4x6")), "size is '4x6'"),
        (asm.tensor(size=asm.sequence(asm.number(4), asm.text("6"))), "has the dimension '6'"),
        (asm.tensor(size=asm.sequence(asm.number(4), asm.number(-6))), "has the dimension -6"),
        (asm.tensor(size=asm.sequence(*[asm.number(1)] * 65)), "not made of one tuple"),
        (asm.tensor(size=asm.size(4)), "not one of"),
        (asm.tensor(size=asm.size(4, 6, 1)), "not one of"),
        (asm.tensor(size=asm.size(4, 5)), "not inside"),
        (asm.tensor(size=asm.size(1 << 31, 1 << 31)), "larger than any"),
        (asm.tensor(size=asm.size(1 << 40, 0, 1 << 40)), "larger than any"),
        (asm.tensor(size=asm.call(asm.named("torch", "Size"), asm.sequence(asm.number(-1)))), "dimension -1"),
        (asm.tensor(size=asm.call(asm.named("torch", "Size"), asm.sequence(asm.number(1 << 63)))), "dimension"),
        (asm.tensor(size=asm.call(asm.named("torch", "Size"), asm.sequence(b"\x88"))), "dimension True"),
        (asm.tensor(size=asm.call(asm.named("torch", "Size"), asm.sequence(asm.text("4")))), "dimension '4'"),
        (asm.tensor(size=asm.call(asm.named("torch", "Size"), asm.listed(asm.number(4)))), "one tuple"),
        (asm.tensor(size=asm.call(asm.named("torch", "Size"))), "one tuple"),
        (asm.tensor(chunks=asm.EMPTY_LIST), "no list of shards"),
        (asm.tensor(chunks=asm.sequence()), "no list of shards"),
        (asm.tensor(chunks=asm.mapping(W, W)), "no list of shards"),
        (asm.tensor(chunks=asm.listed(b"N")), "must be"),
        (asm.tensor(None, asm.shard(asm.size(0, 0), asm.size(5, 6))), "not inside"),
        (asm.tensor(None, asm.shard(asm.size(1, 0), asm.size(4, 6))), "not inside"),
        (asm.tensor(None, asm.shard(asm.size(0), asm.size(4))), "not one of"),
        (asm.tensor(None, asm.shard(asm.size(0, 0), asm.size(4))), "not one of"),
        (asm.tensor(None, asm.shard(asm.sequence(asm.number(0)), asm.size(4, 6))), "is not one of"),
        (asm.tensor(None, asm.built("ChunkStorageMetadata", offsets=asm.size(0, 0))), "A shard's size is None"),
        (
            asm.tensor(None, asm.fresh("ChunkStorageMetadata") + asm.mapping(W, W, asm.number(1), W) + asm.BUILD),
            "by text",
        ),
        (asm.tensor(properties=b"N"), "TensorProperties must be"),
        (asm.tensor(properties=asm.fresh("TensorProperties")), "state"),
        (asm.tensor(properties=asm.built("TensorProperties", dtype=asm.named("torch", "float32"))), "state"),
        (asm.tensor(properties=asm.properties(dtype=asm.text("float32"))), "dtype is 'float32'"),
        (asm.tensor(properties=asm.properties(dtype=asm.named("torch", "Size"))), "dtype is torch.Size"),
        (asm.tensor(properties=asm.properties(dtype=asm.size(1))), "dtype is a size"),
        (
            asm.tensor(properties=asm.properties().replace(asm.text("torch.strided"), asm.text("strided"))),
            "Unknown layout",
        ),
        (asm.tensor(properties=asm.properties().replace(asm.number(0), asm.number(3))), "Unknown memory format"),
        (asm.tensor(properties=asm.properties().replace(LAYOUT, asm.number(3))), "layout is 3"),
        (asm.tensor(properties=asm.properties().replace(b"\x89", b"N")), "not a bool"),
    ],
)
def test_wrong_item(item: bytes, match: str) -> None:
    with pytest.raises(MetadataError, match=match) as caught:
        parse(asm.metadata(state_dict_metadata=asm.mapping(asm.text("w"), item)))
    # what is refused while opcodes run is of no key yet
    assert caught.value.fqn == "w" or match.startswith(("one tuple", "Unknown", "dimension"))


@pytest.mark.parametrize(
    ("location", "match"),
    [
        (b"N", "neither"),
        (W, "neither"),
        (asm.file(), "neither"),
        (asm.sequence(asm.file()), "neither"),
        (asm.sequence(asm.file(), b"N"), "neither"),
        (asm.sequence(asm.file(), asm.number(-1)), "neither"),
        (asm.sequence(asm.file(), asm.number(1 << 32)), "neither"),
        (asm.sequence(asm.file(), b"\x89"), "neither"),
        (asm.listed(asm.file(), asm.number(0)), "neither"),
        (asm.sequence(W, asm.number(0)), "where a file must be"),
        (asm.sequence(asm.listed(W, *[asm.number(1)] * 3), asm.number(0)), "where a file must be"),
        (asm.sequence(asm.sequence(W, asm.number(1), asm.number(1)), asm.number(0)), "where a file must be"),
        (asm.sequence(asm.file(asm.number(1)), asm.number(0)), "name of a file is 1"),
        (asm.sequence(asm.file(footer_nbytes=101), asm.number(0)), "out of range"),
        (asm.sequence(asm.file(footer_nbytes=-1), asm.number(0)), "out of range"),
        (asm.sequence(asm.file(file_nbytes=1 << 63), asm.number(0)), "out of range"),
        (asm.sequence(asm.file(crc=1 << 32), asm.number(0)), "out of range"),
        (asm.sequence(asm.file(crc=-1), asm.number(0)), "out of range"),
        (asm.info(offset=-1), "begins at -1"),
        (asm.info(length=-1), "has -1 bytes"),
        (asm.info(offset=1 << 62, length=1 << 62), "begins at"),
        (asm.info(length=1).replace(asm.number(1), b"\x88"), "has True bytes"),
        (asm.info(relative_path=b"N"), "name of a file is None"),
        (asm.info(transform_descriptors=W), "descriptors"),
        (asm.info(transform_descriptors=asm.listed(asm.number(1))), "descriptors"),
        (asm.info(transform_descriptors=asm.mapping(W, W)), "descriptors"),
    ],
)
def test_wrong_location(location: bytes, match: str) -> None:
    with pytest.raises(MetadataError, match=match) as caught:
        parse(asm.metadata(storage_data=asm.mapping(asm.index(), location)))
    assert caught.value.fqn == "w"


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"state_dict_metadata": b"N"}, "not a dict"),
        ({"state_dict_metadata": asm.listed()}, "not a dict"),
        ({"state_dict_metadata": asm.mapping(asm.number(5), asm.tensor())}, "is 5, not text"),
        ({"state_dict_metadata": asm.mapping(W, asm.tensor(), W, asm.tensor())}, "twice"),
        ({"state_dict_metadata": asm.EMPTY_DICT + asm.MARK + W + b"u"}, "no value"),
        ({"storage_data": b"N"}, "not a dict"),
        ({"storage_data": asm.mapping(W, RECORD)}, "MetadataIndex must be"),
        ({"storage_data": asm.mapping(asm.fresh("MetadataIndex"), RECORD)}, "no attributes"),
        ({"storage_data": asm.mapping(asm.index(asm.number(1)), RECORD)}, "names 1"),
        ({"storage_data": asm.mapping(asm.index(offset=W), RECORD)}, "The offset of a key of storage_data is"),
        ({"storage_data": asm.mapping(asm.index(index=W), RECORD)}, "the index 'w'"),
        ({"storage_data": asm.mapping(asm.index(index=asm.number(-1)), RECORD)}, "the index -1"),
        ({"storage_data": asm.mapping(asm.index(), RECORD, asm.index(), RECORD)}, "twice"),
        ({"storage_meta": W}, "StorageMeta must be"),
        ({"storage_meta": asm.fresh("StorageMeta")}, "no attributes"),
        ({"storage_meta": asm.built("StorageMeta", save_id=asm.number(1))}, "save_id is 1"),
        ({"storage_meta": asm.built("StorageMeta", load_id=asm.number(1))}, "load_id is 1"),
        ({"storage_meta": asm.built("StorageMeta", checkpoint_id=asm.number(1))}, "checkpoint_id is 1"),
        ({"storage_meta": asm.built("StorageMeta", modules=W)}, "modules"),
        ({"storage_meta": asm.built("StorageMeta", modules=asm.listed(asm.number(1)))}, "modules"),
        ({"version": asm.number(1)}, "version is 1"),
        ({"planner_data": asm.tensor()}, "plain value"),
        ({"planner_data": asm.named(asm.METADATA, "Metadata")}, "plain value"),
        ({"planner_data": asm.mapping(asm.number(1), asm.sequence(W))}, "not text"),
        ({"planner_data": asm.mapping(W, asm.sequence(asm.number(1), asm.number(1)))}, "leads nowhere"),
        ({"planner_data": asm.mapping(W, asm.sequence(W, b"G" + bytes(8)))}, "leads nowhere"),
        ({"planner_data": asm.listed(asm.mapping(asm.listed(), W))}, "can't be hashed"),
    ],
)
def test_wrong_part(attributes: dict[str, bytes], match: str) -> None:
    with pytest.raises(MetadataError, match=match) as caught:
        parse(asm.metadata(**attributes))
    assert caught.value.path == "run/.metadata"


# ---- what the user trusts


class Colour(enum.Enum):
    RED = 1


@dataclass
class Plan:
    name: str
    steps: list[int]


class Location:
    def __init__(self, relative_path: str) -> None:
        self.relative_path, self.offset, self.length = relative_path, 1, 2


class Remote:
    def __init__(self, url: str) -> None:
        self.url = url

    def __fspath__(self) -> str:
        return self.url

    def __reduce__(self) -> Any:
        return Remote, (self.url,)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def with_planner_data(value: object) -> bytes:
    metadata = small_metadata()
    metadata.planner_data = value
    return serialize_metadata(metadata)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Plan("a", [1, 2]), Plan),
        (Colour.RED, Colour),
        (collections.OrderedDict(a=1, b=[2]), collections.OrderedDict),
        (collections.deque([1, 2], maxlen=5), collections.deque),
        (collections.Counter("abca"), collections.Counter),
    ],
)
def test_trusted_class_in_planner_data(value: object, kind: type) -> None:
    data = with_planner_data([value, {"again": value}])
    with pytest.raises(UnsafeMetadataError, match=name_of(kind)):
        parse(data)
    parsed = parse(data, trusted_globals=[name_of(kind)]).planner_data
    assert parsed == [value, {"again": value}]
    assert type(parsed[0]) is kind and parsed[0] is parsed[1]["again"]


def test_trusted_class_itself() -> None:
    assert parse(with_planner_data([Plan]), trusted_globals=[name_of(Plan)]).planner_data == [Plan]


def test_trusted_checkpoint_id() -> None:
    metadata = small_metadata()
    metadata.storage_meta = StorageMeta(checkpoint_id=Remote("gs://x"))
    parsed = parse(serialize_metadata(metadata), trusted_globals=[name_of(Remote)])
    assert parsed.storage_meta is not None and os.fspath(parsed.storage_meta.checkpoint_id or "") == "gs://x"


def test_trusted_storage_info() -> None:
    metadata = small_metadata()
    metadata.storage_data = {MetadataIndex("step"): Location("a")}
    parsed = parse(pickle.dumps(metadata), trusted_globals=[name_of(Location)])
    assert parsed.storage_data == {MetadataIndex("step"): StockItem("a", 1, 2, ())}


@pytest.mark.parametrize("name", [name_of(Colour), __name__, "builtins.object"])
def test_trust_is_exact(name: str) -> None:
    with pytest.raises(UnsafeMetadataError, match=name_of(Plan)):
        parse(with_planner_data([Plan("a", [])]), trusted_globals=[name])


def test_trusted_call_that_fails() -> None:
    call = asm.call(asm.named(__name__, "Colour"), asm.number(7))
    with pytest.raises(MetadataError, match="can't be built: ValueError"):
        parse(asm.metadata(planner_data=asm.listed(call)), trusted_globals=[name_of(Colour)])


def test_build_never_changes_a_trusted_class() -> None:
    poison = asm.named(__name__, "Plan") + asm.mapping(asm.text("name"), asm.text("x")) + asm.BUILD
    with pytest.raises(UnsafeMetadataError, match="state of something"):
        parse(asm.metadata(planner_data=poison), trusted_globals=[name_of(Plan)])


def test_trusted_global_inside_itself() -> None:
    loop = asm.fresh("Plan", __name__) + asm.MEMOIZE + asm.mapping(asm.text("steps"), asm.get(0)) + asm.BUILD
    with pytest.raises(UnsafeMetadataError, match="inside themselves"):
        parse(asm.metadata(planner_data=asm.listed(loop)), trusted_globals=[name_of(Plan)])


@pytest.mark.parametrize(
    "names", ["a.b", [1], ["nodots"], ["no_such_module.x"], ["os.no_such_name"], ["os:path"], [""], ["os..path"]]
)
def test_wrong_trusted_globals(names: Any) -> None:
    # a single name would otherwise be taken letter by letter
    match = "takes a sequence" if isinstance(names, str) or names == [1] else "can't be imported"
    with pytest.raises(ConfigurationError, match=match):
        parse(asm.metadata(), trusted_globals=names)


def test_plans_beside_the_metadata(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(6.0), "n": [3, "x"]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = dcp.FileSystemWriter(tmp_path).prepare_global_plan([planner.create_local_plan()])
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.all_local_plans = plan
    file.write_bytes(pickle.dumps(metadata))
    assert b"SavePlan" in file.read_bytes() and b"_StoragePrefix" in file.read_bytes()
    assert open_checkpoint(tmp_path)["w"][:].tolist() == list(range(6))

"""`.metadata` from arrays: what pickle and the safe reader make of it is DCP's metadata, in few bytes a shard."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties

from dcp_nvcomp.errors import CheckpointError, MetadataError, UnsafeMetadataError
from dcp_nvcomp.format.metadata import pickle_machine, row_reader
from dcp_nvcomp.format.metadata.places import ShardPlaces
from dcp_nvcomp.format.metadata.publishable import arrays_to_publish
from dcp_nvcomp.format.metadata.rows import MetadataArrays, TensorShards, sample_of, serialize_arrays, unfolded
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.metadata.summary import Summary, summary_at_end, with_trailer
from tests.effort import examples


def sharded(shards: int, dtype: torch.dtype = torch.float32, columns: int = 4) -> TensorShards:
    offsets = np.stack([np.arange(shards) * 2, np.zeros(shards, np.int64)], 1)
    sizes = np.tile(np.array([2, columns]), (shards, 1))
    return TensorShards(TensorProperties(dtype), (2 * shards, columns), offsets, sizes)


def arrays(
    tensors: dict[str, TensorShards | None],
    *,
    files: int = 3,
    planner_data: Any = None,
    records: Any = None,
    version: str | None = "1.0.0",
) -> MetadataArrays:
    counts = [1 if tensor is None else len(tensor.offsets) for tensor in tensors.values()]
    count = sum(counts)
    return MetadataArrays(
        list(tensors),
        list(tensors.values()),
        [np.arange(one)[::-1].copy() for one in counts],
        planner_data,
        [(f"__{number}_0_{number:032x}.distcp", 1 << 33, 100, 0xFFFFFFFF) for number in range(files)],
        np.arange(count) % files,
        np.arange(count) if records is None else records,
        StorageMeta("/here", "0" * 32),
        version,
    )


def assert_read(made: MetadataArrays, summary: Summary | None = None) -> bytes:
    data, expected = serialize_arrays(made, summary), unfolded(made)
    stock = pickle.loads(data)
    assert {name: value for name, value in vars(stock).items() if not name.startswith("dcp_nvcomp")} == vars(expected)
    for found in (stock, parse_metadata(data, path="here")):
        assert found.state_dict_metadata == expected.state_dict_metadata
        assert list(found.state_dict_metadata) == list(made.keys)
        assert found.planner_data == expected.planner_data
        assert found.storage_data == expected.storage_data
        assert (found.storage_meta, found.version) == (expected.storage_meta, expected.version)
    hints = {(index.fqn, index.offset): index.index for index in stock.storage_data}
    assert hints == {(index.fqn, index.offset): index.index for index in expected.storage_data}
    return data


_KEYS = st.text(min_size=1, max_size=5) | st.sampled_from(["a" * 255, "a" * 256, "\udcff", "é", ".keys"])
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary(max_size=3)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
_PATHS = st.dictionaries(
    _KEYS,
    st.lists(st.text(max_size=3) | st.integers(0, 3), min_size=1, max_size=3).map(lambda parts: ("root", *parts)),
    max_size=3,
)


@st.composite
def _made(draw: st.DrawFn) -> MetadataArrays:
    kinds: list[TensorShards | None] = [None]
    for _ in range(draw(st.integers(0, 3))):
        dims, shards = draw(st.integers(0, 3)), draw(st.integers(1, 4))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]))
        offsets = np.zeros((shards if dims else 1, dims), np.int64)
        offsets[:, :1] = np.arange(len(offsets))[:, None] * 70_000
        sizes = np.ones_like(offsets)
        shape = tuple(int(length) for length in (offsets + sizes).max(0)) if dims else ()
        properties = TensorProperties(dtype, requires_grad=draw(st.booleans()), pin_memory=draw(st.booleans()))
        kinds.append(TensorShards(properties, shape, offsets, sizes))
    keys = draw(st.lists(_KEYS, unique=True, max_size=6))
    planner_data = draw(st.none() | _PATHS)
    if planner_data is not None and draw(st.booleans()):
        planner_data[".names"] = draw(
            st.lists(st.tuples(st.tuples(st.text(max_size=2)), _VALUES), max_size=2).map(tuple)
        )
    made = arrays({key: draw(st.sampled_from(kinds)) for key in keys}, planner_data=planner_data)
    wide = draw(st.sampled_from([0, 255, 256, 65_535, 65_536, (1 << 31) - 1]))
    return dataclasses.replace(made, records=np.full(len(made.records), wide))


@given(_made(), st.booleans())
@settings(max_examples=examples(1000))
def test_metadata_is_that_of_dcp(made: MetadataArrays, with_summary: bool) -> None:
    summary = Summary("0" * 32, 1.5, 4, 3, 10, 5) if with_summary else None
    data = assert_read(made, summary)
    assert summary_at_end(data) == summary


@pytest.mark.parametrize("keys", [240, 300], ids=lambda count: f"{count} keys")
def test_many_keys(keys: int) -> None:
    """As many memo slots as take one byte, and more."""
    one = sharded(2)
    assert_read(arrays({f"k{number}": one if number % 2 else None for number in range(keys)}))


def test_many_shards_take_few_bytes_each() -> None:
    """512 ranks x 100 tensors of three shapes: 45 bytes a shard at most, everything counted."""
    kinds = [sharded(512, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    keys = {f"model.layers.{number}.mlp.weight": kinds[number % 3] for number in range(300)}
    paths = {key: tuple(key.split(".")) for key in keys}
    made = arrays(keys, files=512, planner_data=paths, records=np.arange(512 * 300) % 300)
    data = assert_read(made)
    assert len(data) / (512 * 300) <= 45
    assert len(data) < 0.8 * len(serialize_metadata(unfolded(made)))


def test_hints_and_records_of_more_than_two_bytes() -> None:
    assert_read(arrays({"w": sharded(66_000)}, records=np.arange(66_000) * 30_000))


def test_a_sample_has_each_kind() -> None:
    one, other = sharded(50), sharded(50, torch.bfloat16)
    made = sample_of(arrays({"a": one, "b": None, "c": one, "d": other, "e": None}))
    assert made.keys == ["a", "b", "d"]
    assert_read(made)


@pytest.mark.parametrize("shards", [2, 200], ids=["whole", "sampled"])
@pytest.mark.parametrize(
    ("planner_data", "words"),
    [({"w": ("w", 1 << 40)}, "list indices beyond"), ({"w": ("w",)}, None)],
)
def test_what_no_load_could_read_is_refused(shards: int, planner_data: Any, words: str | None) -> None:
    made = arrays({"w": sharded(shards)}, planner_data=planner_data)
    if words is None:
        data, is_settled = arrays_to_publish(made, path="here")
        assert is_settled and data == serialize_arrays(made)
        return
    with pytest.raises(MetadataError, match=words):
        arrays_to_publish(made, path="here")


def test_what_is_too_small_for_its_paths_is_written_as_objects() -> None:
    """A reader takes list indices up to the size of the file: an object for each shard is longer."""
    tensor = sharded(1_000)
    made = arrays(dict.fromkeys("abcdefghijklmnopqrst", tensor), planner_data={"a": ("list", 65_536 + 900_000)})
    assert len(serialize_arrays(made)) < 900_000 < len(serialize_metadata(unfolded(made)))
    data, is_settled = arrays_to_publish(made, path="here")
    assert not is_settled
    assert parse_metadata(data, path="here").planner_data == made.planner_data


def test_objects_have_no_offset() -> None:
    found = pickle.loads(serialize_arrays(arrays({"step": None})))
    assert [vars(index) for index in found.storage_data] == [vars(MetadataIndex("step"))]


# --- rows that are read all at once ----------------------------------------------------------------------------------


def as_columns(data: bytes) -> Any:
    return parse_metadata(data, path="here")


def one_by_one(data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle_machine, "rows_at", lambda *_: None)
        return parse_metadata(data, path="here")


def with_crc(data: bytes) -> bytes:
    return with_trailer(data[:-12])


def some_rows() -> bytes:
    one, other = sharded(20), sharded(40, torch.bfloat16)
    return serialize_arrays(arrays({"a": one, "b": None, "c": one, "d": other, **{f"o{n}": None for n in range(20)}}))


def test_rows_are_columns_until_a_shard_is_asked_for() -> None:
    data = some_rows()
    found, expected = as_columns(data).storage_data, one_by_one(data).storage_data
    assert type(found) is ShardPlaces and type(expected) is dict
    assert found == expected and len(found) == len(expected) == 101
    assert list(found.items()) == list(expected.items()) and list(found.values()) == list(expected.values())
    assert [index.index for index in found] == [index.index for index in expected]
    for index, place in expected.items():
        assert found[index] == place and type(found[index]) is type(place)
    for index in (MetadataIndex("z"), MetadataIndex("a", [1, 0]), MetadataIndex("a"), MetadataIndex("b", [0, 0])):
        assert index not in found and found.get(index) is None
        with pytest.raises(KeyError):
            found[index]
    assert len(found.items()) == len(found.values()) == 101 and list(found.items()) == list(found.items())
    assert "a" not in found and found.get(3) is None
    assert type(pickle.loads(pickle.dumps(found))) is dict and pickle.loads(pickle.dumps(found)) == expected


def test_few_rows_are_read_one_by_one() -> None:
    assert type(as_columns(serialize_arrays(arrays({"a": sharded(15)}))).storage_data) is dict
    assert type(as_columns(serialize_arrays(arrays({"a": sharded(16)}))).storage_data) is ShardPlaces


def test_rows_nest_as_deep_as_what_is_read_one_by_one() -> None:
    """Their dict inside so many tuples, which a reader refuses for their sake only once it has read all of it."""
    data, is_too_deep = some_rows(), []
    begin, end = data.index(b"storage_data") + len(b"storage_data") + 1, data.index(b"\x8c\x0cstorage_meta")
    for depth in range(55, 65):
        nested = with_crc(data[:begin] + b"(" * depth + data[begin:end] + b"t" * depth + data[end:])
        said = [_said(read, nested) for read in (as_columns, one_by_one)]
        assert said[0] == said[1], depth
        is_too_deep.append("nests more than" in said[0])
    assert is_too_deep == sorted(is_too_deep) and {True, False} == set(is_too_deep)


@pytest.mark.parametrize("where", ["before", "after"])
def test_rows_make_containers_as_what_is_read_one_by_one(where: str) -> None:
    """As many empty dicts beside the rows as leave no room for theirs."""
    data = serialize_arrays(arrays({"w": sharded(2_000)}))
    for dicts in range(0, 60_000, 3_000):
        before, after = (b"}" * dicts, b"") if where == "before" else (b"", b"}" * dicts)
        spoilt = with_trailer(data[:2] + b"(" + before + data[2:-13] + after + b"t.")
        assert _said(as_columns, spoilt) == _said(one_by_one, spoilt), dicts
    assert "more containers" in _said(as_columns, spoilt)


def _said(read: Any, data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(data)
    return str(caught.value)


def test_what_looks_like_many_rows_takes_no_longer_than_it_is() -> None:
    """Groups of few rows: each is looked at, and not all that follows it."""
    data = serialize_arrays(arrays({"w": sharded(16)}))
    begin = data.index(b"(", data.index(b"storage_data"))
    end = data.index(b"u", begin + 36 * 16) + 1
    looked: list[int] = []
    frombuffer = np.frombuffer

    def noted(*arguments: Any) -> Any:
        looked.append(arguments[2])
        return frombuffer(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader.np, "frombuffer", noted)
        with pytest.raises(MetadataError, match="key twice"):
            as_columns(with_crc(data[:begin] + data[begin:end] * 300 + data[end:]))
    assert sum(looked) < 300 * 16 * 8


@pytest.mark.parametrize("wide", [0, 70_000])
def test_rows_that_repeat_a_shard_are_refused(wide: int) -> None:
    data = serialize_arrays(arrays({"a": sharded(20), "b": sharded(20)}, records=np.arange(40) + wide))
    begin = data.index(b"(", data.index(b"storage_data")) + 1
    row = 36 if wide == 0 else 38
    assert data[begin : begin + 2] == data[begin + row : begin + row + 2], "a row begins as the next one does"
    for at in (begin, begin + 39 * row):
        repeated = with_crc(data[:at] + data[begin + 39 * row : begin + 40 * row] + data[at:])
        for read in (as_columns, one_by_one):
            with pytest.raises(MetadataError, match="storage_data has a key twice"):
                read(repeated)


def test_offsets_that_collide_are_refused() -> None:
    """Sizes hash alike in each process, and a dict of such ones is quadratic."""
    found = row_reader.PickledRows()
    same = [torch.Size([number]) for number in range(200)]
    found.values = {"fqn": ["w"], "offset": same, "file": [("f", 1, 1, 1)]}
    zeros = np.zeros(200, np.int64)
    found.numbers = {"fqn": zeros, "offset": np.arange(200), "file": zeros, "index": zeros, "record": zeros}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "hash", lambda value: 1, raising=False)
        with pytest.raises(UnsafeMetadataError, match="collide"):
            row_reader.joined([found])


def outcome(read: Any, data: bytes) -> Any:
    try:
        found = read(data)
    except CheckpointError as error:
        return type(error).__name__
    hints = {index: index.index for index in found.storage_data}
    return found.state_dict_metadata, dict(found.storage_data.items()), hints


@given(st.data())
@settings(max_examples=examples(3000))
def test_hostile_rows_are_what_the_machine_makes_of_them(data: st.DataObject) -> None:
    """Any bytes changed, moved or cut out: columns say what opcode after opcode says, or both refuse."""
    good = some_rows()
    begin = good.index(b"storage_data")
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(begin, len(changed) - 13))
        kind = data.draw(st.sampled_from(["flip", "cut", "repeat", "slot"]))
        if kind == "flip":
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 40))]
        elif kind == "slot":
            changed[at : at + 4] = data.draw(st.integers(0, 300)).to_bytes(4, "little")
        else:
            changed[at:at] = changed[at : at + data.draw(st.integers(1, 40))]
        if len(changed) - 13 <= begin:
            return
    hostile = with_crc(bytes(changed))
    assert outcome(as_columns, hostile) == outcome(one_by_one, hostile)

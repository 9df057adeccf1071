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

from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.metadata.publishable import arrays_to_publish
from dcp_nvcomp.format.metadata.rows import MetadataArrays, TensorShards, sample_of, serialize_arrays, unfolded
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.metadata.summary import Summary, summary_at_end
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

"""What is published can be read: equivalents are written, and what the reader refuses is refused before the commit."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import CheckpointError, MetadataError
from dcp_nvcomp.format.metadata.publishable import metadata_to_publish, normalize, sample
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from tests.effort import examples

Change = Callable[[Metadata], None]


def _own(kind: type) -> Any:
    """A planner's own class."""
    return type(f"My{kind.__name__}", (kind,), {})


MyMetadata, MyTensor, MyShard = _own(Metadata), _own(TensorStorageMetadata), _own(ChunkStorageMetadata)
MyBytes, MyProperties, MyIndex = _own(BytesStorageMetadata), _own(TensorProperties), _own(MetadataIndex)


class MyText(str):
    """A planner's."""

    __slots__ = ()


def metadata(tensors: int = 4) -> Metadata:
    """Tensors of two shards each, of two kinds, and a Python object."""
    files = [(f"__{n}_0_{'5d' * 16}.distcp", 1000, 96, 7) for n in range(2)]
    made = Metadata({"step": BytesStorageMetadata()}, {"step": ("step",)}, {MetadataIndex("step"): (files[0], 0)})
    for number in range(tensors):
        fqn = f"layers.{number}.weight"
        shards = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 6])) for row in (0, 2)]
        properties = TensorProperties(torch.bfloat16 if number % 2 else torch.float32)
        made.state_dict_metadata[fqn] = TensorStorageMetadata(properties, torch.Size([4, 6]), shards)
        made.planner_data[fqn] = ("layers", number, "weight")
        for n, shard in enumerate(shards):
            made.storage_data[MetadataIndex(fqn, shard.offsets, n)] = (files[n], number)
    return made


def tensor(made: Metadata, number: int = 1) -> Any:
    return made.state_dict_metadata[f"layers.{number}.weight"]


def put(made: Metadata, item: Any, number: int = 1) -> None:
    made.state_dict_metadata[f"layers.{number}.weight"] = item


def put_shard(made: Metadata, shard: Any, number: int = 1) -> None:
    tensor(made, number).chunks[1] = shard


def put_index(made: Metadata, make: Callable[[MetadataIndex], MetadataIndex]) -> None:
    made.storage_data = {
        make(index) if index.fqn == "layers.1.weight" else index: place for index, place in made.storage_data.items()
    }


def with_offset(index: MetadataIndex, offset: Any) -> MetadataIndex:
    object.__setattr__(index, "offset", offset)
    return index


# What stock DCP takes and writes, and what is written here as something that the reader takes too.
EQUIVALENTS: dict[str, Change] = {
    "size: tuple": lambda m: setattr(tensor(m), "size", (4, 6)),
    "size: list": lambda m: setattr(tensor(m), "size", [4, 6]),
    "size: numpy": lambda m: setattr(tensor(m), "size", torch.Size([np.int64(4), np.int32(6)])),
    "offsets: tuple": lambda m: setattr(tensor(m).chunks[0], "offsets", (0, 0)),
    "offsets: numpy": lambda m: setattr(tensor(m).chunks[0], "offsets", torch.Size([np.int64(0), 0])),
    "sizes: list": lambda m: setattr(tensor(m).chunks[0], "sizes", [2, 6]),
    "chunks: tuple": lambda m: setattr(tensor(m), "chunks", tuple(tensor(m).chunks)),
    "shard: subclass": lambda m: put_shard(m, MyShard(torch.Size([2, 0]), torch.Size([2, 6]))),
    "tensor: subclass": lambda m: put(m, MyTensor(**vars(tensor(m)))),
    "bytes: subclass": lambda m: m.state_dict_metadata.update(step=MyBytes()),
    "properties: subclass": lambda m: setattr(tensor(m), "properties", MyProperties(torch.bfloat16)),
    "properties: old": lambda m: setattr(tensor(m), "properties", OldTensorProperties(torch.bfloat16)),
    "tensor: an attribute": lambda m: setattr(tensor(m), "tag", object()),
    "shard: an attribute": lambda m: setattr(tensor(m).chunks[1], "tag", MyText("a")),
    "bytes: an attribute": lambda m: setattr(m.state_dict_metadata["step"], "tag", object()),
    "index: subclass": lambda m: put_index(m, lambda index: MyIndex(index.fqn, index.offset, index.index)),
    "index: tuple": lambda m: put_index(m, lambda index: with_offset(index, tuple(index.offset or ()))),
    "items: OrderedDict": lambda m: setattr(m, "state_dict_metadata", OrderedDict(m.state_dict_metadata)),
}

# What only an error before the commit can answer.
REFUSED: dict[str, Change] = {
    "properties: none": lambda m: setattr(tensor(m), "properties", None),
    "properties: text": lambda m: setattr(tensor(m).properties, "dtype", "bfloat16"),
    "properties: 1": lambda m: setattr(tensor(m).properties, "requires_grad", 1),
    "properties: memory format": lambda m: setattr(tensor(m).properties, "memory_format", torch.channels_last_3d),
    "size: floats": lambda m: setattr(tensor(m), "size", (4.0, 6.0)),
    "size: negative": lambda m: setattr(tensor(m), "size", torch.Size([-4, 6])),
    "size: none": lambda m: setattr(tensor(m), "size", None),
    "size: beyond int64": lambda m: setattr(tensor(m), "size", torch.Size([1 << 40, 1 << 40])),
    "no shards": lambda m: setattr(tensor(m), "chunks", []),
    "shard: none": lambda m: put_shard(m, None),
    "shard: outside": lambda m: put_shard(m, ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([2, 6]))),
    "shard: other dims": lambda m: put_shard(m, ChunkStorageMetadata(torch.Size([2]), torch.Size([2]))),
    "shard: negative": lambda m: put_shard(m, ChunkStorageMetadata(torch.Size([-1, 0]), torch.Size([2, 6]))),
    "item: none": lambda m: put(m, None),
    "item: text": lambda m: put(m, "layers"),
    "key: a number": lambda m: m.state_dict_metadata.update({7: tensor(m)}),  # type: ignore[dict-item]
    "key: a text of its own": lambda m: m.state_dict_metadata.update({MyText("seven"): tensor(m)}),
    "index: a negative hint": lambda m: put_index(m, lambda index: MetadataIndex(index.fqn, index.offset, -1)),
    "index: an offset that is text": lambda m: put_index(m, lambda index: with_offset(index, "a")),
    "index: a negative offset": lambda m: put_index(m, lambda index: with_offset(index, torch.Size([-1]))),
    "index: a text of its own": lambda m: put_index(m, lambda index: MetadataIndex(MyText(index.fqn), index.offset)),
    "tensor: a subclass without properties": lambda m: put(m, object.__new__(MyTensor)),
    "items: none": lambda m: setattr(m, "state_dict_metadata", None),
    "planner_data: an object": lambda m: m.planner_data.update(step=object()),
    "planner_data: a set": lambda m: m.planner_data.update(step={1}),
    "planner_data: a frozenset": lambda m: m.planner_data.update(step=frozenset([1])),
    "planner_data: a bytearray": lambda m: m.planner_data.update(step=bytearray(b"x")),
    "planner_data: of numpy": lambda m: m.planner_data.update(step=np.float64(1.0)),
    "planner_data: a device": lambda m: m.planner_data.update(step=torch.device("cpu")),
    "planner_data: a long number": lambda m: m.planner_data.update(step=1 << 9999),
    "planner_data: a function": lambda m: m.planner_data.update(step=lambda: None),
}


def published(made: Metadata) -> Metadata:
    return parse_metadata(metadata_to_publish(made, path="run/.metadata"), path="run/.metadata")


@pytest.fixture(params=[True, False], ids=["whole", "sampled"])
def _reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading what is about to be published."""
    if not request.param:
        monkeypatch.setattr("dcp_nvcomp.format.metadata.publishable._FEW_SHARDS", 0)


@pytest.mark.usefixtures("_reads")
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_equivalents_are_written(name: str) -> None:
    made = metadata()
    EQUIVALENTS[name](made)
    assert published(made) == metadata()
    assert made == metadata(), "also in the object that DCP's caller gets"
    mine = MyMetadata(**vars(metadata()))
    mine.extra = object()
    assert published(mine) == metadata()


@pytest.mark.usefixtures("_reads")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_load_could_read_is_refused(name: str) -> None:
    made = metadata()
    REFUSED[name](made)
    with pytest.raises(MetadataError, match="The save is not published, because no load could read its metadata") as at:
        metadata_to_publish(made, path="run/.metadata")
    assert at.value.path == "run/.metadata"


def test_advice_is_only_of_what_a_writer_can_do() -> None:
    made = metadata()
    made.planner_data["step"] = MyText("a")
    with pytest.raises(MetadataError, match="names the global .*MyText") as caught:
        metadata_to_publish(made, path="x")
    assert "trusted_globals" not in caught.value.message
    made = metadata()
    REFUSED["shard: outside"](made)
    with pytest.raises(MetadataError) as caught:
        metadata_to_publish(made, path="x")
    assert caught.value.fqn == "layers.1.weight"


def test_many_objects_are_plainly_readable() -> None:
    made = metadata()
    assert normalize(made)[1] == set()
    put_index(made, lambda index: MetadataIndex(index.fqn))
    assert normalize(made)[1] == set()
    next(iter(made.storage_data)).__dict__["tag"] = object()
    assert normalize(made)[1] == {MetadataIndex("step")}


def test_the_whole_decides_if_a_sample_is_refused() -> None:
    """What a reader builds is bounded by the size of what it reads, and a sample is smaller."""
    made = metadata(600)
    made.planner_data = {f"step.{n}": ("step", n) for n in range(3)} | {"far": ("far", 120_000)}
    assert parse_metadata(serialize_metadata(made), path="x") == made
    assert refuses(lambda: sample(*normalize(made))), "else this is no test"
    assert parse_metadata(metadata_to_publish(made, path="x"), path="x") == made


def refuses(make: Callable[[], Metadata]) -> bool:
    try:
        parse_metadata(serialize_metadata(make()), path="x")
    except (CheckpointError, TypeError, AttributeError, ValueError, RuntimeError):
        return True
    return False


places = st.sampled_from([None, 1, 1.5, True, "a", (), torch.Size([]), object, torch.Size([1]), np.int64(1), -1, [1]])
lengths = st.lists(st.integers(-1, 6) | st.sampled_from([np.int64(1), True, 1 << 62]), min_size=1, max_size=3)
sizes = lengths.map(torch.Size) | lengths.map(tuple) | places


def _set_in_part(made: Metadata, draw: st.DrawFn, number: int) -> None:
    found = tensor(made, number)
    part, names = draw(
        st.sampled_from(
            [(found, ["size", "properties", "chunks", "tag"]), (found.chunks[1], ["offsets", "sizes", "tag"])]
        )
    )
    setattr(part, draw(st.sampled_from(names)), draw(sizes))


def _set_in_properties(made: Metadata, draw: st.DrawFn, number: int) -> None:
    values = st.sampled_from([torch.int64, torch.strided, torch.contiguous_format, 0, 1, False, True, None, "a"])
    names = [field.name for field in dataclasses.fields(TensorProperties)]
    setattr(tensor(made, number).properties, draw(st.sampled_from(names)), draw(values))


def _set_in_index(made: Metadata, draw: st.DrawFn, number: int) -> None:
    name, value = draw(st.sampled_from(["offset", "index", "fqn", "tag"])), draw(sizes)
    index = next(index for index in made.storage_data if index.fqn == f"layers.{number}.weight")
    changed = copy.copy(index)
    object.__setattr__(changed, name, value)
    try:
        hash(changed)
    except TypeError:
        return
    place = made.storage_data.pop(index)
    made.storage_data[changed] = place


def _set_in_place(made: Metadata, draw: st.DrawFn, number: int) -> None:
    index = next(index for index in made.storage_data if index.fqn == f"layers.{number}.weight")
    made.storage_data[index] = (made.storage_data[index][0], draw(places))


@st.composite
def changed_metadatas(draw: st.DrawFn) -> Metadata:
    made = metadata(6)
    ways = [_set_in_part, _set_in_properties, _set_in_place, _set_in_index]
    for number in draw(st.lists(st.integers(0, 5), max_size=3, unique=True)):
        draw(st.sampled_from(ways))(made, draw, number)
    return made


@settings(max_examples=examples(600), deadline=None)
@given(changed_metadatas())
def test_a_sample_is_refused_exactly_if_the_whole_is(made: Metadata) -> None:
    normal, doubtful = normalize(made)
    assert refuses(lambda: sample(normal, doubtful)) == refuses(lambda: normal)


def test_a_sample_is_small() -> None:
    normal, doubtful = normalize(metadata(1000))
    few = sample(normal, doubtful)
    assert len(few.state_dict_metadata) == 3, "a bytes item and two dtypes"
    assert len(few.storage_data) == 2, "one for each file"

"""Rank-local metadata (`use_collectives=False`): merged, checked, and each rank's own copies preferred."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import IncompleteCheckpointError, MetadataError
from dcp_nvcomp.format.metadata.rank_metadata import merge_rank_metadata, prefer_rank
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from tests.cpu_time import within_cpu_seconds
from tests.effort import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def part(
    rank: int,
    size: tuple[int, ...] = (8, 4),
    boxes: list[Box] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    name: str = "w",
    objects: tuple[str, ...] = (),
) -> Metadata:
    """What one rank saved: some shards of a tensor, and some objects."""
    file = (f"__{rank}_0.distcp", 100, 8, rank)
    shards = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes or []]
    items: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in objects}
    indices = [MetadataIndex(fqn) for fqn in objects]
    if shards:
        items[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), shards)
        indices += [MetadataIndex(name, shard.offsets, 0) for shard in shards]
    return Metadata(
        state_dict_metadata=items,
        planner_data={fqn: (fqn,) for fqn in items},
        storage_data={index: (file, record) for record, index in enumerate(indices)},
        storage_meta=StorageMeta("run", f"{rank:032x}"),
        version="1.0.0",
    )


def merge(*parts: Metadata) -> Metadata:
    return merge_rank_metadata(dict(enumerate(parts)), path="run")


def owners(metadata: Metadata, name: str = "w") -> dict[tuple[int, ...] | None, int]:
    """Which rank's file each shard is taken from."""
    found = {}
    for index, (file, _) in metadata.storage_data.items():
        if index.fqn == name:
            found[None if index.offset is None else tuple(index.offset)] = file[3]
    return found


ROWS = [[((row, 0), (2, 4))] for row in range(0, 8, 2)]
WHOLE: list[Box] = [((0, 0), (8, 4))]


def test_shards_of_all_ranks() -> None:
    merged = merge(*[part(rank, boxes=boxes) for rank, boxes in enumerate(ROWS)])
    shards = merged.state_dict_metadata["w"].chunks
    assert [tuple(shard.offsets) for shard in shards] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert owners(merged) == {(0, 0): 0, (2, 0): 1, (4, 0): 2, (6, 0): 3}
    assert [index.index for index in merged.storage_data] == [0, 1, 2, 3]
    assert parse_metadata(serialize_metadata(merged), path="run") == merged


def test_the_lowest_rank_has_replicas_and_objects() -> None:
    merged = merge(part(0, name="other", boxes=WHOLE), *[part(rank, boxes=WHOLE, objects=("o",)) for rank in (1, 2)])
    assert len(merged.state_dict_metadata["w"].chunks) == 1
    assert owners(merged) == {(0, 0): 1} and owners(merged, "o") == {None: 1}
    assert merged.planner_data == {"w": ("w",), "other": ("other",), "o": ("o",)}
    assert merged.storage_meta is not None and merged.storage_meta.save_id == f"{0:032x}"


def test_a_rank_prefers_its_own() -> None:
    parts = [part(rank, boxes=WHOLE, objects=("o", f"only{rank}")) for rank in range(3)]
    merged = merge(*parts)
    for rank in range(3):
        storage = prefer_rank(merged, parts[rank])
        assert storage[MetadataIndex("w", [0, 0])][0][3] == rank and storage[MetadataIndex("o")][0][3] == rank
        assert storage[MetadataIndex("only1")][0][3] == 1
        assert storage.keys() == merged.storage_data.keys()
    assert owners(merged) == {(0, 0): 0}  # as it was


def test_empty_shards_give_way() -> None:
    # DTensor saves one for each rank that has no rows; its offset may be that of another's
    parts = [
        part(0, boxes=[((0, 0), (0, 4))]),
        part(1, boxes=WHOLE),
        part(2, boxes=[((0, 0), (0, 4)), ((8, 0), (0, 4))]),
    ]
    merged = merge(*parts)
    assert owners(merged) == {(0, 0): 1, (8, 0): 2}
    assert tuple(merged.state_dict_metadata["w"].chunks[0].sizes) == (8, 4)
    assert prefer_rank(merged, parts[0])[MetadataIndex("w", [0, 0])][0][3] == 1


def test_tensors_without_elements_and_without_dimensions() -> None:
    assert owners(merge(part(0, (0, 4), [((0, 0), (0, 4))]), part(1, (0, 4), [((0, 0), (0, 4))]))) == {(0, 0): 0}
    assert owners(merge(part(0, (), [((), ())]), part(1, (), [((), ())]))) == {(): 0}


@pytest.mark.parametrize("lost", range(4))
def test_shards_that_leave_something_out(lost: int) -> None:
    with pytest.raises(IncompleteCheckpointError, match="unsaved") as caught:
        merge(*[part(rank, boxes=boxes) for rank, boxes in enumerate(ROWS) if rank != lost])
    assert (caught.value.fqn, caught.value.path) == ("w", "run")
    with pytest.raises(IncompleteCheckpointError, match="unsaved"):
        merge(part(0, boxes=[((0, 0), (0, 4))]))  # an empty one alone


def test_a_rank_is_missing() -> None:
    with pytest.raises(IncompleteCheckpointError, match="of rank 1 is missing"):
        merge_rank_metadata({0: part(0, boxes=WHOLE), 2: part(2, boxes=WHOLE)}, path="run")


@pytest.mark.parametrize(
    ("boxes", "other"),
    [
        (WHOLE, [((4, 0), (4, 4))]),
        ([((0, 0), (5, 4))], [((4, 0), (4, 4))]),
        ([((0, 0), (8, 3))], [((0, 2), (8, 2))]),
        ([((0, 0), (4, 4))], [((0, 0), (8, 4))]),
    ],
)
def test_shards_that_overlap(boxes: list[Box], other: list[Box]) -> None:
    with pytest.raises(MetadataError, match="overlaps|saved a shard of"):
        merge(part(0, boxes=boxes), part(1, boxes=other))


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (part(1, boxes=ROWS[1], dtype=torch.bfloat16), "torch.bfloat16"),
        (part(1, (8, 5), ROWS[1]), r"\(8, 5\)"),
        (part(1, objects=("w",)), "an object"),
    ],
)
def test_ranks_that_disagree(other: Metadata, match: str) -> None:
    with pytest.raises(MetadataError, match=match) as caught:
        merge(part(0, boxes=ROWS[0]), other)
    assert caught.value.fqn == "w" and "Rank 0" in str(caught.value)


def test_shard_that_is_nowhere() -> None:
    lost = part(0, boxes=WHOLE)
    lost.storage_data.clear()
    with pytest.raises(MetadataError, match="does not say where"):
        merge(lost)


@pytest.mark.parametrize(
    ("values", "merged"),
    [
        ([{"a": ("a", 1)}, {"a": ("a", 2), "b": ("b",)}], {"a": ("a", 1), "b": ("b",)}),
        ([None, {"a": 1}], {"a": 1}),
        ([None, None], None),
        ([["mine"], {"a": 1}], ["mine"]),
    ],
)
def test_planner_data(values: list[Any], merged: Any) -> None:
    parts = [part(rank, boxes=WHOLE) for rank in range(len(values))]
    for metadata, value in zip(parts, values, strict=True):
        metadata.planner_data = value
    assert merge(*parts).planner_data == merged


def split(draw: st.DrawFn, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Box]:
    """Cuts a box into boxes, by cuts through the middle of what is left: not always a grid."""
    dims = [dim for dim, length in enumerate(sizes) if length > 1]
    if not dims or depth == 0 or not draw(st.booleans()):
        return [(offsets, sizes)]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, sizes[dim] - 1))
    lower = tuple(cut if d == dim else length for d, length in enumerate(sizes))
    upper = tuple(length - cut if d == dim else length for d, length in enumerate(sizes))
    start = tuple(offset + cut if d == dim else offset for d, offset in enumerate(offsets))
    return split(draw, offsets, lower, depth - 1) + split(draw, start, upper, depth - 1)


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    size = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return size, draw(st.permutations(split(draw, (0,) * len(size), size, 4)))


@settings(max_examples=examples(200), deadline=None)
@given(divided(), st.data())
def test_any_division_is_complete_and_nothing_less(
    division: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    size, boxes = division
    merged = merge(*[part(rank, size, [box]) for rank, box in enumerate(boxes)])
    assert len(merged.state_dict_metadata["w"].chunks) == len(boxes)
    lost = data.draw(st.integers(0, len(boxes) - 1))
    rest = boxes[:lost] + boxes[lost + 1 :]
    if rest:
        with pytest.raises(IncompleteCheckpointError):
            merge(*[part(rank, size, [box]) for rank, box in enumerate(rest)])
    offsets, sizes = boxes[lost]
    dim = data.draw(st.integers(0, len(size) - 1))
    if offsets[dim] + sizes[dim] < size[dim]:  # grown into its neighbour
        grown = tuple(length + (d == dim) for d, length in enumerate(sizes))
        with pytest.raises(MetadataError, match="overlaps"):
            merge(*[part(rank, size, [box]) for rank, box in enumerate([*rest, (offsets, grown)])])


@pytest.mark.parametrize("columns", [1, 64])
def test_many_ranks(columns: int) -> None:
    size, rows = (4096, 64), 4096 // columns
    boxes = [
        ((r * columns, c * (64 // columns)), (columns, 64 // columns)) for r in range(rows) for c in range(columns)
    ]
    parts = {rank: part(rank, size, [box]) for rank, box in enumerate(boxes)}
    with within_cpu_seconds(2):
        merged = merge_rank_metadata(parts, path="run")
    assert len(merged.state_dict_metadata["w"].chunks) == 4096

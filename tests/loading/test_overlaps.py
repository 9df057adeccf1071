"""What to read for a part of a tensor, from all of its shards at once: what DCP finds one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_nvcomp.loading.planner import SavedShards


@st.composite
def _cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[ChunkStorageMetadata]:
    """Cut a tensor by a grid, perhaps with empty parts, and shuffle the parts."""
    parts: list[list[tuple[int, int]]] = [[]]
    for length in shape:
        inner = draw(st.lists(st.integers(0, length), max_size=4))
        edges = [0, *sorted(inner), length]
        parts = [[*part, pair] for part in parts for pair in itertools.pairwise(edges)]
    shards = [
        ChunkStorageMetadata(
            torch.Size([start for start, _ in part]), torch.Size([stop - start for start, stop in part])
        )
        for part in parts
    ]
    return draw(st.permutations(shards))


@given(st.data())
def test_items_are_those_of_dcp(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
    saved, wanted = data.draw(_cut(shape)), data.draw(_cut(shape))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), saved)
    known = SavedShards()
    for _ in range(2):  # the second time they are known
        found = known.items("w", saved, wanted)
        theirs = create_read_items_for_chunk_list("w", tensor, wanted)
        assert sorted(map(repr, found)) == sorted(map(repr, theirs))
        assert [item.storage_index.index for item in found] == [
            next(at for at, shard in enumerate(saved) if shard is saved[item.storage_index.index or 0])
            for item in found
        ]


@pytest.mark.parametrize("other", [0, 1])
def test_sets_of_shards_are_not_mistaken_for_each_other(other: int) -> None:
    def rows(*sizes: int) -> list[ChunkStorageMetadata]:
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([size]))
            for start, size in zip(starts, sizes, strict=True)
        ]

    known, layouts = SavedShards(), [rows(2, 2, 4), rows(5, 1, 2)]
    known.items("first", layouts[1 - other], layouts[1 - other])
    found = known.items("second", layouts[other], [ChunkStorageMetadata(torch.Size([4]), torch.Size([2]))])
    assert [(item.storage_offsets[0], item.dest_offsets[0], item.lengths[0]) for item in found] == [
        [(0, 0, 2)],
        [(4, 0, 1), (0, 1, 1)],
    ][other]

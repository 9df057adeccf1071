"""Which items go into which file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_nvcomp.saving.data_files import PlannedFile, distribute, file_count, plan_files, planned_nbytes, small_together

ID = "5d" * 16


def item(name: str, *sizes: int, dtype: torch.dtype = torch.float32) -> WriteItem:
    chunk = torch.distributed.checkpoint.ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(sizes))
    return WriteItem(MetadataIndex(name), WriteItemType.TENSOR, tensor_data=data)


def plan(items: list[WriteItem], **options: int) -> list[list[PlannedFile]]:
    return plan_files(items, 3, ID, **{"single_file_per_rank": True, "streams": 2, "file_nbytes": 100, **options})


def named(lanes: list[list[PlannedFile]]) -> list[list[list[str]]]:
    return [[[item.index.fqn for item in file.items] for file in lane] for lane in lanes]


def test_planned_sizes() -> None:
    assert planned_nbytes(item("w", 3, 5)) == 60
    assert planned_nbytes(item("half", 3, 5, dtype=torch.bfloat16)) == 30
    assert planned_nbytes(item("scalar")) == 4
    assert planned_nbytes(item("empty", 0, 5)) == 0
    assert planned_nbytes(WriteItem(MetadataIndex("bytes"), WriteItemType.BYTE_IO)) == 0


@pytest.mark.parametrize(
    ("total", "streams", "count"), [(0, 4, 1), (99, 4, 1), (199, 4, 1), (200, 4, 2), (1000, 4, 4), (1000, 1, 1)]
)
def test_file_count(total: int, streams: int, count: int) -> None:
    assert file_count(total, streams, 100) == count


def test_small_items_are_resolved_together() -> None:
    """As many as come to 1 MiB: those that are resolved together are in memory together."""
    bytes_item = WriteItem(MetadataIndex("bytes"), WriteItemType.BYTE_IO)
    items = [item("huge", 1 << 22), *(item(f"half {n}", 1 << 17) for n in range(3)), item("empty", 0), bytes_item]
    items += [bytes_item, *(item(f"tiny {n}", 64) for n in range(5000))]
    together = list(small_together(items))
    assert [one for some in together for one in some] == items
    names = [[one.index.fqn for one in some] for some in together[:5]]
    assert names == [["huge"], ["half 0", "half 1"], ["half 2", "empty"], ["bytes"], ["bytes"]]
    assert [len(some) for some in together[5:]] == [4096, 904]


def test_one_bin_has_the_largest_first() -> None:
    assert distribute([1, 3, 2, 3], 1) == [[1, 3, 2, 0]]


def test_bins_that_stay_empty() -> None:
    assert distribute([5], 3) == [[0], [], []]


@given(sizes=st.lists(st.integers(0, 1000)), bins=st.integers(1, 6))
def test_bins_hold_each_item_once_and_are_about_equal(sizes: list[int], bins: int) -> None:
    filled = distribute(sizes, bins)
    assert len(filled) == bins
    assert sorted(index for one in filled for index in one) == list(range(len(sizes)))
    for one in filled:
        assert [sizes[index] for index in one] == sorted((sizes[index] for index in one), reverse=True)
    totals = [sum(sizes[index] for index in one) for one in filled]
    assert max(totals) - min(totals) <= max(sizes, default=0)


def test_nothing_to_save_makes_no_file() -> None:
    assert plan([]) == []


def test_a_small_rank_writes_one_file() -> None:
    (lane,) = plan([item("a", 2), item("b", 10)])
    (file,) = lane
    assert [item.index.fqn for item in file.items] == ["b", "a"]
    assert file.name == f"__3_0_{ID}.distcp"


def test_a_large_rank_writes_a_file_for_each_stream() -> None:
    lanes = plan([item("a", 10), item("b", 30), item("c", 30)])
    assert named(lanes) == [[["b", "a"]], [["c"]]]
    assert [[file.name for file in lane] for lane in lanes] == [[f"__3_0_{ID}.distcp"], [f"__3_1_{ID}.distcp"]]


def test_a_file_for_each_item() -> None:
    lanes = plan([item("a", 10), item("b", 30), item("c", 25)], single_file_per_rank=False)
    assert named(lanes) == [[["b"]], [["c"], ["a"]]]
    assert {file.name: file.items[0].index.fqn for lane in lanes for file in lane} == {
        f"__3_{number}_{ID}.distcp": name for number, name in enumerate("abc")
    }

"""Who writes what several ranks have: every item once, by one that has it, and no rank much more than others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.plans.balance import balanced
from tests.effort import examples


def item(fqn: str, size: Sequence[int], sizes: Sequence[int], row: int = 0) -> WriteItem:
    offsets = torch.Size([row] + [0] * (len(size) - 1))
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, torch.Size(sizes)), TensorProperties(torch.float32), torch.Size(size)
    )
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def an_object(fqn: str) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def nbytes_of(plans: Sequence[SavePlan]) -> list[int]:
    return [sum(map(planned_nbytes, plan.items)) for plan in plans]


def hsdp(replicas: int, shards: int) -> list[SavePlan]:
    """A model and Adam's moments: embeddings are on all ranks, and the matrices of eight layers sharded in replicas."""
    plans = []
    for rank in range(replicas * shards):
        shard, items = rank % shards, list[WriteItem]()
        for part in ("model", "exp_avg", "exp_avg_sq"):
            items.append(item(f"{part}.embed", (32_000, 512), (32_000, 512)))
            for layer in range(8):
                rows = 2048 // shards
                items.append(item(f"{part}.{layer}.w", (2048, 2048), (rows, 2048), shard * rows))
                items.append(item(f"{part}.{layer}.norm", (512,), (512,)))
        plans.append(SavePlan(items))
    return plans


def test_replicated_tensors_beside_shards() -> None:
    plans = hsdp(replicas=2, shards=8)
    embedding = 32_000 * 512 * 4
    ours, theirs = nbytes_of(balanced(plans)), nbytes_of(dedup_save_plans(plans))
    assert sum(ours) == sum(theirs)
    assert max(ours) == embedding, "whoever writes one writes nothing else"
    assert max(theirs) > 1.2 * embedding, "which is what this is for"


def test_small_tensors_and_objects_are_shared_out() -> None:
    plans = [SavePlan([*(item(f"n{number}", (8,), (8,)) for number in range(60)), an_object("o")]) for _ in range(4)]
    assert sorted(len(plan.items) for plan in balanced(plans)) == [15, 15, 15, 16]


def test_what_one_rank_has_counts() -> None:
    alone = [item("alone", (1 << 20,), (1 << 20,))]
    both = [item(f"b{number}", (1 << 18,), (1 << 18,)) for number in range(4)]
    first, second = balanced([SavePlan([*both, *alone]), SavePlan(both)])
    assert [one.index.fqn for one in first.items] == ["alone"]
    assert [one.index.fqn for one in second.items] == ["b0", "b1", "b2", "b3"]


def test_nothing_to_share_is_left_as_it_is() -> None:
    plans = [SavePlan([item("w", (8, 2), (4, 2), 4 * rank), an_object(f"o{rank}")]) for rank in range(2)]
    assert all(one is other for one, other in zip(balanced(plans), plans, strict=True))
    assert balanced([]) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 20), st.sets(st.integers(0, 5), min_size=1), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=examples(300), deadline=None)
def test_every_item_is_written_once_by_a_rank_that_has_it(tensors: list[tuple[int, set[int], bool]]) -> None:
    own: list[list[WriteItem]] = [[] for _ in range(6)]
    for number, (elements, ranks, is_object) in enumerate(tensors):
        one = an_object(f"{number}") if is_object else item(f"{number}", (elements,), (elements,))
        for rank in ranks:
            own[rank].append(one)
    plans = [SavePlan(items) for items in own]
    shared = balanced(plans)
    assert Counter(one.index for plan in shared for one in plan.items) == Counter(
        {one.index: 1 for items in own for one in items}
    )
    for plan, items in zip(shared, own, strict=True):
        assert plan.items == [one for one in items if any(one is kept for kept in plan.items)], "in its order"
    assert max(nbytes_of(shared)) <= max(nbytes_of(plans))

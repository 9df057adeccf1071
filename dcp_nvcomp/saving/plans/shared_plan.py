"""The plans of all ranks, computed by each rank from what all of them have described: as arrays, no object for a shard.

    number of a key     by the parts (structure.py): DTensors first, then plain tensors, then objects
    number of a shard   among those of its key, by the first rank that has it
    owner of a shard    the rank that writes it, as balance.py shares out

A rank's plan has its items by the number of their key; of one key it has one shard.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_nvcomp.saving.derived import weight_fqn
from dcp_nvcomp.saving.plans.balance import RECORD_NBYTES
from dcp_nvcomp.saving.plans.layouts import Ints, IrregularError, Layout, layout_of, shards_of
from dcp_nvcomp.saving.plans.meshes import ComparedShards, Differing, Members
from dcp_nvcomp.saving.plans.structure import DTENSORS, OBJECTS, PLAIN, Part, Place

_STRIDES: Final = 5  # where they are among a tensor's properties


@dataclass(frozen=True, eq=False)
class SharedPlan:
    parts: tuple[Part, ...]
    parts_of: Ints  # (ranks, 3): which parts a rank has
    keys: tuple[str, ...]
    numbers: tuple[Ints, ...]  # of the keys of each part
    layouts: tuple[Layout, ...]  # of each key
    owners: tuple[Ints, ...]  # of the shards of each key; of several keys it may be one array

    @cached_property
    def hints(self) -> tuple[Ints, ...]:
        """For the shards of each key their places in DCP's metadata: they are there by their owners."""
        known: dict[int, Ints] = {}
        for owners in self.owners:
            if id(owners) not in known:
                places = known[id(owners)] = np.empty(len(owners), np.int64)
                places[np.argsort(owners, kind="stable")] = np.arange(len(owners))
        return tuple([known[id(owners)] for owners in self.owners])

    @cached_property
    def starts(self) -> Ints:
        """The number of each key's first shard among those of all keys; and how many there are."""
        return np.concatenate([[0], np.cumsum([layout.shard_count for layout in self.layouts])]).astype(np.int64)

    @property
    def rank_count(self) -> int:
        return len(self.parts_of)

    @property
    def shard_count(self) -> int:
        return int(self.starts[-1])

    def plan_order(self) -> Ints:
        """All shards, rank after rank, those of each in the order of its plan."""
        owners = [np.zeros(0, np.int32), *(owners.astype(np.int32) for owners in self.owners)]
        return np.argsort(np.concatenate(owners), kind="stable")

    def compared_keys(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """Return the keys whose values a rank compares with the other ranks': those that are not sharded."""
        return tuple(self.parts[self.parts_of[rank, column]].keys for column in (PLAIN, OBJECTS))

    @cached_property
    def _apart(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        """The shards that ranks of several meshes have: of each key its row or -1, and there the shard of each rank."""
        distinct = {id(layout): layout for layout in self.layouts if len(layout.apart)}
        row_of = {at: row for row, at in enumerate(distinct)}
        shards = np.full((len(distinct), self.rank_count), -1, np.int32)
        for row, layout in enumerate(distinct.values()):
            mine = np.isin(layout.shard_at, layout.apart)
            shards[row, layout.ranks[mine]] = layout.shard_at[mine]
        return np.array([row_of.get(id(layout), -1) for layout in self.layouts], np.int64), shards

    def _apart_of(self, rank: int) -> tuple[Ints, Ints]:
        """Return the keys of which a rank has a shard that other meshes have, too, and the shard of each."""
        row_of, shards = self._apart
        keys = self.numbers[self.parts_of[rank, DTENSORS]]
        if not len(shards):
            return keys[:0], keys[:0]
        keys = keys[row_of[keys] >= 0]
        own = shards[row_of[keys], rank].astype(np.int64)
        return keys[own >= 0], own[own >= 0]

    def compared_shards(self, rank: int) -> ComparedShards:
        """Return the shards that a rank compares with those of other meshes."""
        return ComparedShards(tuple([self.keys[key] for key in self._apart_of(rank)[0].tolist()]))

    def differing_shards(self, values: Sequence[array[int]]) -> dict[str, list[int]]:
        """Return the keys of shards that differ between meshes, and ranks that have one of them, by all ranks' values.

        A rank without values is left out: it could not look at its shards.
        """
        differing = Differing()
        if not any(values):  # usual, and quick
            return differing.ranks
        first = np.full(self.shard_count, -1, np.int64)  # the rank with the value
        seen = np.zeros(len(first), np.int64)
        for rank, numbers in enumerate(values):
            keys, own = self._apart_of(rank)
            if not len(keys) or len(keys) != len(numbers):
                continue
            shards, found = self.starts[keys] + own, np.frombuffer(numbers, f"u{numbers.itemsize}").astype(np.int64)
            fresh = first[shards] < 0
            first[shards[fresh]], seen[shards[fresh]] = rank, found[fresh]
            for at in np.flatnonzero(seen[shards] != found).tolist():
                differing.add(self.keys[keys[at]], int(own[at]), int(first[shards[at]]), rank)
        return differing.ranks

    def save_plan(self, rank: int) -> SavePlan:
        """Return the final plan of a rank."""
        made: dict[tuple[int, int], _OwnShard | None] = {}  # by the ids of a key's layout and owners
        items = []
        for key in np.sort(np.concatenate([self.numbers[part] for part in self.parts_of[rank]])).tolist():
            layout, owners = self.layouts[key], self.owners[key]
            ids = id(layout), id(owners)
            if ids not in made:
                shard = layout.shard_of(rank)
                writes = shard is not None and owners[shard] == rank
                made[ids] = _own_shard(layout, shard, int(self.hints[key][shard])) if writes else None
            own = made[ids]
            if own is not None:
                index = MetadataIndex(self.keys[key], own.offsets, own.hint)
                items.append(WriteItem(index, own.type, tensor_data=own.data))
        return SavePlan(items)


@dataclass(frozen=True)
class _OwnShard:
    """What the items of a rank have in common whose keys have the same shards, with the same owners."""

    type: WriteItemType
    offsets: torch.Size | None = None
    hint: int | None = None
    data: TensorWriteData | None = None


def _own_shard(layout: Layout, shard: int, hint: int) -> _OwnShard:
    if layout.shape is None:
        return _OwnShard(WriteItemType.BYTE_IO)
    offsets, sizes = (torch.Size(values[shard].tolist()) for values in (layout.offsets, layout.sizes))
    placed = ChunkStorageMetadata(offsets, sizes)
    data = TensorWriteData(placed, properties_of(layout.properties), torch.Size(layout.shape))
    return _OwnShard(WriteItemType.SHARD if layout.is_dtensor else WriteItemType.TENSOR, offsets, hint, data)


def properties_of(state: tuple[Any, ...]) -> TensorProperties:
    properties = TensorProperties()
    properties.__setstate__(state)  # type: ignore[no-untyped-call]
    return properties


def plan_all(
    parts: Sequence[Part],
    parts_of: Ints,
    places: Sequence[tuple[Place, ...]],
    *,
    members: Sequence[tuple[Members, ...]],
    lowest_rank: bool,
    derived: Mapping[str, str],
) -> SharedPlan:
    """Plan for all ranks.

    Args:
        parts: the distinct ones: those of DTensors, of plain tensors, of objects.
        parts_of: (ranks, 3) which of them each rank has.
        places: of each rank in its meshes.
        members: of the meshes of each rank.
        lowest_rank: let the lowest rank write what several have, as DCP's `dedup_save_to_lowest_rank`.
        derived: keys of masters, and of their weights, which the same rank is to write.

    Raises:
        IrregularError: this is for DCP to plan, or to refuse.
    """
    signatures: dict[str, list[tuple[int, int]]] = {}  # of each key: the parts it is in, and its kind in each
    for number, part in enumerate(parts):
        of_kinds = [(number, kind) for kind in range(len(part.distinct) or 1)]
        for key, kind in zip(part.keys, part.kinds or (0,) * len(part.keys), strict=True):
            found = signatures.get(key)
            if found is None:
                signatures[key] = [of_kinds[kind]]
            else:
                found.append(of_kinds[kind])
    ranks_of, column_of = _ranks_of(parts_of, len(parts))
    known: dict[tuple[tuple[int, int], ...], Layout] = {}
    layouts = []

    @cache
    def inside(number: int, mesh: int) -> tuple[Ints, Ints, Ints]:
        """Return the ranks with a part that are in one of its meshes, who else is in that, and their places."""
        having = [rank for rank in ranks_of[number].tolist() if places[rank][mesh] is not None]
        ranks, within = np.array(having, np.int64), np.array([members[rank][mesh] for rank in having], np.int64)
        return ranks, within, np.array([places[rank][mesh] for rank in having], np.int64)

    for signature in map(tuple, signatures.values()):
        if signature not in known:
            known[signature] = _layout(signature, parts, ranks_of, column_of, inside)
        layouts.append(known[signature])
    numbers_of = {key: number for number, key in enumerate(signatures)}
    numbers = [np.array([numbers_of[key] for key in part.keys], np.int64) for part in parts]
    weights = _weights(numbers_of, layouts, derived)
    owners = _owners(layouts, len(parts_of), weights, lowest_rank=lowest_rank)
    return SharedPlan(tuple(parts), parts_of, tuple(numbers_of), tuple(numbers), tuple(layouts), owners)


def _ranks_of(parts_of: Ints, count: int) -> tuple[list[Ints], list[int]]:
    """Return which ranks have each part, and which of a rank's three parts it is."""
    ranks_of, column_of = [np.empty(0, np.int64)] * count, [0] * count
    for column in range(parts_of.shape[1]):
        order = np.argsort(parts_of[:, column], kind="stable")
        numbers, begins = np.unique(parts_of[order, column], return_index=True)
        for number, ranks in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
            ranks_of[number], column_of[number] = ranks, column
    return ranks_of, column_of


def _layout(
    signature: tuple[tuple[int, int], ...],
    parts: Sequence[Part],
    ranks_of: Sequence[Ints],
    column_of: Sequence[int],
    inside: Callable[[int, int], tuple[Ints, Ints, Ints]],
) -> Layout:
    (column, *others) = {column_of[number] for number, _ in signature}
    if others:
        raise IrregularError("A key is a DTensor, a plain tensor or an object, and something else on another rank.")
    if column == OBJECTS:
        ranks = np.concatenate([ranks_of[number] for number, _ in signature])
        none = np.zeros((len(ranks), 0), np.int64)
        return layout_of(None, (), is_dtensor=False, ranks=ranks, offsets=none, sizes=none)
    kinds = [parts[number].distinct[kind] for number, kind in signature]
    shape, properties = kinds[0].shape, kinds[0].properties
    if len({kind.properties for kind in kinds}) > 1:
        # the strides of shards, which torch notes from 2.15 on: DCP has those of one rank for the whole tensor
        properties = (*properties[:_STRIDES], *[None] * len(properties[_STRIDES:]))
    if any((kind.shape, kind.properties[:_STRIDES]) != (shape, properties[:_STRIDES]) for kind in kinds):
        raise IrregularError("Ranks have tensors of other shapes or dtypes under one key.")
    found = []
    for (number, _), kind in zip(signature, kinds, strict=True):
        ranks = ranks_of[number]
        if kind.mesh is None:
            whole = np.tile(np.array(shape, np.int64), (len(ranks), 1)).reshape(len(ranks), len(shape))
            found.append((ranks, np.zeros_like(ranks), np.zeros_like(whole), whole))
            continue
        ranks, within, at = inside(number, kind.mesh)
        found.append((ranks, within, *shards_of(shape, parts[number].mesh_shapes[kind.mesh], kind.cuts, at)))
    ranks, members, offsets, sizes = (np.concatenate(values) for values in zip(*found, strict=True))
    if not len(ranks):
        raise IrregularError("No rank has a shard of a tensor.")
    return layout_of(
        shape,
        properties,
        is_dtensor=column == DTENSORS,
        ranks=ranks,
        offsets=offsets,
        sizes=sizes,
        members=members,
    )


def _weights(numbers_of: Mapping[str, int], layouts: Sequence[Layout], derived: Mapping[str, str]) -> dict[int, int]:
    """Map the keys of masters to those of their weights, where the same ranks have the same shards of both."""
    found: dict[int, int] = {}
    for fqn, number in numbers_of.items() if derived else ():
        weight = numbers_of.get(weight_fqn(fqn, derived) or "")
        if weight is None or not layouts[number].has_shards_of(layouts[weight]):
            continue
        if (layouts[number].dtype, layouts[weight].dtype) == (torch.float32, torch.bfloat16):
            found[number] = weight
    return found


def _owners(
    layouts: Sequence[Layout], ranks: int, weights: Mapping[int, int], *, lowest_rank: bool
) -> tuple[Ints, ...]:
    """Return which rank writes each shard of each key, by the rule of balance.py."""
    with_weight: dict[int, list[Layout]] = {}
    for master, weight in weights.items():
        with_weight.setdefault(weight, []).append(layouts[master])
    # of each key, what stands for the layouts of all that is written with it; 0 if it is written with another one
    kind_ids = list(map(id, layouts))
    distinct: dict[int, tuple[Layout, ...]] = {at: (one,) for at, one in zip(kind_ids, layouts, strict=True)}
    numbers = dict[tuple[int, ...], int]()
    for key, masters in with_weight.items():
        together = (layouts[key], *masters)
        at = kind_ids[key] = ~numbers.setdefault(tuple(map(id, together)), len(numbers))
        distinct[at] = together
    for key in weights:
        kind_ids[key] = 0
    first = {at: kind[0].first_ranks for at, kind in distinct.items()}
    if lowest_rank:
        return tuple([first[kind_ids[weights.get(key, key)]] for key in range(len(layouts))])
    costs = {at: np.sum([one.nbytes + RECORD_NBYTES for one in kind], axis=0) for at, kind in distinct.items()}
    shared = {at: _shared(kind[0], costs[at]) for at, kind in distinct.items()}
    loads = np.zeros(ranks, np.int64)
    for at, count in Counter(kind_ids).items():
        if at and not shared[at]:
            np.add.at(loads, first[at], count * costs[at])
    # minus what a shard costs, the first rank that has the key, the key, the shards and the ranks that hold them
    waiting = list[tuple[int, int, int, Ints, Ints]]()
    owners = list[Ints]()
    for key, (layout, at) in enumerate(zip(layouts, kind_ids, strict=True)):
        if not at:
            owners.append(layout.ranks)  # its weight's, below
            continue
        if not shared[at]:
            owners.append(first[at])
            continue
        owners.append(first[at].copy())
        alone = np.ones(layout.shard_count, np.bool_)
        for cost, shards, holders in shared[at]:
            alone[shards] = False
            waiting.append((-cost, int(first[at][0]), key, shards, holders))
        np.add.at(loads, first[at][alone], costs[at][alone])
    for cost, _, key, shards, holders in sorted(waiting, key=lambda one: one[:3]):
        # a rank holds one shard of a key, so these don't depend on each other
        chosen = holders[np.arange(len(shards)), np.argmin(loads[holders], axis=1)]
        owners[key][shards] = chosen
        loads[chosen] -= cost
    return tuple([owners[weights.get(key, key)] for key in range(len(layouts))])


def _shared(layout: Layout, costs: Ints) -> list[tuple[int, Ints, Ints]]:
    """Return the shards that several ranks hold, those of one cost and as many holders together, and these ranks."""
    groups: dict[tuple[int, int], list[int]] = {}
    for shard, holders in enumerate(layout.holders or ()):
        if len(holders) > 1:
            groups.setdefault((int(costs[shard]), len(holders)), []).append(shard)
    assert layout.holders is not None or not groups
    return [
        (cost, np.array(shards), np.stack([layout.holders[shard] for shard in shards]))  # type: ignore[index]
        for (cost, _), shards in groups.items()
    ]

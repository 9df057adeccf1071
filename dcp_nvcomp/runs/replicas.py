"""The replicas of a run: ranks that hold the whole state together, and save it in their own nodes' fast tiers.

Replicas keep the same shards anyway, so nothing of these moves. The little that is a rank's own goes to the others
while training waits. What they have saved is compared by the checksums in their files; no tensor is read for that.
"""

from __future__ import annotations

import hashlib
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.process_groups import give_back, offer_of, take
from dcp_nvcomp.calls.ranks import global_ranks, limit_of
from dcp_nvcomp.calls.values import leaves
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.data_file import find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.names import data_file_rank
from dcp_nvcomp.format.record import KIND_PACK, KIND_TENSOR, Record
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.saving.commit import WrittenSave
from dcp_nvcomp.saving.save import end_sequence
from dcp_nvcomp.storage.base import Filesystem


@dataclass(frozen=True)
class Replica:
    all: tuple[tuple[int, ...], ...]  # the ranks of each replica
    values: dict[str, Any]  # the state, with what this replica lacked
    group: dist.ProcessGroup  # the process group of this replica
    id: str  # what the saves of all replicas of this state have in common


@dataclass(frozen=True)
class _Offer:
    # what arrangements depend on: which ranks hold its tensors whole, and a digest of its entries
    layout: tuple[frozenset[frozenset[int]], bytes] | None
    own: bytes  # entries that other replicas lack, by the latest arrangement, pickled
    error: CheckpointError | None  # why it has none
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # an id for the save


class Replicas:
    """Arranges the ranks of a run in replicas, by what they save. All ranks call the same methods."""

    def __init__(self, ranks: Ranks, nodes: Nodes, group: dist.ProcessGroup | None) -> None:
        if group is None:
            raise ConfigurationError('copies="replicas" needs a process group: there are no replicas in one process.')
        self._ranks, self._nodes = ranks, nodes
        self._global_ranks, self._limit = global_ranks(group), limit_of(group)
        self._layouts: list[Any] | None = None
        self._all: tuple[tuple[int, ...], ...] = ()
        self._owners: dict[Path, int] = {}
        self._group: dist.ProcessGroup | None = None

    def replica_of(self, values: dict[str, Any], until_idle: Callable[[], None]) -> Replica:
        offers = self._offers(values)
        if self._layouts != [offer.layout for offer in offers]:
            self._arrange(values, offers, until_idle)
            offers = self._offers(values)
        own = next(one for one in self._all if self._ranks.rank in one)
        added = {
            path: value
            for rank, offer in enumerate(offers)
            if rank not in own and self._stands_in(own, rank) == self._ranks.rank
            for path, value in pickle.loads(offer.own).items()
        }
        here = {path for path, _ in entries(values)}
        lacking = {path: value for path, value in added.items() if path not in here}
        assert self._group is not None
        return Replica(self._all, with_entries(values, lacking), self._group, offers[0].id)

    def _offers(self, values: Mapping[str, Any]) -> list[_Offer]:
        """Exchange what ranks have; what fails on one of them is raised on all, as all wait for it here."""
        error: CheckpointError | None = None
        try:
            layout = (whole_sets(values.values(), self._global_ranks), digest_of(_paths(values)))
            mine = _Offer(layout, pickle.dumps(own_of(values, self._owners, self._ranks.rank)), None)
        except CheckpointError as raised:
            error = raised
        except Exception as raised:  # pickle lets through whatever an object's own methods raise
            error = ConfigurationError(
                f"A value that only one rank has can't be given to other replicas: {type(raised).__name__}: {raised}"
            )
        offers = self._ranks.gather(mine if error is None else _Offer(None, b"", error))
        failure = error or next((offer.error for offer in offers if offer.error is not None), None)
        if failure is not None:
            raise failure
        return offers

    def _arrange(self, values: Mapping[str, Any], offers: Sequence[_Offer], until_idle: Callable[[], None]) -> None:
        paths = self._ranks.gather(_paths(values))
        sets = [one for offer in offers if offer.layout is not None for one in offer.layout[0]]
        replicas = joined(self._ranks.count, [*sets, *self._nodes.domains()])
        if len(replicas) == 1:
            raise ConfigurationError(
                'copies="replicas": the state has no replicas on nodes in different failure domains. Use a number of '
                "copies, or shard the state over the ranks of one node only (HSDP)."
            )
        self._owners = missing_on(replicas, paths)
        if replicas != self._all:
            until_idle()
            self.close()
            own = next(one for one in replicas if self._ranks.rank in one)
            members = [self._global_ranks[rank] for rank in own]
            offered = self._ranks.gather(offer_of(members))
            (self._group,) = take(members, 1, [offered[rank] for rank in own], self._limit)
            self._all = replicas
        self._layouts = [offer.layout for offer in offers]

    def _stands_in(self, own: Sequence[int], rank: int) -> int:
        """Return which rank of this replica saves what another replica's rank offers."""
        other = next(one for one in self._all if rank in one)
        return own[other.index(rank) % len(own)]

    def close(self) -> None:
        """Give the process group of this rank's replica back; no save may be under way."""
        group, self._group, self._all, self._layouts = self._group, None, (), None
        if group is not None:
            end_sequence(group)
            give_back([group])


def _paths(values: Mapping[str, Any]) -> dict[Path, bool]:
    return {path: is_sharded(value) for path, value in entries(values)}


RankSet = frozenset[int]
Path: TypeAlias = tuple[Any, ...]


def whole_sets(values: Iterable[Any], ranks: Sequence[int]) -> frozenset[RankSet]:
    """Return the sets of ranks that hold a DTensor whole, of all DTensors that this rank has a part of."""
    found: dict[Any, frozenset[RankSet]] = {}
    for tensor in _tensors(values):
        sharded = tuple(not placement.is_replicate() for placement in tensor.placements)
        key = (tensor.device_mesh, sharded)
        if key not in found:
            found[key] = _sets_of(tensor, sharded, ranks)
    return frozenset().union(*found.values())


def _tensors(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in leaves(list(values)):
        if isinstance(value, DTensor):
            yield value
        elif hasattr(value, "local_shards"):
            raise ConfigurationError(
                'copies="replicas" goes by the placements of DTensors, and this state has a '
                f"{type(value).__name__}: use fully_shard (FSDP2), or a number of copies."
            )


def is_sharded(value: Any) -> bool:
    return next(_tensors([value]), None) is not None


def _sets_of(tensor: DTensor, sharded: Sequence[bool], ranks: Sequence[int]) -> frozenset[RankSet]:
    """Return the sets of ranks that differ in nothing but their coordinates on sharded dimensions of the mesh."""
    mesh = tensor.device_mesh.mesh
    replicated = [at for at, one in enumerate(sharded) if not one]
    order = replicated + [at for at, one in enumerate(sharded) if one]
    count = 1
    for at in replicated:
        count *= mesh.size(at)
    place_of = {rank: place for place, rank in enumerate(ranks)}
    rows = mesh.permute(order).reshape(count, -1).tolist()
    if not all(rank in place_of for row in rows for rank in row):
        raise ConfigurationError("The state has tensors on ranks that are not in the process_group of the run.")
    return frozenset(frozenset(place_of[rank] for rank in row) for row in rows)


def joined(count: int, sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Join what overlaps."""
    belongs_to = list(range(count))

    def root_of(rank: int) -> int:
        while belongs_to[rank] != rank:
            rank = belongs_to[rank]
        return rank

    for one in sets:
        first, *others = sorted(one)
        for other in others:
            low, high = sorted((root_of(first), root_of(other)))
            belongs_to[high] = low
    groups: dict[int, list[int]] = {}
    for rank in range(count):
        groups.setdefault(root_of(rank), []).append(rank)
    return tuple(tuple(group) for _, group in sorted(groups.items()))


def entries(values: Mapping[Any, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from entries(value, (*at, key))
        else:
            yield (*at, key), value


def digest_of(paths: Mapping[Path, bool]) -> bytes:
    return hashlib.sha256(repr(list(paths.items())).encode()).digest()


def missing_on(replicas: Sequence[Sequence[int]], paths: Sequence[Mapping[Path, bool]]) -> dict[Path, int]:
    """Return the entries that some replica lacks, with the first rank that has them."""
    found: dict[Path, int] = {}
    everywhere = set.intersection(*(set().union(*(paths[rank] for rank in one)) for one in replicas))
    for rank, own in enumerate(paths):
        for path, sharded in own.items():
            if path in everywhere:
                continue
            if sharded:
                raise ConfigurationError(
                    f'copies="replicas" needs replicas that hold the same tensors, and {path!r} is not on all of them '
                    "(stages of a pipeline?): use a number of copies."
                )
            found.setdefault(path, rank)
    dicts = {path[:depth] for own in paths for path in own for depth in range(1, len(path))}
    for path in found:
        if path in dicts:
            raise ConfigurationError(
                f'copies="replicas": {path!r} is an entry on some ranks, and a dict with entries on others: save the '
                "same kind of value on all, or use a number of copies."
            )
    return found


def own_of(values: Mapping[Any, Any], owners: Mapping[Path, int], rank: int) -> dict[Path, Any]:
    """Return the entries that a rank gives to replicas that lack them, in host memory."""
    if rank not in owners.values():
        return {}
    return {path: _on_host(value) for path, value in entries(values) if owners.get(path) == rank}


def _on_host(value: Any) -> Any:
    """Return a value whose tensors are in host memory, each in memory of its own: more of it would be pickled."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    if type(value) is dict:
        return {key: _on_host(one) for key, one in value.items()}
    return value


def with_entries(values: Mapping[Any, Any], added: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return a nested state with entries added, sorted so that all replicas have them in the same order."""
    result, below = dict(values), dict[Any, dict[Path, Any]]()
    for (key, *rest), value in added.items():
        if rest:
            below.setdefault(key, {})[tuple(rest)] = value
        else:
            result[key] = value
    for key, inner in below.items():
        result[key] = with_entries(result.get(key, {}), inner)
    if result.keys() == values.keys():
        return result
    return {key: result[key] for key in sorted(result, key=repr)}


_ROW = np.dtype([("record", "<u8"), ("crc", "<u4")])
Rows = npt.NDArray[np.void]


@dataclass(frozen=True)
class WrittenPart:
    written: WrittenSave  # what it consists of; its files are named by the places of their ranks in `ranks`
    ranks: tuple[int, ...]  # the ranks that made it
    seconds: float  # how long the slowest of them took

    def files_of(self, rank: int) -> dict[str, int]:
        return {name: self.written.files[name] for name, writer in self.senders().items() if writer == rank}

    def senders(self) -> dict[str, int]:
        places = {name: data_file_rank(name) for name in self.written.files}
        return {name: self.ranks[place] for name, place in places.items() if place is not None}


def written_by(
    ranks: Ranks, replicas: Sequence[Sequence[int]], written: WrittenSave | None, seconds: float
) -> list[WrittenPart]:
    """Tell all ranks what was written; all ranks call this."""
    if not replicas:
        return [WrittenPart(ranks.share(written), tuple(range(ranks.count)), seconds)]
    found, parts = ranks.gather((written, seconds)), []
    for replica in replicas:
        own = found[replica[0]][0]
        assert own is not None, "the first rank of a group publishes what it saves"
        parts.append(WrittenPart(own, tuple(replica), max(found[rank][1] for rank in replica)))
    return parts


@dataclass(frozen=True)
class Compared:
    differing: tuple[str, ...]  # the tensors that replicas have saved with different values
    is_complete: bool  # False if replicas have divided something differently, which so could not be compared


def compared(
    ranks: Ranks, replicas: Sequence[Sequence[int]], filesystem: Filesystem, files: Mapping[str, int]
) -> Compared:
    """Compare what replicas have saved; all ranks call this.

    Tensors are compared shard by shard, and the small ones that share blocks together. Other values are not: pickles of
    equal objects may differ.
    """
    names: dict[int, list[str]] = {}
    crcs: dict[int, int] = {}

    def read() -> None:
        for name, nbytes in files.items():
            footer = read_footer(filesystem, find_data_file(filesystem, name, nbytes))
            for number, fqns, crc in _crcs(footer):
                names[number], crcs[number] = fqns, crc

    ranks.together(read)
    rows = ranks.gather(np.array(sorted(crcs.items()), _ROW).tobytes())
    by_replica = [np.concatenate([np.frombuffer(rows[rank], _ROW) for rank in one]) for one in replicas]
    differing = _differing(by_replica)
    records = [set(one["record"].tolist()) for one in by_replica]
    if not differing:
        return Compared((), all(one == records[0] for one in records))
    mine = {fqn for at in differing & names.keys() for fqn in names[at]}
    return Compared(tuple(sorted(set().union(*ranks.gather(mine)))), is_complete=True)


def _differing(replicas: Sequence[Rows]) -> set[int]:
    known: dict[int, int] = {}
    differing = set()
    for rows in replicas:
        for record, crc in rows.tolist():
            if known.setdefault(record, crc) != crc:
                differing.add(record)
    return differing


def _crcs(footer: Footer) -> Iterator[tuple[int, list[str], int]]:
    members: dict[int, list[Record]] = {}
    for record in footer.records:
        if record.pack is not None:
            members.setdefault(record.pack[0], []).append(record)
    for at, record in enumerate(footer.records):
        inside = members.get(at, []) if record.kind == KIND_PACK else [record]
        # small objects are in packs too, which are of one kind
        if record.grid is None or any(one.kind != KIND_TENSOR for one in inside):
            continue
        shape = record.grid.block_shape  # CRCs are of blocks, so these have to be cut alike
        blocks = slice(record.first_block, record.first_block + record.block_count)
        identity = ([_identity(one) for one in inside], record.element.name, shape)
        digest = hashlib.sha256(repr(identity).encode()).digest()
        crc = checksum(footer.tables.uncompressed_crc[blocks].astype("<u4").view(np.uint8))
        yield int.from_bytes(digest[:8], "little"), [one.fqn for one in inside], crc


def _identity(record: Record) -> tuple[object, ...]:
    first_element = None if record.pack is None else record.pack[1]
    return record.kind, record.fqn, record.offsets, record.shape, record.global_shape, first_element

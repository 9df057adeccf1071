"""Reads each file of a step from its nearest copy: this node's, else a peer's, else the durable tier's.

Which files a rank needs follows from its load plan. Between plan and reading, the ranks bring what their nodes lack and
peers have into the nodes' fast tiers, or into memory where that can't be written.
"""

from __future__ import annotations

import logging
import posixpath
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dcp_nvcomp.errors import CheckpointError, CorruptDataError
from dcp_nvcomp.format.metadata.shards import StoredAt
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.runs.events import Source
from dcp_nvcomp.runs.restoring.candidates import DURABLE, Candidate
from dcp_nvcomp.runs.tiers.fast import FastTier, Room
from dcp_nvcomp.runs.tiers.nodes import Moved, Nodes, Transfer, move_files
from dcp_nvcomp.storage.base import FileInfo, Filesystem, OutputStream, RecursiveListing
from dcp_nvcomp.storage.in_memory import MemoryFilesystem

logger = logging.getLogger(__name__)

_Transfers = Mapping[Transfer, Mapping[str, int]]


class Fetch:
    def __init__(self, candidate: Candidate, ranks: Ranks, nodes: Nodes, fast: FastTier, room: Room) -> None:
        self._candidate, self._ranks, self._nodes, self._fast, self._room = candidate, ranks, nodes, fast, room
        self._files = candidate.files()
        self.here = fast.open(candidate.step)
        self.near = {name for name in self._files if nodes.own in candidate.nodes_with(name)}
        self.own = frozenset(self.near)  # before anything is moved
        self.received = MemoryFilesystem(fast.path_of(candidate.step))
        self.save_ids = candidate.save_ids
        self.unread: tuple[str, ...] = ()  # what this rank was to send and could not read
        self._senders: dict[str, str] = {}  # by file that was brought here

    def bring(self, needed: Iterable[str]) -> None:
        """Move what this rank needs, and a peer has, to where this rank can read it; all ranks call it."""
        needs = self._ranks.gather(sorted(needed))
        transfers = self._to_nodes(needs)
        if not transfers:
            return
        outcomes = self._move(transfers, self._place_for(transfers))
        for transfer, files in transfers.items():
            if self._nodes.node_of(transfer.to) == self._nodes.own:
                landed = files.keys() - outcomes[transfer.to].unwritten.keys()
                self.near |= landed
                self._note_senders(transfer, landed)
        lost: dict[str, dict[str, CheckpointError]] = {}
        for rank, one in enumerate(outcomes):
            if one.unwritten:
                lost.setdefault(self._nodes.node_of(rank), {}).update(one.unwritten)
        if lost:
            self._pass_by(lost, needs)

    def receive(self, name: str, data: bytes, sender: str) -> None:
        self.received.publish(name, data)
        self._senders[name] = sender

    def is_copy(self, name: str) -> bool:
        return name in self.near or self.received.file_nbytes(name) is not None

    def copy_of(self, name: str) -> tuple[str, str]:
        """Return which copy of a file this rank reads, as a pair of node and file."""
        return (self._senders.get(name, self._nodes.own) if self.is_copy(name) else DURABLE), name

    def source_of(self, name: str) -> Source:
        if name in self.own:
            return "own"
        return "peer" if self.is_copy(name) else "durable"

    def _place_for(self, transfers: _Transfers) -> Filesystem:
        """Return where this node's received files go, once there is as much room as there can be."""
        incoming = sum(
            sum(files.values())
            for transfer, files in transfers.items()
            if self._nodes.node_of(transfer.to) == self._nodes.own
        )
        failure: CheckpointError | None = None
        if incoming:
            try:
                self._fast.check_writable()
                if self._nodes.is_leader:
                    self._room.make(incoming, but=[self._candidate.step])
                self._fast.refuse_foreign(self._candidate.step)
                self.here.create_directory()
            except CheckpointError as error:
                failure = error
        self._ranks.gather(None)  # no rank writes before the room is there
        return self.here if failure is None else _OutOfOrder(self.here.path, failure)

    def _move(self, transfers: _Transfers, target: Filesystem) -> list[Moved]:
        outcomes = self._ranks.gather(move_files(self._ranks, transfers, self.here, target))
        self.unread = tuple(outcomes[self._ranks.rank].unread)
        for rank, one in enumerate(outcomes):
            for name, error in one.unread.items():
                raise CorruptDataError(f"The copy of {name} on {self._nodes.node_of(rank)} can't be read: {error}")
        return outcomes

    def _pass_by(self, lost: Mapping[str, Mapping[str, CheckpointError]], needs: Sequence[Collection[str]]) -> None:
        """Do without the fast tiers of nodes that can't be written."""
        if self._ranks.is_first:
            node, errors = next(iter(lost.items()))
            logger.warning(
                "The fast tier of %s can't be written (%s): its ranks read what they lack from the durable tier, or "
                "keep it in memory.",
                node,
                next(iter(errors.values())),
            )
        transfers: dict[Transfer, dict[str, int]] = {}
        for rank, names in enumerate(needs):
            for name in names:
                if name in lost.get(self._nodes.node_of(rank), ()) and not self._candidate.durable_has(name):
                    source = self._nodes.ranks_of(self._candidate.nodes_with(name)[0])[0]
                    transfers.setdefault(Transfer(source, rank), {})[name] = self._files[name]
        if not transfers:
            return
        outcomes = self._move(transfers, self.received)
        for transfer in transfers:
            if transfer.to == self._ranks.rank:
                self._note_senders(transfer, transfers[transfer])
        for one in outcomes:
            one.check()

    def _note_senders(self, transfer: Transfer, names: Iterable[str]) -> None:
        self._senders.update(dict.fromkeys(names, self._nodes.node_of(transfer.source)))

    def _to_nodes(self, needs: Sequence[Collection[str]]) -> _Transfers:
        """Return what goes from rank to rank, so that each node has what its ranks need; the same on all ranks."""
        found: dict[Transfer, dict[str, int]] = {}
        sent = dict.fromkeys(range(len(needs)), 0)
        received = dict(sent)
        for node in self._nodes.names:
            here = self._nodes.ranks_of(node)
            for name in sorted({name for rank in here for name in needs[rank]}):
                holders = self._candidate.nodes_with(name)
                if node in holders or not holders:
                    continue
                source = min(
                    (rank for holder in holders for rank in self._nodes.ranks_of(holder)), key=sent.__getitem__
                )
                to = min(here, key=received.__getitem__)
                nbytes = self._files[name]
                sent[source] += nbytes
                received[to] += nbytes
                found.setdefault(Transfer(source, to), {})[name] = nbytes
        return found


class _OutOfOrder(MemoryFilesystem):
    def __init__(self, path: str, failure: CheckpointError) -> None:
        super().__init__(path)
        self._failure = failure

    def open_output(self, name: str) -> OutputStream:
        raise self._failure


class NearestFilesystem(Filesystem):
    """A step's directory for reading: some files are in the fast tier, the others in the durable one."""

    def __init__(self, fast: Filesystem, durable: Filesystem, near: Iterable[str], received: Filesystem) -> None:
        self._fast, self._durable, self._received = fast, durable, received
        self._near = frozenset(near)
        self.path = durable.path
        self.parallel_reads = max(fast.parallel_reads, durable.parallel_reads)
        self.read_nbytes = durable.read_nbytes
        self.file_nbytes_worthwhile = durable.file_nbytes_worthwhile
        self.read_copies = max(fast.read_copies, durable.read_copies)

    def _of(self, name: str) -> Filesystem:
        if self._received.file_nbytes(name) is not None:
            return self._received
        return self._fast if name in self._near else self._durable

    def location(self, name: str) -> str:
        return self._of(name).location(name)

    def read(self, name: str, start: int, stop: int) -> bytes:
        return self._of(name).read(name, start, stop)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._of(name).read_into(name, start, buffer)

    def read_all(self, name: str, *, limit_nbytes: int) -> bytes:
        return self._of(name).read_all(name, limit_nbytes=limit_nbytes)

    def file_nbytes(self, name: str) -> int | None:
        return self._of(name).file_nbytes(name)

    def list_files(self) -> list[FileInfo]:
        return self._fast.list_files()

    def list_below(self) -> RecursiveListing:
        return self._fast.list_below()

    def now_seconds(self) -> float:
        return self._fast.now_seconds()

    def close(self) -> None:
        self._fast.close()
        self._durable.close()

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("it is for reading")

    output_streams = create_directory = open_output = publish = remove = _refuse


class NearestReader(NvcompReader):
    """Loads a step from the nearest copies of its files; without `from_nodes`, from the durable tier alone."""

    _fetch: Fetch | None = None
    # the copies that turned out damaged or can't be read, as pairs of node and file
    damaged: tuple[tuple[str, str], ...] = ()
    files: Mapping[Source, int] = MappingProxyType({})  # how many files this rank's part came from, by source
    nbytes: Mapping[Source, int] = MappingProxyType({})  # size of these files, by source

    def from_nodes(self, fetch: Fetch) -> None:
        self._fetch = fetch

    @property
    def reads_alone(self) -> bool:
        """True from nodes: replicas have versions of their own of one step."""
        return self._fetch is not None

    @property
    def looks_at_plans(self) -> bool:
        return False

    def open_storage(self) -> Filesystem:
        durable = super().open_storage()
        if self._fetch is None:
            return durable
        return NearestFilesystem(self._fetch.here, durable, self._fetch.near, self._fetch.received)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks saw the same save, or versions of it by different replicas; called by DCP."""
        if self._fetch is not None and {plan.storage_data.save_id for plan in plans} <= self._fetch.save_ids:
            return plans
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring the files here that this rank needs, and load its items; called by DCP."""
        stored = (self.storage_data.get(item.storage_index) for item in plan.items)
        needed = {one.file.name: one.file.nbytes for one in stored if isinstance(one, StoredAt)}
        if self._fetch is None:
            self._count(needed)
            return super().read_data(plan, planner)
        try:
            self._fetch.bring(needed)
            self._count(needed)
            return super().read_data(plan, planner)
        except CheckpointError as error:
            name = posixpath.basename(error.path or "")
            self.damaged = tuple(map(self._fetch.copy_of, self._fetch.unread or (name,)))
            raise

    def _count(self, needed: Mapping[str, int]) -> None:
        files: Counter[Source] = Counter()
        nbytes: Counter[Source] = Counter()
        for name, size in needed.items():
            source: Source = "durable" if self._fetch is None else self._fetch.source_of(name)
            files[source] += 1
            nbytes[source] += size
        self.files, self.nbytes = dict(files), dict(nbytes)

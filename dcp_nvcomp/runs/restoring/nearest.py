"""Reads each file of a step from its nearest copy: this node's, else a peer's, else the durable tier's.

Which files a rank needs follows from its load plan, so that any number of ranks can load. Between plan and reading, the
ranks bring what their nodes lack and peers have into their own fast tiers (`Fetch.bring`); of what no peer has, ranges
are read from the durable tier.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.stored import StoredAt
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.loading.seen import seen_by
from dcp_nvcomp.runs.events import Source
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.restoring.candidates import Candidate
from dcp_nvcomp.runs.tiers.nodes import Nodes, Transfer
from dcp_nvcomp.runs.tiers.transfer import move_files
from dcp_nvcomp.storage.base import Below, FileInfo, Filesystem, OutputStream

__all__ = ["Fetch", "NearestFilesystem", "NearestReader"]


class NearestFilesystem(Filesystem):
    """A step's directory for reading: some files are in the fast tier, the others in the durable one.

    Args:
        fast: the step's directory on this node.
        durable: the step's directory in the durable tier.
        near: the files that are whole on this node.
    """

    def __init__(self, fast: Filesystem, durable: Filesystem, near: Iterable[str]) -> None:
        self._fast, self._durable = fast, durable
        self._near = frozenset(near) | {METADATA_NAME}
        self.path = durable.path
        self.parallel_reads = max(fast.parallel_reads, durable.parallel_reads)
        self.read_nbytes = durable.read_nbytes
        self.file_nbytes_worthwhile = durable.file_nbytes_worthwhile
        self.read_copies = max(fast.read_copies, durable.read_copies)

    def _of(self, name: str) -> Filesystem:
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

    def list_below(self) -> Below:
        return self._fast.list_below()

    def now_seconds(self) -> float:
        return self._fast.now_seconds()

    def close(self) -> None:
        self._fast.close()
        self._durable.close()

    def output_streams(self, thread_count: int, memory_budget: int) -> int:
        raise AssertionError("it is for reading")

    def create_directory(self) -> None:
        raise AssertionError("it is for reading")

    def open_output(self, name: str) -> OutputStream:
        raise AssertionError("it is for reading")

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        raise AssertionError("it is for reading")

    def remove(self, names: Iterable[str]) -> None:
        raise AssertionError("it is for reading")


class Fetch:
    """Brings the files of one step to the nodes whose ranks need them.

    Args:
        candidate: the step.
        ranks: the ranks.
        nodes: where they are.
        fast: the step's directory on this node.

    Attributes:
        near: the files that are whole on this node.
        own: those of them that were here before anything was moved.
        save_ids: of the versions that ranks may read.
    """

    def __init__(self, candidate: Candidate, ranks: Ranks, nodes: Nodes, fast: Filesystem) -> None:
        self._candidate, self._ranks, self._nodes, self._fast = candidate, ranks, nodes, fast
        self._files = candidate.files()
        self.near = {name for name in self._files if nodes.own in candidate.nodes_with(name)}
        self.save_ids = candidate.save_ids
        self.own = frozenset(self.near)

    def bring(self, needed: Iterable[str]) -> None:
        """Move what this rank needs, and a peer has, into this node's fast tier; all ranks call it.

        Args:
            needed: the files that this rank reads.

        Raises:
            CheckpointError: a file could not be moved; the same on all ranks.
        """
        transfers = self._transfers(self._ranks.gather(sorted(needed)))
        if transfers:
            self._ranks.together(self._fast.create_directory)
            move_files(self._ranks, transfers, self._fast, self._fast, on_moved=lambda name, nbytes: None)
        for transfer, files in transfers.items():
            if self._nodes.node_of(transfer.to) == self._nodes.own:
                self.near |= files.keys()

    def source_of(self, name: str) -> Source:
        """Return where a file came from."""
        return "own" if name in self.own else "peer" if name in self.near else "durable"

    def _transfers(self, needs: list[list[str]]) -> Mapping[Transfer, Mapping[str, int]]:
        """Return what goes from whom to whom, the same on all ranks."""
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


class NearestReader(NvcompReader):
    """Loads a step from the nearest copies of its files; without `from_nodes`, from the durable tier alone.

    Its arguments are those of `NvcompReader`; the path is that of the step in the durable tier.

    Attributes:
        damaged: the files whose copy on this node turned out damaged.
        files: how many files this rank's part came from, by source.
        nbytes: size of these files, by source.
    """

    _fetch: Fetch | None = None
    _fast: Filesystem | None = None
    damaged: tuple[str, ...] = ()
    files: Mapping[Source, int] = MappingProxyType({})
    nbytes: Mapping[Source, int] = MappingProxyType({})

    def from_nodes(self, fetch: Fetch, fast: Filesystem) -> None:
        """Take what nodes have from them.

        Args:
            fetch: brings it here.
            fast: the step's directory on this node.
        """
        self._fetch, self._fast = fetch, fast

    def open_storage(self) -> Filesystem:
        """Open the checkpoint's storage."""
        durable = super().open_storage()
        if self._fetch is None:
            return durable
        assert self._fast is not None
        return NearestFilesystem(self._fast, durable, self._fetch.near)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks saw the same save, or versions of it by different replicas; called by DCP.

        Raises:
            CheckpointReplacedError: another save replaced the checkpoint between two ranks' reads.
        """
        if self._fetch is not None and {one.save_id for one in seen_by(plans)} <= self._fetch.save_ids:
            return plans
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring the files here that this rank needs, and load its items; called by DCP.

        Raises:
            BaseException: the first error of any thread. The contents of the destinations are undefined then.
        """
        stored = (self.storage_data.get(item.storage_index) for item in plan.items)
        needed = {one.file.name: one.file.nbytes for one in stored if isinstance(one, StoredAt)}
        if self._fetch is not None:
            self._fetch.bring(needed)
        self._count(needed)
        try:
            return super().read_data(plan, planner)
        except CheckpointError as error:
            name = posixpath.basename(error.path or "")
            if self._fetch is not None and name in self._fetch.near:
                self.damaged = (name,)
            raise

    def _count(self, needed: Mapping[str, int]) -> None:
        files: Counter[Source] = Counter()
        nbytes: Counter[Source] = Counter()
        for name, size in needed.items():
            source: Source = "durable" if self._fetch is None else self._fetch.source_of(name)
            files[source] += 1
            nbytes[source] += size
        self.files, self.nbytes = dict(files), dict(nbytes)

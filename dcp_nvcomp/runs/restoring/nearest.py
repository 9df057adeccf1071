"""Reads each file of a step from its nearest copy: this node's, else a peer's, else the durable tier's.

Which files a rank needs follows from its load plan, so that any number of ranks can load. Between plan and reading, the
ranks bring what their nodes lack and peers have (`fetch.py`); of what no peer has, ranges are read from the durable
tier.
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
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.loading.seen import seen_by
from dcp_nvcomp.runs.events import Source
from dcp_nvcomp.runs.restoring.fetch import Fetch
from dcp_nvcomp.storage.base import Below, FileInfo, Filesystem, OutputStream


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


class NearestReader(NvcompReader):
    """Loads a step from the nearest copies of its files; without `from_nodes`, from the durable tier alone.

    Its arguments are those of `NvcompReader`; the path is that of the step in the durable tier.

    Attributes:
        damaged: the copies that turned out damaged or can't be read, as pairs of node and file.
        files: how many files this rank's part came from, by source.
        nbytes: size of these files, by source.
    """

    _fetch: Fetch | None = None
    damaged: tuple[tuple[str, str], ...] = ()
    files: Mapping[Source, int] = MappingProxyType({})
    nbytes: Mapping[Source, int] = MappingProxyType({})

    def from_nodes(self, fetch: Fetch) -> None:
        """Take what nodes have from them."""
        self._fetch = fetch

    def open_storage(self) -> Filesystem:
        """Open the checkpoint's storage."""
        durable = super().open_storage()
        if self._fetch is None:
            return durable
        return NearestFilesystem(self._fetch.here, durable, self._fetch.near, self._fetch.received)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks saw the same save, or versions of it by different replicas; called by DCP."""
        if self._fetch is not None and {one.save_id for one in seen_by(plans)} <= self._fetch.save_ids:
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

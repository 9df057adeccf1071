"""The saves of a writer, and one rank's part of one: `RankSave.run` writes its files, `RankResults` name what is there.

A save is announced on a thread, by `reset` or `storage_meta`, and begun there by `set_up_storage_writer`. Asynchronous
saves of one writer may overlap, each on a thread of its own. A prepared one belongs to no thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser, parse_codec
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.options import CheckEncodes, Engine, check_budget, check_choice, check_flag, check_seconds
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.commit import LastPublished, Orphans
from dcp_nvcomp.saving.data_files import PlannedFile, WrittenFile, plan_files, planned_nbytes
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.encode.tasks import BufferMemory, JobMemory
from dcp_nvcomp.saving.job import Patience, SaveJob
from dcp_nvcomp.saving.plans.global_plan import PlacedItems, PlannedMetadata
from dcp_nvcomp.saving.stats import RankTotals, SaveStats, summarize
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of
from dcp_nvcomp.version import VERSION

if TYPE_CHECKING:
    from dcp_nvcomp.saving.asynchronous.staging import Staging

Resolve: TypeAlias = Callable[[WriteItem], Any]
Written: TypeAlias = tuple[list[WrittenFile], RankTotals]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of an `NvcompWriter`, with the names that they have there. They are checked when this is made."""

    codec: str | CodecChain | CodecChooser
    thread_count: int
    single_file_per_rank: bool
    overwrite: bool
    sync_files: bool
    host_memory_budget: int
    device_memory_budget: int | None
    engine: str
    check_encodes: str
    storage_deadline_seconds: float
    staging_budget_nbytes: int | None
    finish_within_seconds: float
    storage_options: Mapping[str, Any] = field(repr=False)  # with credentials
    known_options: tuple[str, ...]  # the names of all options, to tell a mistyped one from a storage option

    def __post_init__(self) -> None:
        parse_codec(self.codec)
        for name in ("single_file_per_rank", "overwrite", "sync_files"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        for name in ("storage_deadline_seconds", "finish_within_seconds"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        check_budget("host_memory_budget", self.host_memory_budget)
        for name in ("device_memory_budget", "staging_budget_nbytes"):
            if getattr(self, name) is not None:
                check_budget(name, getattr(self, name))
        check_choice("engine", self.engine, Engine)
        check_choice("check_encodes", self.check_encodes, CheckEncodes)

    @property
    def chooser(self) -> CodecChooser:
        return parse_codec(self.codec)

    def open(self, path: str) -> Filesystem:
        """Open a checkpoint: for each use, as connections are neither pickled nor shared between processes."""
        return open_filesystem(
            path,
            sync_files=self.sync_files,
            deadline_seconds=self.storage_deadline_seconds,
            storage_options=self.storage_options,
            known_options=self.known_options,
        )


@dataclass(frozen=True)
class RankSave:
    path: str
    save_id: str
    rank: int
    items: Sequence[WriteItem]
    options: SaveOptions

    @property
    def nbytes(self) -> int:
        return sum(map(planned_nbytes, self.items))

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity(self.save_id, self.save_id, self.rank, {"dcp_nvcomp": VERSION, "torch": torch.__version__})

    def open(self) -> contextlib.closing[Filesystem]:
        return contextlib.closing(self.options.open(self.path))

    def lanes(self, filesystem: Filesystem) -> list[list[PlannedFile]]:
        """Plan the data files: those of one lane are written one after the other."""
        options = self.options
        return plan_files(
            self.items,
            self.rank,
            self.save_id,
            single_file_per_rank=options.single_file_per_rank,
            streams=filesystem.output_streams(options.thread_count, options.host_memory_budget),
            file_nbytes=filesystem.file_nbytes_worthwhile,
        )

    def run(
        self,
        resolve: Resolve,
        *,
        engine: EngineChoice,
        remembered: RememberedChoices,
        filesystem: Filesystem | None = None,
        lanes: Sequence[Sequence[PlannedFile]] | None = None,
        memory: JobMemory | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
        on_staged: Callable[[], None] | None = None,
        patience: Patience | None = None,
    ) -> Written:
        options = self.options
        with contextlib.ExitStack() as stack:
            if filesystem is None:
                filesystem = stack.enter_context(self.open())
            if lanes is None:
                lanes = self.lanes(filesystem)
            if memory is None:
                memory = BufferMemory(
                    options.host_memory_budget,
                    threads=options.thread_count * (1 if patience is None else 2) + len(lanes),
                    state_nbytes=self.nbytes,
                    may_use_cuda=engine.may_use_cuda(),
                )
            job = SaveJob(
                self,
                filesystem,
                lanes,
                resolve,
                engine=engine,
                remembered=remembered,
                memory=memory,
                progress=progress,
                on_staged=on_staged,
                patience=patience,
            )
            return job.run(), job.totals


class RankResults(list[WriteResult]):
    """DCP's list of one rank's write results, with its measurements; if all ranks keep the plan, `placed` is enough."""

    def __init__(self, results: Iterable[WriteResult], totals: RankTotals, placed: PlacedItems | None = None) -> None:
        super().__init__(results)
        self.totals = totals
        self.placed = placed

    @classmethod
    def of(cls, files: Sequence[WrittenFile], totals: RankTotals, plan: SavePlan | None = None) -> RankResults:
        """Return what `.metadata` needs to know of each item, in terms of `plan` if the ranks keep it."""
        if plan is not None:
            return cls((), totals, placed_items(files, plan))
        found: list[WriteResult] = []
        with collector_paused():
            for written in files:
                shared = tuple(written.file)  # one plain tuple for all items of a file
                found += [WriteResult(index, nbytes, (shared, record)) for index, nbytes, record in written.items]
        return cls(found, totals)


def placed_items(files: Sequence[WrittenFile], plan: SavePlan) -> PlacedItems:
    position_of = {id(item.index): position for position, item in enumerate(plan.items)}
    code = "H" if len(plan.items) < 1 << 16 else "I"
    return PlacedItems(
        tuple(tuple(written.file) for written in files),
        tuple(len(written.items) for written in files),
        array(code, [position_of[id(index)] for written in files for index, _, _ in written.items]),
        array(code, [record for written in files for _, _, record in written.items]),
    )


def place(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    """Note in the metadata of a save where its shards are."""
    if isinstance(metadata, PlannedMetadata):
        metadata.place([rank.placed for rank in results if isinstance(rank, RankResults) and rank.placed is not None])
    else:
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}


@dataclass
class Save:
    path: str = ""  # empty until it is fixed: by `reset` with a place, or when the save begins
    place: str = ""  # where that is, wherever the process moves to until the save is over
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # in the names of its files
    has_begun: bool = False
    has_ended: bool = False  # DCP calls nothing more for it on this rank
    rank: int = 0
    is_coordinator: bool = False
    use_collectives: bool = True
    started_seconds: float = 0.0
    own_files: tuple[str, ...] = ()  # the data files that this rank wrote

    def stats(self, totals: Sequence[RankTotals]) -> SaveStats:
        seconds = time.perf_counter() - self.started_seconds
        return summarize(without_secrets(self.path), self.save_id, totals, seconds)


@dataclass(frozen=True)
class PreparedWrite:
    """A `RankSave` whose save was begun and planned by one process, to be written by any."""

    save: Save
    planned_seconds: float
    rank_save: RankSave
    engine: EngineChoice
    process_id: int

    def write(self, resolve: Resolve, remembered: RememberedChoices) -> RankResults:
        """Encode and write the items; in another process by the CPU engine, as a forked one cannot use CUDA."""
        engine = self.engine if os.getpid() == self.process_id else EngineChoice("cpu")
        files, totals = self.rank_save.run(resolve, engine=engine, remembered=remembered)
        totals.rank, totals.seconds["plan"] = self.save.rank, self.planned_seconds
        return RankResults.of(files, totals)


class Saves:
    """The latest save of each thread, and what the earlier ones have left; a copy or pickle has the path alone."""

    def __init__(self, path: str, is_explicit: bool = False) -> None:
        self._path = path
        self._is_explicit = is_explicit
        self._local = threading.local()
        self._owner = threading.current_thread()
        self._latest: Save | None = None
        self.orphans, self.last_published = Orphans(), LastPublished()
        self.unfinished = False  # True on the coordinator while a save is under way, and if it was not published

    def __reduce__(self) -> tuple[type[Saves], tuple[str, bool]]:
        return type(self), (self._path, self._is_explicit)

    @property
    def path(self) -> str:
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        self._path, self._is_explicit = path, True
        save = self._own
        if save is not None and save.has_begun:
            save.has_ended = True
        elif save is not None:
            save.path = ""  # it was announced for another place

    @property
    def _own(self) -> Save | None:
        return getattr(self._local, "save", None)

    @property
    def current(self) -> Save:
        save: Save = self._local.save
        return save

    @property
    def announced(self) -> Save:
        """The save that this thread is in, else the one that it is about to begin; its `path` may still be empty."""
        save = self._own
        return self._announce(Save()) if save is None or save.has_ended else save

    def _announce(self, save: Save) -> Save:
        self._local.save = self._latest = save
        return save

    @property
    def staging(self) -> Staging | None:
        return getattr(self._local, "staging", None)

    @contextmanager
    def published(self) -> Iterator[None]:
        """Note whether the save that is published meanwhile was."""
        try:
            yield
        except BaseException as error:
            # it may be published, or may still be: then no rank may remove its files
            if not isinstance(error, CheckpointError) or error.outcome_unknown:
                self.unfinished = False
            raise
        self.unfinished = False

    @contextmanager
    def staged_by(self, staging: Staging) -> Iterator[None]:
        self._local.staging = staging
        try:
            yield
        finally:
            self._local.staging = None

    def reset(self, place: str) -> None:
        if place and (threading.current_thread() is self._owner or not self._is_explicit):
            self._path = place
        self._announce(Save(place))

    def begin(self, *, rank: int, is_coordinator: bool, use_collectives: bool) -> None:
        """Begin the announced save of this thread; another one, at its place, if that has begun and failed."""
        save = self.announced
        if save.has_begun:
            save = self._announce(Save(save.path))
        save.path = save.path or self._path
        save.place = place_of(save.path) if self.staging is None else self.staging.place
        save.rank, save.is_coordinator, save.use_collectives = rank, is_coordinator, use_collectives
        save.started_seconds = time.perf_counter()
        save.has_begun = True

    @property
    def checkpoint_id(self) -> str:
        save = self._own
        return self._path if save is None or save.has_ended else save.path or self._path

    @property
    def save_id(self) -> str:
        save = self._own
        if save is None or save.has_ended:
            save = self._latest or self.announced
        return save.save_id

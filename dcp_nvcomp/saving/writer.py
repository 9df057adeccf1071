"""NvcompWriter: a save, from top to bottom.

    set_up_storage_writer   an id of its own for each save
    prepare_local_plan      the directory; is there a checkpoint that may not be replaced?
    prepare_global_plan     (coordinator) whether the last save failed, so that its files may go
    write_data              plan -> encode -> stage -> write, see job.py
    finish                  (coordinator) commit: `.metadata` is published last, then what it replaced is removed

A checkpoint exists from the moment its `.metadata` is published. Everything before that only adds files with names that
no other save has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser, parse_codec
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.options import (
    DEADLINE_SECONDS,
    ENGINES,
    STOCK_WRITER,
    check_budget,
    check_choice,
    check_flag,
    check_seconds,
    check_thread_count,
    drop_stock_arguments,
    option_names,
    shown,
)
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.commit import commit_checkpoint, commit_rank, refuse_existing
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.file_plan import plan_files, planned_nbytes
from dcp_nvcomp.saving.job import SaveJob, SaveOptions
from dcp_nvcomp.saving.orphans import Orphans
from dcp_nvcomp.saving.progress import ProgressBar
from dcp_nvcomp.saving.stats import RankTotals, SaveStats, summarize
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

__all__ = ["NvcompWriter"]

logger = logging.getLogger(__name__)


def _own_version() -> str:
    try:
        return version("dcp-nvcomp")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


# read at the import, as files of the installation may be out of reach later, and no save must fail for that
_VERSION: Final = _own_version()


@dataclass
class _Save:
    """One save of this rank: announced by `reset` or `storage_meta`, begun by `set_up_storage_writer`.

    Attributes:
        path: the checkpoint. Empty until `reset` or the beginning fixes it: until then the writer's path counts.
        save_id: its id, in the names of its files.
    """

    path: str = ""
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    has_begun: bool = False
    has_ended: bool = False
    rank: int = 0
    is_coordinator: bool = False
    use_collectives: bool = True
    started_seconds: float = 0.0
    own_files: tuple[str, ...] = ()


class RankResults(list[WriteResult]):
    """The write results of one rank, and what it measured: DCP carries the list to the coordinator as it is."""

    def __init__(self, results: Iterable[WriteResult], totals: RankTotals) -> None:
        super().__init__(results)
        self.totals = totals


class NvcompWriter(StorageWriter, BlockingAsyncStager):
    """Saves DCP checkpoints compressed, losslessly, to anything fsspec can reach.

    Pass it as `storage_writer=` to `dcp.save` or `dcp.async_save`. One writer serves many saves.

    Args:
        path: where the checkpoint goes: a local path or any fsspec URL. `checkpoint_id` of `dcp.save` replaces it.
        codec: `"auto"` (chosen for each tensor from dtype, size and a sample; every machine can read it),
            `"planes-zstd"`, `"planes-deflate"`, `"zstd"`, `"ans"` (nvCOMP on NVIDIA GPUs only), `"none"`, a
            `CodecChain`, or an object with `choose()`.
        thread_count: encoding threads; by default one per CPU core, at most 8.
        single_file_per_rank: whether a rank's items share files (several only if they are large and the storage takes
            parallel streams). Otherwise each item is a file of its own.
        overwrite: whether a checkpoint at the same path may be replaced. The old one stays loadable until the new one
            is complete.
        sync_files: whether files are on stable storage before the checkpoint is published. Without it a power failure
            can lose a checkpoint that `dcp.save` reported as saved.
        host_memory_budget: bytes of host memory for encoded data.
        device_memory_budget: bytes of memory on each GPU for encoding.
        progress: whether to draw a progress bar on a terminal, on rank 0.
        on_save: called on the coordinator after each commit with the `SaveStats` (with `use_collectives=False` on each
            rank); what it raises becomes a warning. With the process checkpointer of `dcp.async_save` it must be
            picklable and runs in the child process.
        engine: `"auto"` encodes GPU tensors on the GPU where nvCOMP is installed, `"cuda"` insists on it, `"cpu"` never
            does. Tensors in host memory are always encoded on the CPU.
        storage_deadline_seconds: on `s3://`, how long one operation of the storage may take with all its retries:
            sending a part, reading a range, publishing. Then a `StorageError` is raised.
        **storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Raises:
        ConfigurationError: an option has a value that can't work, or is unknown.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from dcp_nvcomp import NvcompReader, NvcompWriter
        >>> path, state = tempfile.mkdtemp(), {"w": torch.arange(4.0)}
        >>> _ = dcp.save(state, storage_writer=NvcompWriter(path), no_dist=True)
        >>> state["w"].zero_()
        tensor([0., 0., 0., 0.])
        >>> dcp.load(state, storage_reader=NvcompReader(path), no_dist=True)
        >>> state["w"]
        tensor([0., 1., 2., 3.])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        *,
        codec: str | CodecChain | CodecChooser = "auto",
        overwrite: bool = True,
        host_memory_budget: int = 1 << 30,
        device_memory_budget: int = 512 << 20,
        progress: bool = False,
        on_save: Callable[[SaveStats], None] | None = None,
        engine: str = "auto",
        storage_deadline_seconds: float = DEADLINE_SECONDS,
        **storage_options: Any,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        drop_stock_arguments(storage_options, STOCK_WRITER, type(self))
        self._path = os.fspath(path)
        self.codec = codec
        self.thread_count = check_thread_count(thread_count)
        self.single_file_per_rank = check_flag("single_file_per_rank", single_file_per_rank)
        self.overwrite = check_flag("overwrite", overwrite)
        self.sync_files = check_flag("sync_files", sync_files)
        self.host_memory_budget = check_budget("host_memory_budget", host_memory_budget)
        self.device_memory_budget = check_budget("device_memory_budget", device_memory_budget)
        self.progress = check_flag("progress", progress)
        if on_save is not None and not callable(on_save):
            raise ConfigurationError(f"on_save={on_save!r} is not callable.")
        self.on_save = on_save
        self.engine = check_choice("engine", engine, ENGINES)
        self.storage_deadline_seconds = check_seconds("storage_deadline_seconds", storage_deadline_seconds)
        self.storage_options = storage_options
        self.last_save: SaveStats | None = None
        self._chooser = parse_codec(codec)
        self._engine_choice = EngineChoice(self.engine)
        self._begin_life()
        self._open(self._path)  # fail fast on invalid options

    def _begin_life(self) -> None:
        """What belongs to one process and is never pickled."""
        self._local = threading.local()
        self._thread = threading.current_thread()
        self._latest: _Save | None = None
        self._orphans = Orphans()
        self._unfinished = False

    def __getstate__(self) -> dict[str, Any]:
        # the process checkpointer of dcp.async_save sends the writer anew for each save
        left_behind = ("_local", "_thread", "_latest", "_orphans", "_unfinished")
        return {name: value for name, value in self.__dict__.items() if name not in left_behind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_life()

    def __repr__(self) -> str:
        return shown(type(self), self._path, vars(self), self.storage_options)

    @property
    def _save(self) -> _Save:
        """The save that this thread is in. Asynchronous saves of one writer may overlap, each on its own thread."""
        save: _Save = self._local.save
        return save

    @property
    def _own(self) -> _Save | None:
        return getattr(self._local, "save", None)

    def _announced(self) -> _Save:
        """The save that this thread is about to begin."""
        save = self._own
        if save is None or save.has_begun:
            save = self._local.save = self._latest = _Save()
        return save

    @property
    def path(self) -> str:
        """Where saves without `checkpoint_id` go. It may be set between saves.

        An asynchronous save looks it up when its thread begins: give `checkpoint_id=` to `dcp.async_save` instead of
        setting it.
        """
        return self._path

    @path.setter
    def path(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        save = self._own
        if save is not None and save.has_begun:
            save.has_ended = True
        elif save is not None:
            save.path = ""  # what `reset` said before counts no longer

    @property
    def save_id(self) -> str:
        """Id of the save that this thread is in; else of the writer's latest save; before the first, of the next."""
        save = self._own
        if save is None or save.has_ended:
            save = self._latest or self._announced()
        return save.save_id

    def _open(self, path: str) -> Filesystem:
        # made anew for each use: never pickled, and never shared with a process that was forked or spawned
        return open_filesystem(
            path,
            sync_files=self.sync_files,
            deadline_seconds=self.storage_deadline_seconds,
            storage_options=self.storage_options,
            known_options=option_names(type(self)),
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP: a new save begins, perhaps at another place. Options are kept.

        On the thread that made the writer, later saves without `checkpoint_id` go to that place too. On other threads,
        as those of `dcp.async_save`, it is the place of this save only.
        """
        place = os.fspath(checkpoint_id) if checkpoint_id else ""
        if place and threading.current_thread() is self._thread:
            self._path = place
        self._local.save = self._latest = _Save(place)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP: the save begins, at the place and with the id that `storage_meta` announced."""
        save = self._announced()
        save.path = save.path or self._path
        save.rank = kwargs.get("rank") or 0
        save.is_coordinator = is_coordinator
        save.use_collectives = kwargs.get("use_collectives", True)
        save.started_seconds = time.perf_counter()
        save.has_begun = True
        self.last_save = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """DCP: make the directory, and refuse to replace what may not be replaced.

        Raises:
            CheckpointExistsError: there is a checkpoint, and `overwrite=False` or `use_collectives=False`.
            CodecUnavailableError: the codec needs a GPU or a package that is not here.
            StorageError: the target can't be written.
        """
        save = self._save
        self._engine_choice.check_codec(self._chooser)
        with contextlib.closing(self._open(save.path)) as filesystem:
            if not save.use_collectives:
                refuse_existing(filesystem, rank=save.rank)
            elif save.is_coordinator and not self.overwrite:
                refuse_existing(filesystem, rank=None)
            filesystem.create_directory()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """DCP, coordinator: tell the ranks whether the last save came to nothing; see `Orphans`."""
        earlier_failed, self._unfinished = self._unfinished, True
        return [dataclasses.replace(plan, storage_data=earlier_failed) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP: write this rank's items.

        Raises:
            BaseException: the first error on any thread; what was written is removed then.
        """
        save = self._save
        if plan.storage_data is True:
            self._orphans.remove(self._open)
        planned_seconds = time.perf_counter() - save.started_seconds
        nbytes = sum(planned_nbytes(item) for item in plan.items)
        bar = ProgressBar(nbytes, enabled=self.progress and save.rank == 0)
        with contextlib.closing(self._open(save.path)) as filesystem, bar:
            job = self._job(plan, planner, filesystem, progress=bar.update, state_nbytes=nbytes)
            results = RankResults(job.run(), job.totals)
        results.totals.seconds["plan"] = planned_seconds
        save.own_files = tuple(job.totals.files)
        if save.use_collectives:
            self._orphans.wrote(save.path, save.own_files)
        self.last_save = self._summarize([results.totals])
        save.has_ended = save.use_collectives and not save.is_coordinator  # DCP calls nothing more on such a rank
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _job(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        filesystem: Filesystem,
        *,
        progress: Callable[[int], None],
        state_nbytes: int,
    ) -> SaveJob:
        save = self._save
        lanes = plan_files(
            plan.items,
            save.rank,
            save.save_id,
            single_file_per_rank=self.single_file_per_rank,
            streams=filesystem.output_streams(self.thread_count, self.host_memory_budget),
            file_nbytes=filesystem.file_nbytes_worthwhile,
        )
        return SaveJob(
            filesystem,
            lanes,
            lambda: RecordMaker(self._chooser, self._engine_choice, pack=self.single_file_per_rank),
            planner.resolve_data,
            SaveOptions(
                thread_count=self.thread_count,
                host_memory_budget=self.host_memory_budget,
                device_memory_budget=self.device_memory_budget,
                may_use_cuda=self._engine_choice.may_use_cuda(),
            ),
            identity=FileIdentity(
                save.save_id, save.save_id, save.rank, {"dcp_nvcomp": _VERSION, "torch": torch.__version__}
            ),
            progress=progress,
            state_nbytes=state_nbytes,
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """DCP, coordinator (with `use_collectives=False`: each rank): commit.

        Args:
            metadata: what was saved; `storage_data`, `storage_meta` and `version` are set in place.
            results: the results of all ranks.

        Raises:
            ConcurrentSaveError: `overwrite=False`, and another save was published first.
            StorageError: it could not be published.
        """
        save, start = self._save, time.perf_counter()
        metadata.version = "1.0.0"
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = StorageMeta(checkpoint_id=without_secrets(save.path), save_id=save.save_id)
        with contextlib.closing(self._open(save.path)) as filesystem:
            if save.use_collectives:
                self._commit(filesystem, metadata, save)
            else:
                commit_rank(filesystem, metadata, save.rank, save.own_files)
        self._unfinished = False
        totals = [rank.totals for rank in results if isinstance(rank, RankResults)]
        totals.append(RankTotals(seconds={"commit": time.perf_counter() - start}))
        stats = self._summarize(totals)
        stats.attach_to(metadata)
        self._tell(stats)

    def _commit(self, filesystem: Filesystem, metadata: Metadata, save: _Save) -> None:
        try:
            commit_checkpoint(filesystem, metadata, save.save_id, save.own_files, overwrite=self.overwrite)
        except BaseException as error:
            # whether it was published is unknown, or it was interrupted: then no rank may remove its files
            if not isinstance(error, CheckpointError) or error.outcome_unknown:
                self._unfinished = False
            raise

    def _tell(self, stats: SaveStats) -> None:
        """Tell of a save that is published: nothing here may make it look as if it had failed."""
        save, self.last_save = self._save, stats
        save.has_ended = True
        if save.is_coordinator:
            logger.info("%s", stats)
        if self.on_save is not None:
            try:
                self.on_save(stats)
            except Exception as error:
                message = f"The checkpoint is saved, but on_save raised {type(error).__name__}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _summarize(self, totals: Sequence[RankTotals]) -> SaveStats:
        save = self._save
        return summarize(without_secrets(save.path), save.save_id, totals, time.perf_counter() - save.started_seconds)

    def storage_meta(self) -> StorageMeta:
        """DCP: place and id of the save that this thread is about to begin."""
        save = self._announced()
        return StorageMeta(checkpoint_id=save.path or self._path, save_id=save.save_id)

    @property
    def checkpoint_id(self) -> str:
        """Where the save goes that this thread is in; else where its next one would go."""
        save = self._own
        return self._path if save is None or save.has_ended else save.path or self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP: whether this writer could save there."""
        try:
            open_filesystem(checkpoint_id)
        except (ConfigurationError, TypeError):
            return False
        return True

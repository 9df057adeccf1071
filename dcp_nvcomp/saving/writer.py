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

import dataclasses
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
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
from dcp_nvcomp.options import (
    DEADLINE_SECONDS,
    ENGINES,
    check_budget,
    check_choice,
    check_seconds,
    check_thread_count,
    option_names,
)
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
    """One save of this rank, from `set_up_storage_writer` on."""

    path: str
    save_id: str
    rank: int
    is_coordinator: bool
    use_collectives: bool
    started_seconds: float = field(default_factory=time.perf_counter)
    own_files: tuple[str, ...] = ()


class RankResults(list[WriteResult]):
    """The write results of one rank, and what it measured: DCP carries the list to the coordinator as it is."""

    totals: RankTotals


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
        *,
        codec: str | CodecChain | CodecChooser = "auto",
        thread_count: int | None = None,
        single_file_per_rank: bool = True,
        overwrite: bool = True,
        sync_files: bool = True,
        host_memory_budget: int = 1 << 30,
        device_memory_budget: int = 512 << 20,
        progress: bool = False,
        on_save: Callable[[SaveStats], None] | None = None,
        engine: str = "auto",
        storage_deadline_seconds: float = DEADLINE_SECONDS,
        **storage_options: Any,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        self.path = os.fspath(path)
        self.codec = codec
        self.thread_count = check_thread_count(thread_count)
        self.single_file_per_rank = single_file_per_rank
        self.overwrite = overwrite
        self.sync_files = sync_files
        self.host_memory_budget = check_budget("host_memory_budget", host_memory_budget)
        self.device_memory_budget = check_budget("device_memory_budget", device_memory_budget)
        self.progress = progress
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
        self._open(self.path)  # tells at once what can't work

    def _begin_life(self) -> None:
        """What belongs to one process and is never pickled."""
        self._local = threading.local()
        self._orphans = Orphans()
        self._unfinished = False

    def __getstate__(self) -> dict[str, Any]:
        # the process checkpointer of dcp.async_save sends the writer anew for each save
        left_behind = ("_local", "_orphans", "_unfinished")
        return {name: value for name, value in self.__dict__.items() if name not in left_behind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_life()

    @property
    def _save(self) -> _Save:
        """The save that this thread is in. Asynchronous saves of one writer may overlap, each on its own thread."""
        save: _Save = self._local.save
        return save

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
        """DCP: a new save begins, perhaps at another place. Options stay."""
        if checkpoint_id:
            self.path = self._local.path = os.fspath(checkpoint_id)
            self._local.announced = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP: what this rank is in this save. Draws the id that makes this save's file names unique."""
        meta = self.storage_meta()
        self._local.announced = None
        self._local.save = _Save(
            path=str(meta.checkpoint_id),
            save_id=str(meta.save_id),
            rank=kwargs.get("rank") or 0,
            is_coordinator=is_coordinator,
            use_collectives=kwargs.get("use_collectives", True),
        )
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
        filesystem = self._open(save.path)
        if not save.use_collectives:
            refuse_existing(filesystem, rank=save.rank)
        elif save.is_coordinator and not self.overwrite:
            refuse_existing(filesystem, rank=None)
        filesystem.create_directory()
        filesystem.close()
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
        filesystem = self._open(save.path)
        total_nbytes = sum(planned_nbytes(item) for item in plan.items)
        planned_seconds = time.perf_counter() - save.started_seconds
        bar = ProgressBar(total_nbytes, enabled=self.progress and save.rank == 0)
        options = SaveOptions(
            self.thread_count,
            self.host_memory_budget,
            self.device_memory_budget,
            self._identity(),
            bar.update,
            state_nbytes=total_nbytes,
            may_use_cuda=self._engine_choice.may_use_cuda(),
        )
        job = SaveJob(
            filesystem,
            plan_files(
                plan.items,
                save.rank,
                save.save_id,
                single_file_per_rank=self.single_file_per_rank,
                streams=filesystem.output_streams(self.thread_count, self.host_memory_budget),
                file_nbytes=filesystem.file_nbytes_worthwhile,
            ),
            lambda: RecordMaker(self._chooser, self._engine_choice, pack=self.single_file_per_rank),
            planner.resolve_data,
            options,
        )
        try:
            results = RankResults(job.run())
        finally:
            bar.close()
            filesystem.close()
        results.totals = job.totals
        results.totals.seconds["plan"] = planned_seconds
        save.own_files = tuple(job.totals.files)
        if save.use_collectives:
            self._orphans.wrote(save.path, save.own_files)
        self.last_save = self._summarize([results.totals])
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _identity(self) -> dict[str, Any]:
        return {
            "save_id": self._save.save_id,
            "file_id": self._save.save_id,
            "rank": self._save.rank,
            "writer": {"dcp_nvcomp": _VERSION, "torch": torch.__version__},
        }

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
        metadata.storage_meta = StorageMeta(checkpoint_id=save.path, save_id=save.save_id)
        filesystem = self._open(save.path)
        if save.use_collectives:
            try:
                commit_checkpoint(filesystem, metadata, save.save_id, save.own_files, overwrite=self.overwrite)
            except BaseException as error:
                # whether it was published is unknown, or it was interrupted: then no rank may remove its files
                if not isinstance(error, CheckpointError) or error.outcome_unknown:
                    self._unfinished = False
                raise
        else:
            commit_rank(filesystem, metadata, save.rank)
        filesystem.close()
        self._unfinished = False
        totals = [rank.totals for rank in results if isinstance(rank, RankResults)]
        totals.append(RankTotals(seconds={"commit": time.perf_counter() - start}))
        self._tell(self._summarize(totals))

    def _tell(self, stats: SaveStats) -> None:
        """Tell of a save that is published: nothing here may make it look as if it had failed."""
        self.last_save = stats
        if self._save.is_coordinator:
            logger.info("%s", stats)
        if self.on_save is not None:
            try:
                self.on_save(stats)
            except Exception as error:
                message = f"The checkpoint is saved, but on_save raised {type(error).__name__}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _summarize(self, totals: Sequence[RankTotals]) -> SaveStats:
        save = self._save
        return summarize(save.path, save.save_id, totals, time.perf_counter() - save.started_seconds)

    def storage_meta(self) -> StorageMeta:
        """DCP: place and id of the save that this thread is about to begin."""
        announced: StorageMeta | None = getattr(self._local, "announced", None)
        if announced is None:
            path = getattr(self._local, "path", None) or self.path
            announced = self._local.announced = StorageMeta(checkpoint_id=path, save_id=uuid.uuid4().hex)
        return announced

    @property
    def checkpoint_id(self) -> str:
        """Where the next save goes."""
        return getattr(self._local, "path", None) or self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP: whether this writer could save there."""
        try:
            open_filesystem(checkpoint_id)
        except (ConfigurationError, TypeError):
            return False
        return True

"""NvcompWriter: a save, from top to bottom.

A checkpoint exists from the moment its `.metadata` is published. Until then a save only adds files, under names that no
other save uses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_nvcomp.calls.progress import ProgressBar, report_to
from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError, CheckpointReplacedError, ConfigurationError
from dcp_nvcomp.format.metadata.shares import leave_marks, state_beside
from dcp_nvcomp.format.names import shared_directories
from dcp_nvcomp.options import (
    DEADLINE_SECONDS,
    STOCK_WRITER,
    CheckEncodes,
    Engine,
    check_flag,
    check_path,
    check_thread_count,
    drop_stock_arguments,
    option_names,
    shown,
)
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.asynchronous.staging import Staging
from dcp_nvcomp.saving.commit import (
    FinishedSave,
    Publisher,
    commit_checkpoint,
    commit_rank,
    data_files,
    refuse_existing,
    remove_files,
)
from dcp_nvcomp.saving.derived import check_derived
from dcp_nvcomp.saving.plans.differences import check_same_place
from dcp_nvcomp.saving.plans.planner import KeepingPlanner
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.rank_save import RankResults, RankSave, place
from dcp_nvcomp.saving.references import Compared, ShardKey, Shards, check_references, compared, known_shards
from dcp_nvcomp.saving.save_options import SaveOptions
from dcp_nvcomp.saving.saves import PreparedWrite, Save, Saves
from dcp_nvcomp.saving.stats import RankTotals, SaveStats
from dcp_nvcomp.storage.base import BESIDE, Filesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of, real_place

logger = logging.getLogger(__name__)


class NvcompWriter(StorageWriter, BlockingAsyncStager):
    """Save DCP checkpoints, losslessly compressed, to any storage that fsspec supports.

    Pass it as `storage_writer=` to `dcp.save` or `dcp.async_save`. One writer can be used for any number of saves.

    Args:
        path: local path or fsspec URL of the checkpoint. `checkpoint_id=` of `dcp.save` overrides it.
        single_file_per_rank: if True, the items of a rank share a file, or a few files if they are large and the
            storage writes several at once faster. If False, each item gets a file of its own.
        sync_files: if True, files are on stable storage before the checkpoint is published. If False, a power failure
            can lose a checkpoint that `dcp.save` reported as saved.
        thread_count: number of encoding threads; by default one per CPU core, at most 8.
        codec: `"auto"` (chosen for each tensor from its dtype, size and a sample; readable on every machine),
            `"planes-zstd"`, `"planes-deflate"`, `"zstd"`, `"ans"` (NVIDIA GPUs with nvCOMP only), `"none"`, a
            `CodecChain`, or an object with a `choose` method.
        overwrite: if True, a checkpoint at the same path may be replaced. The old one can be loaded until the new one
            is complete.
        host_memory_budget: bytes of host memory for encoded data.
        device_memory_budget: bytes of memory on each GPU for encoding; by default 2 GiB, at most a tenth of what was
            free when the process first saved or loaded, and half of what torch had not reserved by then, though
            256 MiB in any case. `release_device_memory` gives back what is kept of it.
        progress: if True, rank 0 draws a progress bar; where standard error is no terminal, it logs a line every 10 s.
        on_save: called with the `SaveStats` after each commit, on the coordinator (with `use_collectives=False`, on
            each rank). An exception that it raises becomes a warning. With the process checkpointer of
            `dcp.async_save` it must be picklable, and runs in the child process.
        engine: `"auto"` encodes GPU tensors on their GPU if nvCOMP is installed, `"cuda"` fails the save if that is
            impossible on this machine, `"cpu"` never uses the GPU. Tensors in host memory are always encoded on the
            CPU.
        check_encodes: `"all"` decodes on the GPU again what was encoded there and compares CRCs, before it is written;
            the CPU engine encodes blocks that came out wrong (`SaveStats.recoded_blocks`). `"off"` trusts the GPU. The
            CPU engine is not checked: it uses widely tested libraries.
        storage_deadline_seconds: time limit of one storage operation (sending a part, reading a range, publishing) with
            all its retries, after which it raises `StorageError`. It holds for S3, Azure, Google Cloud Storage, SFTP
            and SMB; elsewhere retries are up to the client.
        finish_within_seconds: when the process that encodes what `async_save` copied should be done. While it has time
            it has the lowest priority. It hurries if it falls behind, and when the next save is there, or expected from
            how far apart the last were.
        staging_budget_nbytes: bytes of host memory that `async_save` may hold until they are written; by default the
            smaller of twice the state's size and a quarter of what the host has free for each of its ranks. While it is
            full, staging waits for writing. What the asynchronous saves of a process have in use is counted together.
        reference: path or URL of a checkpoint in the same directory, such as `s3://bucket/run/step-900` for a save to
            `s3://bucket/run/step-1000`; or several, of which the first is taken at which there is a checkpoint. What is
            the same there, shard by shard, is not written again: the new checkpoint names the files of the other one,
            and needs them from then on. With `()` everything is written, and noted so that later checkpoints can
            share it; by default nothing is. A checkpoint that was saved without this option can't be shared, and
            what was written by `async_save(wait="nothing")` neither. Tensors below 64 KiB are always written, and with
            `use_collectives=False` or `prepare` everything is. While an asynchronous save is under way there is no
            checkpoint yet: for the next one, name the one before it too. The directory of what is shared has to be
            writable, as a mark there keeps its files.
        derived: which float32 tensors are master weights, and of which bfloat16 ones, by their keys, in which a `*`
            stands for the same text: `{"optimizer.master.*": "model.*"}`. Masters whose weight the same rank saves,
            of the same region and in host memory, are stored as the half that the weight lacks, if it is the rounded
            master (with `codec="auto"`). To load a master alone reads its weight too. Without shards of 64 KiB and
            more in bfloat16 it changes nothing; `dcp-nvcomp inspect` shows what was stored so.
        **storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3. Arguments of stock DCP's
            writers that have no counterpart here are accepted if their value changes nothing.

    Attributes:
        last_save: the `SaveStats` of the last save, of all ranks on the coordinator and of the local rank elsewhere.
            None before the first save and while one is planned, and with the process checkpointer, whose child
            process has a writer of its own: `SaveStats.of` works there too.

    Raises:
        ConfigurationError: an option is unknown or has an invalid value.

    Examples:
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
        device_memory_budget: int | None = None,
        progress: bool = False,
        on_save: Callable[[SaveStats], None] | None = None,
        engine: Engine = "auto",
        check_encodes: CheckEncodes = "all",
        storage_deadline_seconds: float = DEADLINE_SECONDS,
        staging_budget_nbytes: int | None = None,
        finish_within_seconds: float = 60.0,
        reference: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        derived: Mapping[str, str] | None = None,
        **storage_options: Any,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        drop_stock_arguments(storage_options, STOCK_WRITER, type(self))
        if on_save is not None and not callable(on_save):
            raise ConfigurationError(f"on_save={on_save!r} is not callable.")
        self.on_save = on_save
        self.progress = check_flag("progress", progress)
        self.options = SaveOptions(
            codec=codec,
            thread_count=check_thread_count(thread_count),
            single_file_per_rank=single_file_per_rank,
            overwrite=overwrite,
            sync_files=sync_files,
            host_memory_budget=host_memory_budget,
            device_memory_budget=device_memory_budget,
            engine=engine,
            check_encodes=check_encodes,
            storage_deadline_seconds=storage_deadline_seconds,
            staging_budget_nbytes=staging_budget_nbytes,
            finish_within_seconds=finish_within_seconds,
            references=None if reference is None else _places_of(reference),
            derived=check_derived(derived or {}),
            storage_options=storage_options,
            known_options=tuple(option_names(type(self))),
        )
        self.last_save: SaveStats | None = None
        self._engine_choice = EngineChoice(self.options.engine)
        self._saves = Saves(check_path(path))
        self._publisher: Publisher = commit_checkpoint
        self.options.open(self.path)  # fail fast on invalid options

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SaveOptions.__dataclass_fields__:  # it would change nothing
            raise AttributeError(f"{name}= of a writer is given when it is made; read it as writer.options.{name}")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # the process checkpointer of dcp.async_save sends the writer to its child process for each save
        return {**self.__dict__, "_saves": copy.copy(self._saves), "_publisher": commit_checkpoint}

    def __repr__(self) -> str:
        given = {**vars(self.options), "progress": self.progress, "on_save": self.on_save}
        given["derived"] = given["derived"] or None
        return shown(type(self), self.path, given, self.options.storage_options)

    @property
    def path(self) -> str:
        """The checkpoint of saves without `checkpoint_id`. It may be set between saves.

        A `checkpoint_id` becomes the path, as with stock DCP; see `reset`. An asynchronous save looks the path up when
        its thread begins: give `checkpoint_id=` to `dcp.async_save` instead of setting it.
        """
        return self._saves.path

    @path.setter
    def path(self, path: str | os.PathLike[str]) -> None:
        self._saves.path = os.fspath(path)

    @property
    def save_id(self) -> str:
        """The id of the save that this thread is in; else of the latest save; before the first one, of that."""
        return self._saves.save_id

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint of the save that this thread is in, else of its next one; without passwords: DCP logs it."""
        return without_secrets(self._saves.checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Announce another save, perhaps at another place; called by DCP. The options are kept.

        Later saves without `checkpoint_id` go to that place too, as with stock DCP. But if `path` was set explicitly,
        only the thread that made the writer moves it: on other threads, such as those of `dcp.async_save`, it is the
        place of this save only.
        """
        self._saves.reset(os.fspath(checkpoint_id) if checkpoint_id else "")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, at the place and with the id that `storage_meta` announced; called by DCP."""
        rank = kwargs.get("rank")  # callers other than DCP may leave it out
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        use_collectives = kwargs.get("use_collectives", True)
        self._saves.begin(rank=rank, is_coordinator=is_coordinator, use_collectives=use_collectives)
        self.last_save = None

    def staged_by(self, staging: Staging) -> contextlib.AbstractContextManager[None]:
        """Let the saves of this thread be staged; called by `async_save`."""
        return self._saves.staged_by(staging)

    def published_by(self, publisher: Publisher) -> None:
        """Let another publisher than the plain commit publish what this writer saves in this process."""
        self._publisher = publisher

    @property
    def is_of_a_run(self) -> bool:
        """True if a run publishes what is saved: then each node may have a place of its own for it."""
        return self._publisher is not commit_checkpoint

    @property
    def is_unpublished(self) -> bool:
        """True on the coordinator if the last save, which is over, certainly was not published and never will be."""
        return self._saves.unfinished

    def remove_unpublished(self) -> bool:
        """Remove what this rank wrote for the last save, which is over and was not published; called by runs.

        A run makes a writer for each save, so that there is no next save of this one, at which `Orphans` would go.

        Returns:
            False if that has to be tried again: the checkpoint at that path can't be read, or a file not be removed.

        Raises:
            StorageError: the storage does not answer in time, or can't be opened.
        """
        return self._saves.orphans.remove_ended(self.options.open)

    def close(self) -> None:
        """Free the host memory that the asynchronous saves of this process keep for the next one, and their process.

        Those that are under way go on, and keep theirs.
        """
        process_state().free()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory, and refuse to replace a checkpoint that must be kept; called by DCP.

        Raises:
            CheckpointExistsError: there is a checkpoint, and `overwrite=False` or `use_collectives=False`.
            CodecUnavailableError: the codec or `engine="cuda"` needs a GPU or a package that is not available.
            StorageError: the path cannot be written.
            ConfigurationError: the `reference` is not in the directory that the checkpoint is in.
            UnsafePathError: a run saves, and the directory of the step is a symbolic link.
        """
        save = self._saves.current
        check_references(save.place, self.options.references or ())
        self._engine_choice.begin(self.options.device_memory_budget)
        self._engine_choice.check_codec(self.options.chooser)
        with contextlib.closing(self.options.open(save.place)) as filesystem:
            if not save.use_collectives:
                refuse_existing(filesystem, rank=save.rank)
            elif save.is_coordinator and not self.options.overwrite:
                refuse_existing(filesystem, rank=None)
            if self.is_of_a_run:
                filesystem.refuse_link()
            filesystem.create_directory()
            if save.is_coordinator and self.options.references and save.use_collectives:
                # before any rank looks at them
                directories = [posixpath.basename(real_place(one)) for one in self.options.references]
                save.references = {one: state_beside(filesystem, one) for one in directories}
        return dataclasses.replace(plan, storage_data=None if self.is_of_a_run else real_place(save.place))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell the ranks whether the previous save failed; called by DCP on the coordinator. See `Orphans`.

        Raises:
            RanksDifferError: the ranks save to different places.
        """
        check_same_place(plans)
        earlier_failed, self._saves.unfinished = self._saves.unfinished, True
        return [dataclasses.replace(plan, storage_data=earlier_failed) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, or raise the first error of any thread and remove the files; called by DCP."""
        save, is_kept = self._saves.current, isinstance(planner, KeepingPlanner) and planner.is_kept
        self._remove_orphans(plan)
        planned_seconds = time.perf_counter() - save.started_seconds
        staging, engine, remembered = self._saves.staging, self._engine_choice, process_state().choices
        found = self._compared(save, plan, planner)
        part = RankSave(save.place, save.save_id, save.rank, found.items, self.options, found.hashes)
        with ProgressBar("saving", part.nbytes, enabled=self.progress and save.rank == 0) as bar:
            write = part.run if staging is None else partial(staging.write, part)
            written, totals = write(planner.resolve_data, engine=engine, remembered=remembered, progress=bar.update)
        totals.add(found.by)
        results = RankResults.of([*written, *found.shared], totals, plan if is_kept else None)
        totals.rank, totals.seconds["plan"] = save.rank, planned_seconds
        if self.options.references is not None:
            place = real_place(save.place)
            process_state().shards.note(place, found.shards(posixpath.basename(place), written))
        if staging is not None:
            staging.measure(totals)
        self._note_written(save, totals)
        if save.use_collectives:
            self._saves.orphans.wrote(save.place, save.own_files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _compared(self, save: Save, plan: SavePlan, planner: SavePlanner) -> Compared:
        """Compare this rank's part with the reference, if there is any."""
        references = self.options.references
        process_state().shards.forget(real_place(save.place))
        if references is None or not save.use_collectives:
            return Compared(plan.items)
        try:
            with contextlib.closing(self.options.open(save.place)) as filesystem:
                remembered, open_at = process_state().shards, self.options.open

                def known(keys: Sequence[ShardKey]) -> Shards:
                    return known_shards(filesystem, save.place, references, keys, remembered, open_at)

                on_device = process_state().device_hashes.hash_of if self.options.engine != "cpu" else _on_the_host
                found = compared(plan.items, planner.resolve_data, known, self.options.thread_count, on_device)
        except BaseException as error:
            if self._saves.staging is not None:
                self._saves.staging.failed(error)  # now, and not when the other ranks have written their files
            raise
        if self._saves.staging is not None and self._saves.staging.may_change:
            return dataclasses.replace(found, hashes={})  # what is encoded may be something else by then
        return found

    def _remove_orphans(self, plan: SavePlan) -> None:
        if plan.storage_data is True:
            self._saves.orphans.remove(self.options.open)

    def _note_written(self, save: Save, totals: RankTotals) -> None:
        save.own_files = tuple(totals.files)
        self.last_save = save.stats([totals])
        save.has_ended = save.use_collectives and not save.is_coordinator  # DCP calls nothing more on such a rank

    def prepare(self, plan: SavePlan) -> PreparedWrite:
        """Return this rank's part of the save that this thread has begun, to be written on any thread or process.

        It takes the place of `write_data`. Give the results of its `write` to `written` on this rank, and those of all
        ranks to `finish_prepared` on the coordinator. Any number of prepared saves may be under way. What a rank wrote
        for one that another rank failed stays until `dcp-nvcomp clean` removes it. `progress` draws nothing for it.
        """
        save = self._saves.current
        self._remove_orphans(plan)
        # a later save could not tell whether this one failed or is under way
        self._saves.unfinished = False
        return PreparedWrite(
            save,
            time.perf_counter() - save.started_seconds,
            RankSave(save.place, save.save_id, save.rank, tuple(plan.items), self.options),
            self._engine_choice,
            os.getpid(),
        )

    def written(self, prepared: PreparedWrite, results: RankResults) -> None:
        """Note what this rank has written, in `last_save` too; `results` are those of `prepared.write`."""
        self._note_written(prepared.save, results.totals)

    def finish_prepared(
        self, prepared: PreparedWrite, metadata: Metadata, results: Sequence[Sequence[WriteResult]]
    ) -> None:
        """Commit a prepared save, on the coordinator, after `written`; as `finish`, on any thread."""
        self._finish(prepared.save, metadata, results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the save; called by DCP on the coordinator (with `use_collectives=False`, on each rank).

        Raises:
            ConcurrentSaveError: `overwrite=False`, and another save was published first.
            StorageError: the checkpoint could not be published.
        """
        if self._saves.staging is not None:
            self._saves.staging.wait_for_turn()
        self._finish(self._saves.current, metadata, results)

    def _finish(self, save: Save, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        start = time.perf_counter()
        totals = [rank.totals for rank in results if isinstance(rank, RankResults)]
        metadata.version = "1.0.0"
        place(metadata, results)
        metadata.storage_meta = StorageMeta(checkpoint_id=without_secrets(save.path), save_id=save.save_id)
        with contextlib.closing(self.options.open(save.place)) as filesystem, self._saves.published():
            if save.use_collectives:
                stats = save.stats(totals)
                shared = self._marked(filesystem, save, metadata)
                summary = stats.summary(len(totals), metadata).sharing_with(shared, stats.shared_nbytes)
                last, overwrite = self._saves.last_published, self.options.overwrite
                self._publisher(
                    filesystem, FinishedSave(metadata, save.save_id, save.own_files, last, overwrite, summary)
                )
            else:
                commit_rank(filesystem, metadata, save.rank, save.own_files)
        totals.append(RankTotals(seconds={"commit": time.perf_counter() - start}))
        stats = save.stats(totals)
        stats.attach_to(metadata)
        self._report(save, stats)

    def _marked(self, filesystem: Filesystem, save: Save, metadata: Metadata) -> list[str]:
        """Mark the checkpoints whose files this one shares, and return their directories."""
        names = [name for name in data_files(metadata) if name.startswith(BESIDE)]
        try:
            leave_marks(filesystem, posixpath.basename(real_place(save.place)), names, save.save_id)
            # until the marks were there, what is shared was kept by the reference, if that is what it was
            for directory, before in save.references.items() if names else ():
                if before is not None and state_beside(filesystem, directory) != before:
                    raise CheckpointReplacedError(
                        f"The reference in {directory!r} was replaced or removed during the save: save again.",
                        path=filesystem.path,
                    )
        except CheckpointError:
            remove_files(filesystem, save.own_files, "a save that was not published")
            raise
        return shared_directories(names)

    def _report(self, save: Save, stats: SaveStats) -> None:
        """Report a published save. Nothing here may make it look as if it had failed."""
        self.last_save = stats
        save.has_ended = True
        if save.is_coordinator:
            logger.info("%s", stats)
        report_to(self.on_save, stats, done="saved", name="on_save")

    def storage_meta(self) -> StorageMeta:
        """Return place and id of the save that this thread is in, or is about to begin; called by DCP."""
        save = self._saves.announced
        return StorageMeta(checkpoint_id=without_secrets(save.path or self.path), save_id=save.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if a writer could save there; called by DCP."""
        try:
            open_filesystem(checkpoint_id)
        except (ConfigurationError, TypeError):
            return False
        return True


def _on_the_host(tensor: torch.Tensor) -> None:
    """Leave the hash of a tensor on a GPU to the host, as all else of it."""


def _places_of(reference: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    given = list(reference) if isinstance(reference, list | tuple) else [reference]
    return tuple(place_of(check_path(one)) for one in given)

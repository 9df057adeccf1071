"""`save` and `async_save`: one call instead of `dcp.save` with an `NvcompWriter`, and a plan that is kept for later.

An asynchronous save runs on a thread and process groups of its own. Tensors on a GPU are encoded there, and what they
came to is staged in segments (asynchronous/segments.py). What is in host memory is copied to shared memory
(asynchronous/staging.py). Where a process of our own does not find the storage, or training leaves no core for it, host
tensors too are encoded before the call returns: in the background that would take as much from training (measured with
2 ranks on 2 cores, docs/performance/asynchronous.md).
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.calls.ranks import Call, error_of_ranks, group_of, together
from dcp_nvcomp.calls.suggestions import storage_of
from dcp_nvcomp.calls.values import is_default_planner, leaves, try_check, try_values_of, wrapped
from dcp_nvcomp.codecs.choose import needs_gpu
from dcp_nvcomp.engines.choice import has_cuda_engine
from dcp_nvcomp.engines.cuda.streams import stream_beside
from dcp_nvcomp.errors import CheckpointError, EarlierSaveError, RanksDifferError
from dcp_nvcomp.options import check_choice, option_names
from dcp_nvcomp.saving.asynchronous.device_copies import DeviceCopies
from dcp_nvcomp.saving.asynchronous.shared_memory import is_available
from dcp_nvcomp.saving.asynchronous.staging import CopiedWrite, Staging
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.plans.planner import KeepingPlanner
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.stats import SaveStats
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.open import place_of, real_place
from dcp_nvcomp.storage.processes import is_known_elsewhere


def save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_writer: NvcompWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    on_difference: OnDifference = "warn",
    **writer_options: Any,
) -> SaveStats:
    """Save a state dict, compressed. All ranks of the process group have to call this.

    The checkpoint is that of `dcp.save` with an `NvcompWriter`. What differs: the plan is kept for later saves of
    states with the same keys, shapes, dtypes and placements, errors of this package are raised as they are, and a
    Stateful value that raises on one rank fails the save on all of them.

    Args:
        state_dict: what to save.
        checkpoint_id: path or URL of the checkpoint. Optional with a `storage_writer`.
        storage_writer: writes it; by default an `NvcompWriter` for `checkpoint_id` with `writer_options`.
        planner: plans it; by default DCP's `DefaultSavePlanner`. Plans of other classes are not kept.
        process_group: the ranks that save; by default all.
        no_dist: if True, save in this process alone.
        on_difference: what to do if ranks have different values under the same key that are not sharded, or are on
            meshes of different ranks, of which the checkpoint keeps one, or a container and a value in the same place:
            `"warn"`, once for the same keys, or `"error"`, before anything is written. Large tensors are compared by a
            sample, and with a `planner` of another class nothing is.
        **writer_options: of the `NvcompWriter` to make.

    Returns:
        Sizes and times; the same on all ranks. (`dcp.save` returns DCP's metadata.)

    Raises:
        ConfigurationError: the arguments contradict each other, or the ranks' values do and `on_difference="error"`;
            nothing was saved.
        RanksDifferError: not all ranks make this save: one did not come within the time limit of the process group, or
            calls something else, or saves to another path; nothing was saved.
        CheckpointError: the save failed. The same error on all ranks, unless several failed.
        RankFailedError: it failed on a rank with an error of another package.

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> path, state = tempfile.mkdtemp(), {"w": torch.arange(4.0)}
        >>> stats = dcp_nvcomp.save(state, path, no_dist=True)
        >>> stats.uncompressed_nbytes
        16
    """
    check_choice("on_difference", on_difference, OnDifference)
    known = option_names(NvcompWriter)
    writer = storage_of("save", NvcompWriter, storage_writer, checkpoint_id, writer_options, known)
    group = group_of(process_group, no_dist=no_dist)
    refusal = try_check("save", state_dict, alone=group is None)
    values, failure = ({}, refusal) if refusal is not None else try_values_of(state_dict)
    keeping = planner_for(planner, writer, failure, on_difference)
    keeping.agree(values, group, call_for("save", writer, checkpoint_id, planner, on_difference))
    metadata = run_save(values, checkpoint_id, writer, keeping, group)
    keeping.comparison.warn(stacklevel=2)
    stats = SaveStats.of(metadata)
    assert stats is not None
    return stats


_PLANNING = ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank")


def planner_for(
    planner: SavePlanner | None,
    writer: NvcompWriter,
    failure: CheckpointError | None = None,
    on_difference: OnDifference = "warn",
) -> KeepingPlanner:
    is_ours = type(writer) is NvcompWriter
    return KeepingPlanner(
        planner, may_keep=is_ours, failure=failure, on_difference=on_difference, derived=writer.options.derived
    )


def call_for(
    name: str,
    writer: NvcompWriter,
    checkpoint_id: str | os.PathLike[str] | None,
    planner: SavePlanner | None,
    on_difference: OnDifference,
) -> Call:
    """Return a save as the ranks compare it before it begins."""
    place = real_place(checkpoint_id or writer.path)
    if writer.is_of_a_run:
        place = posixpath.basename(place)
    terms: dict[str, Any] = {"overwrite": writer.options.overwrite, "on_difference": on_difference}
    if writer.options.derived:
        terms["derived"] = list(writer.options.derived.items())
    if is_default_planner(planner, DefaultSavePlanner):  # others may be what they are on this rank only
        usual = vars(DefaultSavePlanner())
        terms |= {name: value for name, value in vars(planner).items() if name in _PLANNING and value != usual[name]}
    return Call.of(name, place, **terms)


def run_save(
    values: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: NvcompWriter,
    planner: KeepingPlanner,
    group: dist.ProcessGroup | None,
) -> Metadata:
    failed: BaseException | None = None
    try:
        with together(group):
            metadata: Metadata = dcp_save(
                wrapped(values),
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:  # of any ranks, the same on all of them
        failed = error_of_ranks(error, group)
    if failed is not None:  # only here: that exception's text is the tracebacks of all ranks
        raise failed
    return metadata


logger = logging.getLogger(__name__)

_Wait = Literal["staged", "nothing"]


@dataclass(frozen=True)
class AsyncSave:
    """An asynchronous save under way; the fields are those of DCP's `AsyncSaveResponse`.

    Attributes:
        staging_completion: done when the state may change; has the error if staging failed on this rank.
        upload_completion: done when the checkpoint is published; its result is DCP's `Metadata`, from which
            `SaveStats.of` has sizes and times. It has the error if the save failed on any rank.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]


def async_save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_writer: NvcompWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    wait: _Wait = "staged",
    on_difference: OnDifference = "warn",
    **writer_options: Any,
) -> AsyncSave:
    """Save a state dict in the background; return when the state may change again. All ranks have to call this.

    Tensors on a GPU are copied there, if the driver has memory for it that training has never taken, and encoded while
    training goes on, until `upload_completion`; each copy goes as soon as it is encoded. Else they are encoded before
    training goes on, and only what they come to is held in host memory until it is written. Tensors in host memory are
    copied and encoded by another process, if training leaves a core for it and it finds the same storage (not
    `memory://`, nor a filesystem whose class was registered with fsspec here), else encoded at once. Collectives run
    over gloo groups made for the purpose, so those of training may be on NCCL, and never meet those of a save. The next
    save is staged while this one is still written; the one after that waits until this one is over. Checkpoints are
    published in order. Capture CUDA graphs while no save is under way, or with `capture_error_mode="thread_local"`.

    Args:
        state_dict: what to save. `state_dict()` of its Stateful values is called here.
        checkpoint_id: path or URL of the checkpoint. Optional with a `storage_writer`.
        storage_writer: writes it; by default an `NvcompWriter` for `checkpoint_id` with `writer_options`.
        planner: plans it; by default DCP's `DefaultSavePlanner`. It belongs to this save until that is staged.
        process_group: the ranks that save; by default all. The first save over a group makes groups of our own: where
            several threads save, let one thread make these first ones, in the same order on all ranks.
        no_dist: if True, save in this process alone.
        wait: `"staged"` returns when the state may change. `"nothing"` returns once the save before
            is staged: if a tensor of the state is changed before `staging_completion` is done, the checkpoint mixes old
            and new values. Python objects are those of the call in both cases: its thread pickles them.
        on_difference: what to do if ranks have different values under the same key that are not sharded, or are on
            meshes of different ranks, of which the checkpoint keeps one, or a container and a value in the same place:
            `"warn"`, once for the same keys, or `"error"`, before anything is written. Large tensors are compared by a
            sample, and with a `planner` of another class nothing is.
        **writer_options: of the `NvcompWriter` to make.

    Returns:
        The futures of the save. An error of this save is in them; the next one raises it if it was not looked at.

    Raises:
        ConfigurationError: the arguments contradict each other; nothing was saved.
        CheckpointError: the values of a `Stateful` can't be had; nothing was saved.
        EarlierSaveError: an earlier save failed, on any rank, and its future was not looked at; raised on all ranks,
            and nothing was saved. With `wait="nothing"` it is in the futures.
        RanksDifferError: not all ranks make this save: one did not come within the time limit of the process group, or
            saves to another path; nothing was saved. With `wait="nothing"` it is in the futures, but for the first
            save over a process group.

    Examples:
        >>> import tempfile, torch
        >>> from dcp_nvcomp import async_save
        >>> state = {"w": torch.arange(4.0)}
        >>> saving = async_save(state, tempfile.mkdtemp(), no_dist=True)
        >>> _ = state["w"].zero_()  # the state was staged
        >>> metadata = saving.upload_completion.result()
        >>> sorted(metadata.state_dict_metadata)
        ['w']
    """
    check_choice("wait", wait, _Wait)
    check_choice("on_difference", on_difference, OnDifference)
    known = option_names(NvcompWriter)
    writer = storage_of("async_save", NvcompWriter, storage_writer, checkpoint_id, writer_options, known)
    process_group = group_of(process_group, no_dist=no_dist)
    refusal = try_check("async_save", state_dict, alone=process_group is None)
    # if it failed, begin all the same, as the other ranks do
    values, failure = ({}, refusal) if refusal is not None else try_values_of(state_dict)
    keeping = planner_for(planner, writer, failure, on_difference)
    call = call_for("async_save", writer, checkpoint_id, planner, on_difference)
    streams = CallersStreams(values)
    if wait == "nothing":
        keeping.pickle_now(values)

    def release() -> None:
        keeping.release()
        values.clear()

    begun: Staging | None = None
    try:
        with process_state().lock:  # saves of several threads, one after the other
            sequence = process_state().sequence(process_group, call)
            sequence.wait_for_room()
            staging = begun = Staging(
                process_state().stores,
                release,
                sequence.last,
                _copied_write(writer, checkpoint_id),
                DeviceCopies(process_state().device_memory) if has_cuda_engine(writer.options.engine) else None,
                is_waited_for=wait == "staged",
            )
            keeping.pickles_by(staging.on_caller)
            staging.place = place_of(checkpoint_id or writer.path)
            staging.within_seconds = writer.options.finish_within_seconds

            def save(group: dist.ProcessGroup | None) -> Metadata:
                with streams.followed(), writer.staged_by(staging):
                    keeping.agree(values, group, call)
                    # with a reference, what is to be copied is known only after the shards were compared
                    if keeping.kept_items is not None and writer.options.references is None:
                        staging.copy_early(
                            keeping.kept_items, keeping.resolve_data, writer.options.staging_budget_nbytes
                        )
                    metadata = run_save(values, checkpoint_id, writer, keeping, group)
                try:
                    keeping.comparison.warn(stacklevel=1)
                except RuntimeWarning as warning:  # made an error by a filter: but the save is there
                    logger.warning("%s", warning)
                return metadata

            upload = sequence.begin(save, staging, call)
        if failure is not None:
            upload.wait()
        error = staging.wait() if wait == "staged" and failure is None else None
    except BaseException as interrupt:
        if begun is not None:
            begun.interrupted(interrupt)
        raise
    if failure is not None:
        upload.was_looked_at = True
        raise failure
    if isinstance(error, EarlierSaveError | RanksDifferError):
        upload.was_looked_at = True
        raise error
    staging.returned()
    return AsyncSave(staging.completion, upload)


def end_sequence(process_group: dist.ProcessGroup) -> None:
    """Wait for the asynchronous saves over a process group, and give up the groups that they used."""
    with process_state().lock:
        process_state().end_sequence(process_group)


def _copied_write(writer: NvcompWriter, checkpoint_id: str | os.PathLike[str] | None) -> CopiedWrite | None:
    """Return what copies the state; None if it is to be encoded while the caller waits."""
    if needs_gpu(writer.options.chooser) or not is_available():
        return None
    if not is_known_elsewhere(checkpoint_id or writer.path) or not has_spare_core():
        return None
    return CopiedWrite(process_state().shared, process_state().stores.budget, process_state().background)


def has_spare_core() -> bool:
    """True if each rank of this host has a core beside those on which it trains."""
    threads = 1 if torch.cuda.is_available() else torch.get_num_threads()
    return spare_core_count(len(os.sched_getaffinity(0)), _local_rank_count(), threads=threads) > 0


def spare_core_count(cores: int, ranks: int, *, threads: int) -> int:
    return cores // ranks - threads


def _local_rank_count() -> int:
    """Return how many ranks this host has: as torchrun says, else all of them, as where they are is not known."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local):
        return int(local)
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class CallersStreams:
    """What the caller has queued on the devices of a state by now. To be made on the caller's thread."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._current: int | None = None
        self._events: dict[torch.device, torch.cuda.Event] = {}
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        self._current = torch.cuda.current_device()
        tensors = (value for value in leaves(state_dict) if isinstance(value, torch.Tensor))
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        for device in devices | {torch.device("cuda", self._current)}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events[device] = event

    @contextmanager
    def followed(self) -> Iterator[None]:
        """On another thread: make streams current that wait for what the caller had queued."""
        with ExitStack() as stack:
            if self._current is not None:
                torch.cuda.set_device(self._current)
            for device, event in self._events.items():
                stack.enter_context(stream_beside(device, event))
            if self._current is not None:  # the last stream's device became the current one
                stack.enter_context(torch.cuda.device(self._current))
            yield

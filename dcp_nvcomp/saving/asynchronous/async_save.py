"""async_save: the caller waits until its state is staged; it is written and committed behind.

caller's thread                    the save's thread                       behind
Stateful.state_dict()
event on its CUDA streams
begin (the first: make groups) --> agree: is it the same save everywhere?
wait, and pickle objects ...
                                   agree: do all keep a plan for it?
returns <----------- staged --------   then copy, if it is to be copied
                                   dcp.save, over a group of its own:
                                     plan
                                     write_data: encode, or copy
returns <----------- staged --------                                     write; of a copy, a process encodes and writes
training goes on                     gather results, wait for the save before, commit

Staged is what is encoded, in segments (segments.py), or what is copied, in shared memory (copied_write.py).
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_nvcomp.calls.ranks import group_of
from dcp_nvcomp.calls.values import try_check, try_values_of
from dcp_nvcomp.codecs.choose import needs_gpu, parse_codec
from dcp_nvcomp.errors import EarlierSaveError, RanksDifferError
from dcp_nvcomp.options import check_choice
from dcp_nvcomp.saving.asynchronous.copied_write import CopiedWrite
from dcp_nvcomp.saving.asynchronous.cores import has_spare_core
from dcp_nvcomp.saving.asynchronous.shared_memory import is_available
from dcp_nvcomp.saving.asynchronous.staging import Staging
from dcp_nvcomp.saving.asynchronous.streams import CallersStreams
from dcp_nvcomp.saving.kept import process_state
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.run_save import call_for, planner_for, run_save, writer_for
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.processes import is_known_elsewhere

logger = logging.getLogger(__name__)

_Wait = Literal["staged", "nothing"]


@dataclass(frozen=True)
class AsyncSave:
    """An asynchronous save under way; the fields are those of DCP's `AsyncSaveResponse`.

    Attributes:
        staging_completion: done when the state may change; has the error if staging failed on this rank.
        upload_completion: done when the checkpoint is published; its result is DCP's `Metadata`, from which
            `SaveStats.of` tells sizes and times. It has the error if the save failed on any rank.
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

    Tensors on a GPU are encoded there, and only what they come to is held in host memory until it is written. Tensors
    in host memory are copied and encoded by another process, if training leaves a core for it, else encoded at once;
    see `staging` of `NvcompWriter`. Collectives run over gloo groups made for the purpose, so those of training may be
    on NCCL, and never meet those of a save. The next save is staged while this one is still written; the one after that
    waits until this one is over. Checkpoints are published in order.

    Args:
        state_dict: what to save. `state_dict()` of its Stateful values is called here.
        checkpoint_id: path or URL of the checkpoint. Optional with a `storage_writer`.
        storage_writer: writes it; by default an `NvcompWriter` for `checkpoint_id` with `writer_options`.
        planner: plans it; by default DCP's `DefaultSavePlanner`. It belongs to this save until that is staged.
        process_group: the ranks that save; by default all. The first save over a group makes groups of our own: where
            several threads save, let one thread make these first ones, in the same order on all ranks.
        no_dist: if True, save in this process alone.
        wait: `"staged"` returns when the state may change. `"nothing"` returns at once: whoever changes a tensor of the
            state before `staging_completion` is done gets a checkpoint that mixes old and new values. Python objects
            are those of the call in both cases: its thread pickles them.
        on_difference: what to do if ranks have different values under the same key that are not sharded, of which the
            checkpoint keeps one: `"warn"`, once for the same keys, or `"error"`, before anything is written. Large
            tensors are compared by a sample, and with a `planner` of another class nothing is.
        **writer_options: of the `NvcompWriter` to make.

    Returns:
        The futures of the save. An error of this save is in them, and is raised by the next one if nobody looked.

    Raises:
        ConfigurationError: the arguments contradict each other; nothing was saved.
        EarlierSaveError: an earlier save failed and nobody looked at its future, on any rank; raised on all ranks, and
            nothing was saved. With `wait="nothing"` it is in the futures.
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
    writer = writer_for("async_save", storage_writer, checkpoint_id, writer_options)
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
                is_waited_for=wait == "staged",
            )
            keeping.pickles_by(staging.on_caller)
            staging.within_seconds = writer.finish_within_seconds

            def save(group: dist.ProcessGroup | None) -> Metadata:
                with streams.followed(), writer.staged_by(staging):
                    keeping.agree(values, group, call)
                    if keeping.kept_items is not None:
                        staging.copy_early(keeping.kept_items, keeping.resolve_data, writer.staging_budget_nbytes)
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
    if writer.staging == "encode" or not is_available() or needs_gpu(parse_codec(writer.codec)):
        return None
    by_process = writer.background == "process" or (
        writer.background == "auto" and is_known_elsewhere(checkpoint_id or writer.path)
    )
    if writer.staging == "auto" and not (by_process and has_spare_core()):
        return None
    return CopiedWrite(
        process_state().shared, process_state().stores.budget, process_state().background if by_process else None
    )

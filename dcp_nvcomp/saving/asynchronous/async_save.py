"""async_save: the caller waits until its state is staged; it is written and committed behind.

caller's thread                    the save's thread                       encode threads    write threads
Stateful.state_dict()
event on its CUDA streams
begin ---------------------------> agree: is it the same save everywhere?
wait ...                           dcp.save, over a group of its own:
                                     plan
                                     write_data: resolve, records -------> encode ---------> (wait)
returns <----------- staged ---------------------------------------------- the last block
training goes on                                                                             write
                                     gather results, wait for the save before, commit
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, EarlierSaveError
from dcp_nvcomp.options import check_choice
from dcp_nvcomp.saving.asynchronous.kept import kept
from dcp_nvcomp.saving.asynchronous.planner import ReleasingPlanner, wrapped
from dcp_nvcomp.saving.asynchronous.staging import Staging
from dcp_nvcomp.saving.asynchronous.streams import CallersStreams
from dcp_nvcomp.saving.writer import NvcompWriter

__all__ = ["AsyncSave", "async_save"]

_WAITS = ("staged", "nothing")
# isinstance of the protocol Stateful takes 34 us, and none of these is one
_PLAIN = (torch.Tensor, dict, list, tuple, int, float, str, bytes, type(None))


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
    wait: str = "staged",
    **writer_options: Any,
) -> AsyncSave:
    """Save a state dict in the background; return when the state may change again.

    Unlike `dcp.async_save`, it does not copy the state first. Tensors are encoded where they are, and only what they
    come to is held in memory until it is written. Collectives run over gloo groups made for the purpose, so those of
    training may be on NCCL, and never meet those of a save. The next save is staged while this one is still written;
    the one after that waits until this one is over. Checkpoints are published in order.

    Args:
        state_dict: what to save. `state_dict()` of its Stateful values is called here.
        checkpoint_id: path or URL of the checkpoint. Optional with a `storage_writer`.
        storage_writer: writes it; by default an `NvcompWriter` for `checkpoint_id` with `writer_options`.
        planner: plans it; by default DCP's `DefaultSavePlanner`. It belongs to this save until that is staged.
        process_group: the ranks that save; by default all.
        no_dist: if True, save in this process alone.
        wait: `"staged"` returns when the state may change. `"nothing"` returns at once: whoever changes a tensor of the
            state before `staging_completion` is done gets a checkpoint that mixes old and new values.
        **writer_options: of the `NvcompWriter` to make.

    Returns:
        The futures of the save. An error of this save is in them, and is raised by the next one if nobody looked.

    Raises:
        ConfigurationError: the arguments contradict each other; nothing was saved.
        EarlierSaveError: an earlier save failed and nobody looked at its future, on any rank; raised on all ranks, and
            nothing was saved. With `wait="nothing"` it is in the futures.

    Example:
        >>> import tempfile, torch
        >>> from dcp_nvcomp import async_save
        >>> state = {"w": torch.arange(4.0)}
        >>> saving = async_save(state, tempfile.mkdtemp(), no_dist=True)
        >>> _ = state["w"].zero_()  # the state was staged
        >>> metadata = saving.upload_completion.result()
        >>> sorted(metadata.state_dict_metadata)
        ['w']
    """
    check_choice("wait", wait, _WAITS)
    writer = _writer(storage_writer, checkpoint_id, writer_options)
    live = {key: value.state_dict() if _is_stateful(value) else value for key, value in state_dict.items()}
    is_distributed = not no_dist and dist.is_available() and dist.is_initialized()
    releasing = ReleasingPlanner(planner or DefaultSavePlanner())
    streams = CallersStreams(live)

    def release() -> None:
        releasing.release()
        live.clear()

    with kept().lock:  # saves of several threads, one after the other
        sequence = kept().sequence((process_group or dist.group.WORLD) if is_distributed else None)
        sequence.wait_for_room()
        staging = Staging(kept().stores, release, sequence.last)

        def save(group: dist.ProcessGroup | None) -> Metadata:
            with streams.followed(), writer.staged_by(staging):
                return _save(wrapped(live), checkpoint_id, writer, releasing, group)

        upload = sequence.begin(save, staging)
    if wait == "staged":
        error = staging.wait()
        if isinstance(error, EarlierSaveError):
            upload.was_looked_at = True
            raise error
    staging.returned()
    return AsyncSave(staging.completion, upload)


def _writer(
    writer: NvcompWriter | None, checkpoint_id: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> NvcompWriter:
    if writer is None:
        if checkpoint_id is None:
            raise ConfigurationError("async_save needs a checkpoint_id or a storage_writer.")
        return NvcompWriter(checkpoint_id, **options)
    if not isinstance(writer, NvcompWriter):
        raise ConfigurationError(
            f"async_save needs an NvcompWriter, not a {type(writer).__name__}: use dcp.async_save with other writers."
        )
    if options:
        raise ConfigurationError(f"Give {', '.join(sorted(options))} to the writer: there is a storage_writer.")
    return writer


def _is_stateful(value: Any) -> bool:
    return type(value) not in _PLAIN and not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def _save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: NvcompWriter,
    planner: SavePlanner,
    group: dist.ProcessGroup | None,
) -> Metadata:
    try:
        metadata: Metadata = dcp_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
        return metadata
    except CheckpointException as error:  # of any ranks, the same on all of them
        own = 0 if group is None else dist.get_rank(group)
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        ours = failures.get(own, next(iter(failures.values()), None))
        if isinstance(ours, CheckpointError):
            raise ours from error
        raise

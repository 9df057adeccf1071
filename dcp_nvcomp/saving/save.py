"""Save by one call instead of `dcp.save` with an `NvcompWriter`, and with a plan that is kept from save to save."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.calls.ranks import Call, error_of_ranks, group_of, together
from dcp_nvcomp.calls.unknown_options import refuse_path
from dcp_nvcomp.calls.values import check_given_storage, is_default_planner, try_check, try_values_of, wrapped
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.options import check_choice, option_names
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.plans.global_plan import PlannedMetadata
from dcp_nvcomp.saving.plans.planner import KeepingPlanner
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.open import real_place


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
) -> Metadata:
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
        on_difference: what to do if ranks have different values under the same key that are not sharded, of which the
            checkpoint keeps one: `"warn"`, once for the same keys, or `"error"`, before anything is written. Large
            tensors are compared by a sample, and with a `planner` of another class nothing is.
        **writer_options: of the `NvcompWriter` to make.

    Returns:
        DCP's metadata; `SaveStats.of` has sizes and times of it. Where the plan is kept, it describes the tensors
        on the coordinator only.

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
        >>> metadata = dcp_nvcomp.save(state, path, no_dist=True)
        >>> sorted(metadata.state_dict_metadata)
        ['w']
    """
    check_choice("on_difference", on_difference, OnDifference)
    writer = writer_for("save", storage_writer, checkpoint_id, writer_options)
    group = group_of(process_group, no_dist=no_dist)
    refusal = try_check("save", state_dict, alone=group is None)
    values, failure = ({}, refusal) if refusal is not None else try_values_of(state_dict)
    keeping = planner_for(planner, writer, failure, on_difference)
    keeping.agree(values, group, call_for("save", writer, checkpoint_id, planner, on_difference))
    metadata = run_save(values, checkpoint_id, writer, keeping, group)
    keeping.comparison.warn(stacklevel=2)
    return metadata


_PLANNING = ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank")


def writer_for(
    call: str, writer: NvcompWriter | None, checkpoint_id: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> NvcompWriter:
    """Return the writer that was given, or one made from the options."""
    if writer is not None:
        check_given_storage(call, writer, NvcompWriter, "writer", options)
        return writer
    refuse_path(options, option_names(NvcompWriter))
    if checkpoint_id is None:
        raise ConfigurationError(f"{call} needs a checkpoint_id or a storage_writer.")
    return NvcompWriter(checkpoint_id, **options)


def planner_for(
    planner: SavePlanner | None,
    writer: NvcompWriter,
    failure: CheckpointError | None = None,
    on_difference: OnDifference = "warn",
) -> KeepingPlanner:
    """Return the planner of one save."""
    is_ours = type(writer) is NvcompWriter
    return KeepingPlanner(planner, may_keep=is_ours, failure=failure, on_difference=on_difference)


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
    """Save."""
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
    return metadata.plain() if isinstance(metadata, PlannedMetadata) else metadata

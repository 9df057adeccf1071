"""save: one call instead of `dcp.save` with an `NvcompWriter`, and a plan that is kept from save to save."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_nvcomp.calls.ranks import group_of
from dcp_nvcomp.calls.values import try_check, try_values_of
from dcp_nvcomp.options import check_choice
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.run_save import call_for, planner_for, run_save, writer_for
from dcp_nvcomp.saving.writer import NvcompWriter


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
        DCP's metadata; `SaveStats.of` tells sizes and times from it. Where the plan is kept, it describes the tensors
        on the coordinator only.

    Raises:
        ConfigurationError: the arguments contradict each other, or the ranks' values do and `on_difference="error"`;
            nothing was saved.
        RanksDifferError: not all ranks make this save: one did not come within the time limit of the process group, or
            calls something else, or saves to another path; nothing was saved.
        CheckpointError: the save failed. The same error on all ranks, unless several failed.
        RankFailedError: it failed on a rank with an error that is none of this package.

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

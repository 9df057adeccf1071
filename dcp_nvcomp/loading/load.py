"""load: one call instead of `dcp.load` with an `NvcompReader`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from dcp_nvcomp.calls.ranks import error_of_ranks, group_of
from dcp_nvcomp.calls.values import is_stateful, try_values_of, wrapped
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.loading.planner import planner_for
from dcp_nvcomp.loading.reader import NvcompReader

__all__ = ["load"]


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: NvcompReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **reader_options: Any,
) -> None:
    """Load a checkpoint into a state dict: of this package, or of stock DCP.

    What `dcp.load` with an `NvcompReader` does. What differs: errors of this package are raised as they are, and a
    Stateful value that raises on one rank fails the load on all of them.

    Args:
        state_dict: what to load into. Tensors are filled where they are, other values are replaced, and Stateful values
            get theirs by `load_state_dict`.
        checkpoint_id: path or URL of the checkpoint. Optional with a `storage_reader`.
        storage_reader: reads it; by default an `NvcompReader` for `checkpoint_id` with `reader_options`.
        planner: plans it; by default as DCP's `DefaultLoadPlanner` does.
        process_group: the ranks that load; by default all.
        no_dist: if True, load in this process alone.
        **reader_options: of the `NvcompReader` to make.

    Raises:
        ConfigurationError: the arguments contradict each other; nothing was loaded.
        CheckpointError: the load failed; the contents of the tensors may be undefined. The same error on all ranks,
            unless several failed.
        RankFailedError: it failed on a rank with an error that is none of this package.

    Example:
        >>> import tempfile, torch, dcp_nvcomp
        >>> path, state = tempfile.mkdtemp(), {"w": torch.arange(4.0)}
        >>> _ = dcp_nvcomp.save(state, path, no_dist=True)
        >>> state["w"].zero_()
        tensor([0., 0., 0., 0.])
        >>> dcp_nvcomp.load(state, path, no_dist=True)
        >>> state["w"]
        tensor([0., 1., 2., 3.])
    """
    reader = _reader(storage_reader, checkpoint_id, reader_options)
    group = group_of(process_group, no_dist=no_dist)
    # sorted, so that all ranks load in the same order
    values, failure = try_values_of({key: state_dict[key] for key in sorted(state_dict)})
    try:
        dcp_load(
            wrapped(values),
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=planner_for(planner, failure),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # of any ranks, the same on all of them
        raise error_of_ranks(error, group) from error
    for key, value in values.items():
        if is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(value)
        else:
            state_dict[key] = value


def _reader(
    reader: NvcompReader | None, checkpoint_id: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> NvcompReader:
    if reader is None:
        if checkpoint_id is None:
            raise ConfigurationError("load needs a checkpoint_id or a storage_reader.")
        return NvcompReader(checkpoint_id, **options)
    if not isinstance(reader, NvcompReader):
        raise ConfigurationError(
            f"load needs an NvcompReader, not a {type(reader).__name__}: use dcp.load with other readers."
        )
    if options:
        raise ConfigurationError(f"Give {', '.join(sorted(options))} to the reader: there is a storage_reader.")
    return reader

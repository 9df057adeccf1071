"""load: one call instead of `dcp.load` with an `NvcompReader`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_nvcomp.calls.ranks import Call, error_of_ranks, global_ranks, group_of, meet, together
from dcp_nvcomp.calls.suggestions import storage_of
from dcp_nvcomp.calls.values import (
    check_given,
    expects_checkpoint,
    given_back,
    has_stateful,
    is_default_planner,
    is_stateful,
    try_check,
    try_values_of,
    wrapped,
)
from dcp_nvcomp.errors import CheckpointError, RankFailedError
from dcp_nvcomp.format.metadata.paths import saved_entries
from dcp_nvcomp.loading.local_plans import LocalPlanner
from dcp_nvcomp.loading.planner import planner_for
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.loading.sharing.replicas import ExchangePolicy, Replicas, replicas_of
from dcp_nvcomp.options import DtypePolicy, check_choice, option_names
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.open import real_place

logger = logging.getLogger(__name__)


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: NvcompReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    dtype: DtypePolicy = "same",
    exchange: ExchangePolicy = "auto",
    **reader_options: Any,
) -> None:
    """Load a checkpoint into a state dict: of this package, or of stock DCP. All ranks of the process group call this.

    What `dcp.load` with an `NvcompReader` does. What differs: errors of this package are raised as they are, a Stateful
    value whose `state_dict` raises on one rank fails the load on all of them, and dtypes have to be the saved ones.
    `load_state_dict` is called on each rank when all of them have loaded; what it raises is raised there alone.

    Args:
        state_dict: what to load into. Tensors are filled where they are, other values are replaced, and Stateful values
            get theirs by `load_state_dict`.
        checkpoint_id: path or URL of the checkpoint. Optional with a `storage_reader`.
        storage_reader: reads it; by default an `NvcompReader` for `checkpoint_id` with `reader_options`.
        planner: plans it; by default as DCP's `DefaultLoadPlanner` does.
        process_group: the ranks that load; by default all.
        no_dist: if True, load in this process alone.
        dtype: `"same"` refuses a tensor of another dtype than the saved one, `"cast"` converts. A planner of another
            class than DCP's default one decides itself, as with `NvcompReader`, which warns.
        exchange: of what several ranks want alike, as replicas of HSDP and DDP do, each can read a part and send it to
            the others as it was stored. `"auto"` measures the first reads and does so if it takes less time,
            `"always"` does it without, `"never"` lets each rank read for itself. It needs gloo for host memory in the
            process group (`"gloo"`, or `"cpu:gloo,cuda:nccl"`), and the same value on all ranks; otherwise each reads.
        **reader_options: of the `NvcompReader` to make.

    Raises:
        ConfigurationError: the arguments contradict each other, or nothing can be loaded into a tensor; nothing was.
        RanksDifferError: not all ranks call this within the time limit of the process group; nothing was loaded.
        MissingKeyError: the checkpoint has no such key; nothing was loaded.
        ShapeMismatchError: a tensor has another shape, or an object was saved; nothing was loaded.
        DtypeMismatchError: a tensor has another dtype; nothing was loaded.
        CheckpointError: the load failed; the contents of the tensors may be undefined. The same error on all ranks,
            unless several failed.
        RankFailedError: it failed on a rank with an error of another package.

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> path, state = tempfile.mkdtemp(), {"w": torch.arange(4.0)}
        >>> _ = dcp_nvcomp.save(state, path, no_dist=True)
        >>> state["w"].zero_()
        tensor([0., 0., 0., 0.])
        >>> dcp_nvcomp.load(state, path, no_dist=True)
        >>> state["w"]
        tensor([0., 1., 2., 3.])
    """
    check_choice("dtype", dtype, DtypePolicy)
    check_choice("exchange", exchange, ExchangePolicy)
    known = option_names(NvcompReader)
    reader = storage_of("load", NvcompReader, storage_reader, checkpoint_id, reader_options, known)
    if checkpoint_id:
        reader.reset(checkpoint_id)
    group = group_of(process_group, no_dist=no_dist)
    where = without_secrets(os.fspath(checkpoint_id)) if checkpoint_id else reader.checkpoint_id
    failure: CheckpointError | None = try_check("load", state_dict, alone=group is None)
    # not that the places are the same: nodes may mount one elsewhere, and whether the ranks saw one save is compared
    place = real_place(checkpoint_id or reader.path)
    stays = (planner is None or is_default_planner(planner, DefaultLoadPlanner)) and not reader.looks_at_plans
    told = meet(group, Call("load", repr(where)), (place, reader.reads_alone, stays, exchange))
    all_alike = {(one, alone) for one, alone, *_ in told} == {(place, False)}
    replicas = replicas_of(group, [policy for *_, policy in told]) if all_alike else None
    with (
        _shared_metadata(reader, group, all_alike=all_alike),
        _sharing(reader, replicas),
        _announced({} if failure is not None else state_dict, reader),
    ):
        values: dict[str, Any] = {}
        if failure is None:
            # sorted, so that all ranks load in the same order
            objects = _saved_objects(reader) if any(_has_some_below(value) for value in state_dict.values()) else ()
            values, failure = try_values_of({key: state_dict[key] for key in sorted(state_dict)}, objects)
        whole = [key for key, value in state_dict.items() if expects_checkpoint(value)] if values else []
        chosen = planner_for(planner, may_cast=dtype == "cast", may_leave=whole)
        planning = LocalPlanner(chosen, failure, stays=all(one for _, _, one, _ in told), replicas=replicas)
        failed: BaseException | None = None
        try:
            with together(group):
                dcp_load(
                    wrapped(values),
                    checkpoint_id=checkpoint_id,
                    storage_reader=cast(StorageReader, _Reading(reader, planning)),
                    planner=cast(LoadPlanner, planning),
                    process_group=group,
                    no_dist=group is None,
                )
        except CheckpointException as error:  # of any ranks, the same on all of them
            failed = error_of_ranks(error, group)
        except RankFailedError:
            if replicas is not None:
                replicas.close_connections()
                replicas.raise_failure()
            raise
        if failed is not None:  # only here: that exception's text is the tracebacks of all ranks
            if isinstance(failed, CheckpointError):
                failed.path = failed.path or where
            raise failed
        # before anything that may fail on one rank alone
        placed = [] if planning.unplaced is None else meet(group, Call("load", repr(where)), planning.placed())
        is_first = group is None or dist.get_rank(group) == 0
        for key, value in values.items():
            check_given(state_dict[key], value, key)
        for key, value in values.items():
            try:
                state_dict[key] = given_back(state_dict[key], value)
            except CheckpointError as error:
                error.fqn, error.path = f"{key}.{error.fqn}" if error.fqn else key, error.path or where
                raise
        # once, by the first rank; where a filter makes an error of the warning, all ranks raise it
        with nullcontext() if is_first else warnings.catch_warnings(record=True):
            planning.warn_of_unplaced(placed)


def _has_some_below(value: Any) -> bool:
    try:
        return isinstance(value, Mapping | list) and not is_stateful(value) and has_stateful(value)
    except Exception:  # `try_values_of` reports it, to the other ranks too
        return False


def _saved_objects(reader: NvcompReader) -> set[str]:
    # the load itself meets the same error, and reports it to all ranks
    with suppress(Exception):
        items = reader.read_metadata().state_dict_metadata.items()
        return {fqn for fqn, item in items if not isinstance(item, TensorStorageMetadata)}
    return set()


@contextmanager
def _shared_metadata(reader: NvcompReader, group: dist.ProcessGroup | None, *, all_alike: bool) -> Iterator[None]:
    """Have a reader use, for one load, the metadata that the first rank reads for all.

    This is done for saves of this package only, whose data files have names of their own: a rank that finds another
    checkpoint at this place, as on disks that nodes do not share, then finds none of them. Where the metadata can't be
    read, and for checkpoints of stock DCP, each rank reads for itself, and reports what it meets there. `all_alike`
    says whether all ranks read the same file; it is the same on all of them.
    """
    if group is None or not all_alike or dist.get_world_size(group) == 1:
        yield
        return
    reader.given_metadata = _received_metadata(reader, group)
    try:
        yield
    finally:
        reader.given_metadata = None


def _received_metadata(reader: NvcompReader, group: dist.ProcessGroup) -> Metadata | None:
    root, sent = None, list[bytes | None]([None])
    if dist.get_rank(group) == 0:
        try:
            root = reader.read_root()
        except Exception as error:  # the load meets it again, and reports it
            logger.debug("`.metadata` is not shared: %s", error)
        if root is not None and root.own_save_id is not None:
            sent = [root.data]
    with together(group):
        dist.broadcast_object_list(sent, src=global_ranks(group)[0], group=group)
    if sent[0] is None:
        return None
    if root is not None:
        return root.metadata
    try:
        return reader.parsed(sent[0])
    except Exception as error:  # likewise
        logger.debug("The shared `.metadata` is not used: %s", error)
        return None


@contextmanager
def _announced(state_dict: Mapping[str, Any], reader: NvcompReader) -> Iterator[None]:
    """Tell the values that want to know what the checkpoint has, until the load is over, however it ends."""
    waiting = {key: value for key, value in state_dict.items() if expects_checkpoint(value)}
    try:
        if waiting:
            # the load itself meets the same error, and reports it to all ranks
            with suppress(Exception):
                for key, entries in saved_entries(reader.read_metadata(), waiting).items():
                    waiting[key].expect(entries)
        yield
    finally:
        for value in waiting.values():
            value.expect(None)


@contextmanager
def _sharing(reader: NvcompReader, replicas: Replicas | None) -> Iterator[None]:
    """Have a reader share reads with replicas, for one load."""
    reader.replicas = replicas
    try:
        yield
    finally:
        reader.replicas = None


class _Reading:
    """A reader that hands a failure to read the metadata to the planner, as DCP would log it and go on.

    Ranks that wait for this one, to compare what they read, do not wait in vain where its reading fails before that.
    """

    def __init__(self, reader: NvcompReader, planner: LocalPlanner) -> None:
        self._reader, self._planner = reader, planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        replicas = self._reader.replicas
        with nullcontext() if replicas is None else replicas.expected(is_last=True):
            return self._reader.read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return self._reader.read_metadata(*args, **kwargs)
        except CheckpointError as error:
            self._planner.failure = self._planner.failure or error
            return Metadata({}, storage_data={})

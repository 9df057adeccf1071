"""How a run's save begins: whether the fast tier has room for it, who writes and publishes it, who follows it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.runs.background.pipeline import Pipeline
from dcp_nvcomp.runs.events import StepSkipped
from dcp_nvcomp.runs.options import ForwardedOptions, RunContext
from dcp_nvcomp.runs.replicas import Replica
from dcp_nvcomp.runs.step_save import NodePublisher, StepPublisher, StepSave
from dcp_nvcomp.saving.asynchronous.staging import UploadFuture
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.save import AsyncSave, async_save
from dcp_nvcomp.saving.writer import NvcompWriter

logger = logging.getLogger(__name__)

_SPARE = 1.1  # the next step may be a little larger than the last


class SaveStarter:
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        run: RunContext,
        pipeline: Pipeline,
        options: ForwardedOptions,
        on_difference: OnDifference,
        *,
        warns: bool,
    ) -> None:
        self._group, self._run, self._pipeline, self._options = group, run, pipeline, options
        self._fast, self._durable = run.fast, run.durable
        self._on_difference, self._warns = on_difference, warns

    def has_room(self, values: Mapping[str, Any]) -> bool:
        """Return whether the next step and copies fit this node's fast tier; one rank of it looks, and makes room."""
        if self._fast is None or not self._run.nodes.is_leader:
            return True
        expected = self._pipeline.fast_nbytes
        if not expected:
            here = len(self._run.nodes.ranks_of(self._run.nodes.own))
            expected = state_nbytes(values) * here * (1 + self._run.copies)
        try:
            self._fast.check_writable()
            return self._pipeline.make_room(_SPARE * expected)
        except CheckpointError as error:
            logger.warning("The fast tier is out of order: %s", error)
            return False

    def to_fast(self, save: StepSave, values: dict[str, Any], replica: Replica | None, *, upload: bool) -> None:
        assert self._fast is not None
        path, durable_path = self._fast.path_of(save.step), self._durable.path_of(save.step)
        publisher = NodePublisher(save.step, save.metrics, more=save.more, durable_path=durable_path, upload=upload)
        group = self._group
        replicas: tuple[tuple[int, ...], ...] = ()
        if replica is not None:
            values, group, replicas = replica.values, replica.group, replica.all
            publisher.replica_id = replica.id
        writer = self._options.fast_writer(path)
        writer.published_by(publisher)
        with self._durable.held(save.step):  # not while it is removed
            with contextlib.suppress(StorageError):  # the writer fails for the same, on all ranks
                self._fast.make_directory(save.step)
            saving = self._begin(save, values, writer, group)
            self._pipeline.follow_fast(save, saving, publisher, upload=upload, replicas=replicas)

    def to_durable(self, save: StepSave, values: dict[str, Any]) -> None:
        if self._fast is not None:
            self._tell_of_lack_of_room(save)
        writer = self._options.durable_writer(self._durable.path_of(save.step))
        writer.published_by(StepPublisher(save.step, save.metrics, self._run.check_lease, save.more))
        with self._durable.held(save.step):
            self._pipeline.follow_direct(save, self._begin(save, values, writer, self._group))

    def _tell_of_lack_of_room(self, save: StepSave) -> None:
        if self._warns:
            self._warns = False
            logger.warning(
                "The fast tier of a node has too little room for step %d and for later ones, or is out of order: until "
                "that changes they go to the durable tier.",
                save.step,
            )
        self._run.emit(
            StepSkipped(save.step, "the fast tier has too little room, or is out of order: it goes to the durable tier")
        )

    def _begin(
        self, save: StepSave, values: dict[str, Any], writer: NvcompWriter, group: dist.ProcessGroup | None
    ) -> AsyncSave:
        saving = async_save(
            values,
            writer.path,
            storage_writer=writer,
            process_group=group,
            no_dist=group is None,
            on_difference=self._on_difference,
        )
        # what fails in the background is raised by the manager: the next save need not refuse for it
        cast(UploadFuture, saving.upload_completion).was_looked_at = True
        save.staged.set_result(None)
        return saving


def state_nbytes(values: Mapping[str, Any]) -> int:
    found, waiting = 0, list(values.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found += local.numel() * local.element_size()
    return found

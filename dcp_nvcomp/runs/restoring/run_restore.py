"""A run's restore, from what is there to what is done about it.

list all places -> candidates -> load the newest that can be loaded -> go on with uploads that were cut short
                                                                    -> what the next save leaves behind
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.abandoned import Abandoned, read_abandoned, write_abandoned
from dcp_nvcomp.runs.behind.pipeline import Pipeline
from dcp_nvcomp.runs.events import StepRestored
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.restoring.candidates import Candidate, candidates
from dcp_nvcomp.runs.restoring.nearest import NearestReader
from dcp_nvcomp.runs.restoring.restore import Restoring
from dcp_nvcomp.runs.run_time import RunTime
from dcp_nvcomp.runs.step_save import StepSave
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier, HeldStep
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.saving.commit import WrittenSave
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)


class RunRestore:
    """How a manager restores."""

    def __init__(
        self,
        ranks: Ranks,
        nodes: Nodes,
        fast: FastTier | None,
        durable: DurableTier,
        pipeline: Pipeline,
        *,
        load_options: Mapping[str, Any],
        reader_options: Mapping[str, Any],
        run_time: RunTime,
    ) -> None:
        self._ranks, self._nodes, self._fast, self._durable, self._pipeline = ranks, nodes, fast, durable, pipeline
        self._load_options, self._reader_options = load_options, reader_options
        self._run_time = run_time
        self._to_abandon: Abandoned | None = None
        self._damaged: frozenset[int] = frozenset()

    def restore(
        self,
        state: dict[str, Any],
        step: int | None,
        *,
        fallback: bool,
        is_due: Callable[[int], bool],
        new_save: Callable[[int, Mapping[str, float]], StepSave],
    ) -> StepRestored | None:
        """Restore a step; all ranks call this."""
        self._pipeline.wait()  # what is being saved may be what is to be loaded, and nothing is removed meanwhile
        found = self._candidates()
        wanted = [one for one in found if (not one.is_abandoned if step is None else one.step == step)]
        if step is not None and not wanted:
            raise CheckpointNotFoundError(
                f"There is no complete checkpoint of step {step}.", path=without_secrets(self._durable.path_of(step))
            )
        if not wanted:
            return None
        loading = Restoring(
            self._ranks,
            self._nodes,
            self._fast,
            self._pipeline.room,
            self._load_options,
            lambda number: NearestReader(self._durable.path_of(number), **self._reader_options),
        )
        room = self._pipeline.room
        if room is not None:
            room.looked([one.step for one in found if one.has_durable or one.is_complete_on_nodes])
        event, restored = loading.newest(state, wanted, fallback=fallback and step is None)
        if room is not None:
            # not newer ones, which turned out damaged, or are left behind
            durable = [one.step for one in found if one.is_safe and one.step <= event.step]
            room.restored(max(durable, default=-1))
        self._run_time.go_on_from(restored.run_seconds)
        self._plan_to_abandon(event, found)
        ours = [one for one in found if not one.is_abandoned and one.step < event.step]
        ours = [restored, *ours] if not restored.is_abandoned else ours  # without the copies that are damaged
        self._go_on_with_uploads(ours, is_due, new_save)
        return event

    def _candidates(self) -> list[Candidate]:
        """Return what could be restored, the same on all ranks."""
        listed = self._ranks.on_one(self._durable.list)
        abandoned = self._ranks.on_one(lambda: read_abandoned(self._durable.open_own()))
        mine: list[HeldStep] = []
        if self._fast is not None and self._nodes.is_leader:
            try:
                mine = self._fast.held()
            except CheckpointError as error:  # copies are for that
                logger.warning("What the fast tier holds can't be read, so it counts as nothing: %s", error)
        self._damaged = abandoned.damaged
        on_nodes = [(self._nodes.node_of(rank), steps) for rank, steps in enumerate(self._ranks.gather(mine)) if steps]
        if self._ranks.is_first:
            for step, problem in listed.misnamed.items():
                logger.warning("%s is passed over: %s", without_secrets(self._durable.path_of(step)), problem)
        durable = [*listed.complete, *listed.abandoned, *listed.damaged]
        return candidates(durable, on_nodes, abandoned, listed.damaged)

    def _plan_to_abandon(self, restored: StepRestored, found: Sequence[Candidate]) -> None:
        """Plan what the next save leaves behind: what is newer than the step that was restored, damaged or not."""
        before = _save_ids(one for one in found if one.is_abandoned and one.step != restored.step)
        newer = _save_ids(one for one in found if one.step > restored.step)
        is_back = any(one.is_abandoned and one.step == restored.step for one in found)
        damaged = (self._damaged | set(restored.damaged)) & {*before, *newer}
        changes = is_back or bool(newer.keys() - before.keys())
        self._to_abandon = Abandoned({**before, **newer}, frozenset(damaged)) if changes else None

    def go_back(self) -> None:
        """Leave behind what is newer than a step that was asked for and restored; called before each save."""
        abandoned = self._to_abandon
        if abandoned is not None:
            self._ranks.on_one(lambda: write_abandoned(self._durable.open_own(), abandoned))
            self._pipeline.go_back(abandoned)
            self._to_abandon = None  # only now: if writing it failed, the next save does it

    def _go_on_with_uploads(
        self,
        found: Sequence[Candidate],
        is_due: Callable[[int], bool],
        new_save: Callable[[int, Mapping[str, float]], StepSave],
    ) -> None:
        """Upload what is complete in the fast tier and was on its way when an earlier job ended; forget the rest."""
        if self._fast is None:
            return
        complete = [one for one in found if one.is_complete_on_nodes]
        self._pipeline.remember_fast([one.step for one in complete])
        newest = max((one.step for one in found if one.is_safe), default=-1)
        for one in reversed(complete):
            if one.step > newest and not one.is_safe and (one.is_due or is_due(one.step)):
                self._upload_again(one, new_save)

    def _upload_again(self, candidate: Candidate, new_save: Callable[[int, Mapping[str, float]], StepSave]) -> None:
        assert self._fast is not None
        fast, here = self._fast, self._fast.open(candidate.step)
        source = self._nodes.ranks_of(candidate.with_metadata[0])[0]
        try:
            data, save_id = self._ranks.on_one(lambda: _root_of(fast, here), source)
        except CheckpointError as error:
            logger.warning("Step %d is not uploaded: %s", candidate.step, error)
            return
        if save_id != candidate.save_id:
            logger.warning("Step %d is not uploaded: another save has taken its place.", candidate.step)
            return
        save = new_save(candidate.step, candidate.metrics)
        senders = {}
        for number, name in enumerate(sorted(candidate.wanted)):
            ranks = self._nodes.ranks_of(candidate.holders[name][0])
            senders[name] = ranks[number % len(ranks)]
        save.tiers = ("fast",)
        self._pipeline.upload(save, WrittenSave(data, candidate.save_id, candidate.wanted, ()), senders)


def _save_ids(found: Iterable[Candidate]) -> dict[int, frozenset[str]]:
    ids: dict[int, frozenset[str]] = {}
    for one in found:
        ids[one.step] = ids.get(one.step, frozenset()) | one.save_ids | ({one.replica_id} - {""})
    return ids


def _root_of(fast: FastTier, filesystem: Filesystem) -> tuple[bytes, str | None]:
    """Return the bytes of a `.metadata`, and the id of its save."""
    root = fast.read_root(filesystem)
    return root.data, root.save_id

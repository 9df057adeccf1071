"""A run's restore: load the newest step that can be loaded from anywhere, and resume uploads that were cut short."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dcp_nvcomp.calls.values import expects_checkpoint, is_stateful
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CodecUnavailableError,
    CorruptDataError,
    FormatError,
    MetadataError,
    RankFailedError,
    StorageError,
    UnknownCodecError,
    UnsafeMetadataError,
    UnsafeObjectError,
    UnsupportedVersionError,
)
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.roots import is_missing
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.load import load
from dcp_nvcomp.loading.matching import WholeValue
from dcp_nvcomp.redaction import printable, without_secrets
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.runs.background.pipeline import Pipeline
from dcp_nvcomp.runs.events import StepRestored, TierName
from dcp_nvcomp.runs.options import RunContext
from dcp_nvcomp.runs.own_files import Abandoned, LeftBehind, read_abandoned, write_abandoned
from dcp_nvcomp.runs.restoring.candidates import DURABLE, Candidate, candidates
from dcp_nvcomp.runs.restoring.nearest_copy import Fetch, NearestReader
from dcp_nvcomp.runs.retention import SavedStep
from dcp_nvcomp.runs.step_save import RunProgress
from dcp_nvcomp.runs.steps import RunSteps
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier, HeldStep
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.saving.commit import WrittenSave
from dcp_nvcomp.storage.base import Filesystem

logger = logging.getLogger(__name__)

_NOT_DAMAGE = (
    UnsafeMetadataError,
    UnsafeObjectError,
    UnsupportedVersionError,
    UnknownCodecError,
    CodecUnavailableError,
)
_DAMAGE = (FormatError, CorruptDataError, MetadataError, CheckpointNotFoundError)


@dataclass(frozen=True)
class _Attempt:
    """What became of an attempt to load a step, as one rank tells the others."""

    is_damage: bool  # True if the step is damaged, or not all there
    error: str | None  # what was raised; None if nothing was
    damaged: tuple[tuple[str, str], ...]  # copies that are damaged or can't be read, as pairs of node and file


class Restoring:
    def __init__(self, ranks: Ranks, run: RunContext, pipeline: Pipeline, progress: RunProgress) -> None:
        self._ranks, self._pipeline, self._group, self._progress = ranks, pipeline, run.group, progress
        self._run, self._nodes, self._fast, self._durable = run, run.nodes, run.fast, run.durable
        self._reader_options = run.options.for_durable_reader
        self._to_abandon: LeftBehind | None = None
        self._abandoned = Abandoned()

    def restore(
        self,
        state: dict[str, Any],
        step: int | None,
        *,
        fallback: bool,
    ) -> StepRestored | None:
        self._pipeline.wait()  # what is being saved may be what is to be loaded, and nothing is removed meanwhile
        found = self._candidates(step)
        wanted = [one for one in found if (not one.is_abandoned if step is None else one.step == step)]
        if step is not None and not wanted:
            raise CheckpointNotFoundError(
                f"There is no complete checkpoint of step {step}.", path=without_secrets(self._durable.path_of(step))
            )
        if not wanted:
            return None
        room = self._pipeline.room
        if room is not None:
            room.looked([one.step for one in found if one.has_durable or one.is_complete_on_nodes])
        event, restored = self._newest(state, wanted, fallback=fallback and step is None)
        if room is not None:
            # not newer ones, which turned out damaged, nor other saves of this step
            durable = [one.step for one in found if one.is_safe and not one.is_abandoned and one.step < event.step]
            room.restored(event.step if restored.is_safe else max(durable, default=-1))
        self._progress.go_on_from(restored.saved.run_seconds)
        self._plan_to_abandon(restored, event.damaged, found)
        self._pipeline.plan_to_go_back(self._to_abandon is not None)
        ours = [one for one in found if not one.is_abandoned and one.step < event.step]
        ours = [restored, *ours] if not restored.is_abandoned else ours  # without the copies that are damaged
        self._go_on_with_uploads(ours)
        return event

    def _newest(
        self, state: dict[str, Any], tried: Sequence[Candidate], *, fallback: bool
    ) -> tuple[StepRestored, Candidate]:
        damaged: list[int] = []
        last: BaseException | None = None
        for candidate, after in zip(tried, (*tried[1:], None), strict=True):
            start = time.perf_counter()
            loaded, last, whole = self._load(state, candidate)
            if loaded is not None:
                if self._ranks.is_first:
                    _log_what_is_left(candidate.step, loaded, state)
                event = StepRestored(
                    candidate.step,
                    time.perf_counter() - start,
                    loaded.files,
                    loaded.nbytes,
                    tuple(step for step in damaged if step != candidate.step),
                    candidate.saved.metrics,
                )
                return event, whole
            assert last is not None
            is_of_another_step = after is None or after.step != candidate.step
            if not fallback and is_of_another_step:
                raise last
            damaged.append(candidate.step)
            other = "the one before it" if is_of_another_step else "another save of it"
            warnings.warn(
                f"Step {candidate.step} is damaged, so {other} is taken: {last}", RuntimeWarning, stacklevel=4
            )
        assert last is not None
        raise last

    def _load(
        self, state: dict[str, Any], candidate: Candidate
    ) -> tuple[NearestReader | None, BaseException | None, Candidate]:
        """Load one candidate, without the copies that turn out damaged."""
        while True:
            reader, error = self._attempt(state, candidate)
            words = None if error is None else f"{type(error).__name__}: {error}"
            damaged = () if isinstance(error, _NOT_DAMAGE) else reader.damaged
            attempts = self._ranks.gather(_Attempt(_is_damage(error), words, damaged))
            failed = {rank: one for rank, one in enumerate(attempts) if one.error is not None}
            if not failed:
                return reader, None, candidate
            bad = {copy for one in attempts for copy in one.damaged}
            has_other_copies = bool(bad & candidate.copies) and _has_others(candidate.without(bad))
            if not has_other_copies and any(_is_trouble(one, bad) for one in failed.values()):
                if error is not None and not _is_damage(error):
                    raise error
                raise RankFailedError.of({rank: str(one.error) for rank, one in failed.items() if not one.is_damage})
            if not has_other_copies:
                return None, error or CorruptDataError(str(next(iter(failed.values())).error)), candidate
            logger.warning("Copies of step %d are damaged, and others are taken: %s", candidate.step, sorted(bad))
            candidate = candidate.without(bad)

    def _attempt(self, state: dict[str, Any], candidate: Candidate) -> tuple[NearestReader, Exception | None]:
        reader = NearestReader(self._durable.path_of(candidate.step), **self._reader_options)
        try:
            if candidate.is_on_nodes and self._fast is not None:
                assert self._pipeline.room is not None
                fetch = Fetch(candidate, self._ranks, self._nodes, self._fast, self._pipeline.room)
                self._spread_metadata(candidate, fetch, reader)
                reader.from_nodes(fetch)
            _load_whole(state, reader, self._group)
        except Exception as error:
            return reader, error
        return reader, None

    def _spread_metadata(self, candidate: Candidate, fetch: Fetch, reader: NearestReader) -> None:
        """Give the step's `.metadata` to the nodes that lack it, or whose own version is not whole any more."""
        node = candidate.with_metadata[0]
        source = self._nodes.ranks_of(node)[0]
        try:
            data = self._ranks.on_one(
                lambda: fetch.here.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES), source
            )
        except CheckpointError:
            reader.damaged = ((node, METADATA_NAME),)
            raise
        if self._nodes.own in candidate.version_for(self._nodes.own).with_metadata:
            fetch.near.add(METADATA_NAME)
            return
        fetch.receive(METADATA_NAME, data, node)
        assert self._fast is not None
        if self._nodes.is_leader and self._fast.is_claimed:
            try:  # for the next restore; this one has it
                fetch.here.refuse_link()
                fetch.here.create_directory()
                fetch.here.publish(METADATA_NAME, data)
            except CheckpointError as error:
                logger.warning("The fast tier can't be written, and is passed by: %s", error)

    def _candidates(self, wanted: int | None) -> list[Candidate]:
        """Return what could be restored, the same on all ranks."""
        listed = self._ranks.on_one(self._durable.list)
        if wanted is None:
            for step, error in listed.unknown.items():  # it may be of the run now, or what it has left behind
                raise StorageError(error, path=without_secrets(self._durable.path_of(step)))
        abandoned = self._ranks.on_one(lambda: read_abandoned(self._durable.open_own()))
        on_nodes = _held_on_nodes(self._ranks, self._nodes, self._fast)
        self._abandoned = abandoned
        if self._ranks.is_first:
            for step, problem in listed.misnamed.items():
                logger.warning("%s is passed over: %s", without_secrets(self._durable.path_of(step)), problem)
        durable = [*listed.complete, *listed.abandoned, *listed.damaged]
        return candidates(durable, on_nodes, abandoned, listed.damaged)

    def _plan_to_abandon(self, restored: Candidate, damaged: Collection[int], found: Sequence[Candidate]) -> None:
        """Plan what the next save leaves behind: what is newer than the save that was restored, damaged or not."""
        newer = [one for one in found if one.step > restored.step]
        # those too that are seen nowhere now: a node that is away may have them
        saves = dict(self._abandoned.saves)
        if restored.is_abandoned:  # it comes back; another save of this step that was left behind does not
            saves[restored.step] -= _ids_of(restored) | restored.save_ids
        for one in newer:
            saves[one.step] = saves.get(one.step, frozenset()) | _ids_of(one)
        if saves == self._abandoned.saves:
            self._to_abandon = None
            return
        bad = {one.save_id for one in newer if one.step in damaged and not one.is_abandoned}
        abandoned = Abandoned(
            {step: ids for step, ids in saves.items() if ids}, (self._abandoned.damaged | bad) - restored.save_ids
        )
        staying = [one for one in found if not abandoned.has(one.step, one.save_id, one.saved.replica_id)]
        self._to_abandon = LeftBehind(
            abandoned,
            durable=frozenset(abandoned.saves.keys() - {one.step for one in staying if one.has_durable}),
            on_nodes=frozenset(abandoned.saves.keys() - {one.step for one in staying}),
        )

    def go_back(self) -> None:
        """Leave behind what is newer than a step that was asked for and restored; called before each save."""
        left = self._to_abandon
        if left is not None:
            self._ranks.on_one(lambda: write_abandoned(self._durable.open_own(), left.abandoned))
            self._pipeline.go_back(left)
            self._to_abandon = None  # only now: if writing it failed, the next save does it

    def _go_on_with_uploads(self, found: Sequence[Candidate]) -> None:
        """Upload what is complete in the fast tier and was on its way when an earlier job ended; forget the rest."""
        if self._fast is None:
            return
        complete = [one for one in found if one.is_complete_on_nodes]
        self._pipeline.remember_fast([one.step for one in complete])
        newest = max((one.step for one in found if one.is_safe), default=-1)
        for one in reversed(complete):
            if one.step > newest and not one.is_safe and (one.is_due or self._run.is_due(one.step)):
                self._upload_again(one)

    def _upload_again(self, candidate: Candidate) -> None:
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
        save = self._progress.new_save(candidate.step, candidate.saved.metrics)
        senders = {}
        for number, name in enumerate(sorted(candidate.wanted)):
            ranks = self._nodes.ranks_of(candidate.holders[name][0])
            senders[name] = ranks[number % len(ranks)]
        save.tiers = ("fast",)
        self._pipeline.upload(save, WrittenSave(data, candidate.save_id, candidate.wanted, ()), senders)


def newest_of(
    there: RunSteps, ranks: Ranks, nodes: Nodes, fast: FastTier | None, durable: DurableTier
) -> tuple[SavedStep | None, TierName]:
    """Return the newest step of a run, and where it is, the same on all ranks; `there` are those of the durable tier.

    The fast tier counts as well: a restore would take a step there, and not what is saved below it.
    """
    newest = max(there.complete, key=lambda saved: saved.step, default=None)
    if fast is None:
        return newest, "durable"
    abandoned = ranks.on_one(lambda: read_abandoned(durable.open_own()))
    on_nodes = _held_on_nodes(ranks, nodes, fast, after=-1 if newest is None else newest.step)
    found = (one.saved for one in candidates((), on_nodes, abandoned) if not one.is_abandoned)
    newer = next(found, None)
    return (newest, "durable") if newer is None else (newer, "fast")


def _held_on_nodes(
    ranks: Ranks, nodes: Nodes, fast: FastTier | None, *, after: int = -1
) -> list[tuple[str, list[HeldStep]]]:
    """Return what the fast tier of each node holds, the same on all ranks."""
    mine: list[HeldStep] = []
    if fast is not None and nodes.is_leader:
        try:
            mine = fast.held(after=after)
        except CheckpointError as error:  # copies are for that
            logger.warning("What the fast tier holds can't be read, so it counts as nothing: %s", error)
    return [(nodes.node_of(rank), steps) for rank, steps in enumerate(ranks.gather(mine)) if steps]


def _log_what_is_left(step: int, reader: NearestReader, state: Mapping[str, Any]) -> None:
    """Log the saved values that the state has no key for: they may be left on purpose."""
    names = dict.fromkeys(index.fqn for index in reader.storage_data)
    left = [fqn for fqn in names if not any(fqn == key or fqn.startswith(f"{key}.") for key in state)]
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        logger.warning(
            "Step %d also has values that the state has no key for; they are not restored: %s", step, printable(shown)
        )


def _load_whole(state: dict[str, Any], reader: NearestReader, group: dist.ProcessGroup | None) -> None:
    """Load what was saved, not what the state has room for; `TrainingState` sees to that itself."""
    values = {key: WholeValue(value) if _comes_whole(value) else value for key, value in state.items()}
    load(values, storage_reader=reader, process_group=group, no_dist=group is None)
    for key, value in values.items():
        state[key] = value.value if isinstance(value, WholeValue) else value


def _comes_whole(value: Any) -> bool:
    return isinstance(value, Mapping | list) or (is_stateful(value) and not expects_checkpoint(value))


def _is_damage(error: BaseException | None) -> bool:
    if error is None or isinstance(error, _NOT_DAMAGE):
        return False
    return isinstance(error, _DAMAGE) or (isinstance(error, CheckpointError) and is_missing(error))


def _is_trouble(attempt: _Attempt, damaged: Collection[tuple[str, str]]) -> bool:
    """Return True if a step may be whole, though it could not be loaded now.

    What a node has that can't be read counts as lost. The durable tier may answer again. A rank that has no error of
    its own raises that of another one, which may be about a copy there.
    """
    if attempt.is_damage or (damaged and not attempt.damaged):
        return False
    return all(node == DURABLE for node, _ in attempt.damaged)


def _has_others(candidate: Candidate) -> bool:
    return candidate.has_durable or candidate.is_complete_on_nodes


def _ids_of(one: Candidate) -> frozenset[str]:
    """Return what names a save: of what replicas saved what these have in common, as not all of them may be seen."""
    return frozenset([one.saved.replica_id]) if one.saved.replica_id else one.save_ids


def _root_of(fast: FastTier, filesystem: Filesystem) -> tuple[bytes, str | None]:
    root = fast.read_root(filesystem)
    return root.data, root.save_id

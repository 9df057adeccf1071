"""Loads the newest step that can be loaded; one that turns out damaged is named, and the one before it is taken."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.calls.values import ExpectsCheckpoint, is_stateful
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptDataError,
    FormatError,
    MetadataError,
    RankFailedError,
    UnknownCodecError,
    UnsafeMetadataError,
    UnsupportedVersionError,
)
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.roots import is_missing
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.load import load
from dcp_nvcomp.loading.whole import WholeValue
from dcp_nvcomp.redaction import printable
from dcp_nvcomp.runs.events import StepRestored
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.restoring.candidates import Candidate
from dcp_nvcomp.runs.restoring.fetch import Fetch
from dcp_nvcomp.runs.restoring.nearest import NearestReader
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.runs.tiers.room import Room

logger = logging.getLogger(__name__)

_NOT_DAMAGE = (UnsafeMetadataError, UnsupportedVersionError, UnknownCodecError)
_DAMAGE = (FormatError, CorruptDataError, MetadataError, CheckpointNotFoundError)


@dataclass(frozen=True)
class _Attempt:
    """What became of an attempt to load a step, as one rank tells the others.

    Attributes:
        is_damage: True if the step is damaged, or not all there.
        error: what was raised; None if nothing was.
        damaged: copies that are damaged or can't be read, as pairs of node and file.
    """

    is_damage: bool
    error: str | None
    damaged: tuple[tuple[str, str], ...]


class Restoring:
    """How the ranks of a run load one of its steps."""

    def __init__(
        self,
        ranks: Ranks,
        nodes: Nodes,
        fast: FastTier | None,
        room: Room | None,
        load_options: Mapping[str, Any],
        reader_for: Callable[[int], NearestReader],
    ) -> None:
        self._ranks, self._nodes, self._fast, self._room = ranks, nodes, fast, room
        self._load_options, self._reader_for = dict(load_options), reader_for

    def newest(
        self, state: dict[str, Any], tried: Sequence[Candidate], *, fallback: bool
    ) -> tuple[StepRestored, Candidate]:
        """Load the first of the candidates that can be loaded."""
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
                    candidate.metrics,
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
            # a rank that has no error of its own raises that of another one, which may be about a copy there
            if not bad and any(not one.is_damage for one in failed.values()):
                if error is not None and not _is_damage(error):
                    raise error
                raise RankFailedError.of({rank: str(one.error) for rank, one in failed.items() if not one.is_damage})
            if not bad & candidate.copies or not _has_others(candidate.without(bad)):
                return None, error or CorruptDataError(str(next(iter(failed.values())).error)), candidate
            logger.warning("Copies of step %d are damaged, and others are taken: %s", candidate.step, sorted(bad))
            candidate = candidate.without(bad)

    def _attempt(self, state: dict[str, Any], candidate: Candidate) -> tuple[NearestReader, Exception | None]:
        reader = self._reader_for(candidate.step)
        try:
            if candidate.is_on_nodes and self._fast is not None:
                assert self._room is not None
                fetch = Fetch(candidate, self._ranks, self._nodes, self._fast, self._room)
                self._spread_metadata(candidate, fetch, reader)
                reader.from_nodes(fetch)
            _load_whole(state, reader, self._load_options)
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


def _log_what_is_left(step: int, reader: NearestReader, state: Mapping[str, Any]) -> None:
    """Log the saved values that the state has no key for: they may be left on purpose."""
    names = dict.fromkeys(index.fqn for index in reader.storage_data)
    left = [fqn for fqn in names if not any(fqn == key or fqn.startswith(f"{key}.") for key in state)]
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        logger.warning(
            "Step %d also has values that the state has no key for; they are not restored: %s", step, printable(shown)
        )


def _load_whole(state: dict[str, Any], reader: NearestReader, options: Mapping[str, Any]) -> None:
    """Load what was saved, not what the state has room for; `TrainingState` sees to that itself."""
    values = {key: WholeValue(value) if _comes_whole(value) else value for key, value in state.items()}
    load(values, storage_reader=reader, **options)
    for key, value in values.items():
        state[key] = value.value if isinstance(value, WholeValue) else value


def _comes_whole(value: Any) -> bool:
    return isinstance(value, Mapping | list) or (is_stateful(value) and not isinstance(value, ExpectsCheckpoint))


def _is_damage(error: BaseException | None) -> bool:
    if error is None or isinstance(error, _NOT_DAMAGE):
        return False
    return isinstance(error, _DAMAGE) or (isinstance(error, CheckpointError) and is_missing(error))


def _has_others(candidate: Candidate) -> bool:
    """True if each file is still somewhere."""
    return candidate.has_durable or candidate.is_complete_on_nodes

"""The saves of a writer: where each goes, its id, and what earlier ones have left.

A save is announced on a thread, by `reset` or `storage_meta`, and begun there by `set_up_storage_writer`. Asynchronous
saves of one writer may overlap, each on a thread of its own. A prepared one belongs to no thread.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.asynchronous.staging import Staging
from dcp_nvcomp.saving.commit import LastPublished, Orphans
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.rank_save import RankResults, RankSave, Resolve
from dcp_nvcomp.saving.stats import RankTotals, SaveStats, summarize
from dcp_nvcomp.storage.open import place_of


@dataclass
class Save:
    path: str = ""  # empty until it is fixed: by `reset` with a place, or when the save begins
    place: str = ""  # where that is, wherever the process moves to until the save is over
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # in the names of its files
    has_begun: bool = False
    has_ended: bool = False  # DCP calls nothing more for it on this rank
    rank: int = 0
    is_coordinator: bool = False
    use_collectives: bool = True
    started_seconds: float = 0.0
    own_files: tuple[str, ...] = ()  # the data files that this rank wrote
    references: Mapping[str, bytes | None] = field(default_factory=dict)  # the coordinator's, as they were before

    def stats(self, totals: Sequence[RankTotals]) -> SaveStats:
        seconds = time.perf_counter() - self.started_seconds
        return summarize(without_secrets(self.path), self.save_id, totals, seconds)


@dataclass(frozen=True)
class PreparedWrite:
    """A `RankSave` whose save was begun and planned by one process, to be written by any."""

    save: Save
    planned_seconds: float
    rank_save: RankSave
    engine: EngineChoice
    process_id: int

    def write(self, resolve: Resolve, remembered: RememberedChoices) -> RankResults:
        """Encode and write the items; in another process by the CPU engine, as a forked one cannot use CUDA."""
        engine = self.engine if os.getpid() == self.process_id else EngineChoice("cpu")
        files, totals = self.rank_save.run(resolve, engine=engine, remembered=remembered)
        totals.rank, totals.seconds["plan"] = self.save.rank, self.planned_seconds
        return RankResults.of(files, totals)


class Saves:
    """The latest save of each thread, and what the earlier ones have left; a copy or pickle has the path alone."""

    def __init__(self, path: str, is_explicit: bool = False) -> None:
        self._path = path
        self._is_explicit = is_explicit
        self._local = threading.local()
        self._owner = threading.current_thread()
        self._latest: Save | None = None
        self.orphans, self.last_published = Orphans(), LastPublished()
        self.unfinished = False  # True on the coordinator while a save is under way, and if it was not published

    def __reduce__(self) -> tuple[type[Saves], tuple[str, bool]]:
        return type(self), (self._path, self._is_explicit)

    @property
    def path(self) -> str:
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        self._path, self._is_explicit = path, True
        save = self._own
        if save is not None and save.has_begun:
            save.has_ended = True
        elif save is not None:
            save.path = ""  # it was announced for another place

    @property
    def _own(self) -> Save | None:
        return getattr(self._local, "save", None)

    @property
    def current(self) -> Save:
        save: Save = self._local.save
        return save

    @property
    def announced(self) -> Save:
        """The save that this thread is in, else the one that it is about to begin; its `path` may still be empty."""
        save = self._own
        return self._announce(Save()) if save is None or save.has_ended else save

    def _announce(self, save: Save) -> Save:
        self._local.save = self._latest = save
        return save

    @property
    def staging(self) -> Staging | None:
        return getattr(self._local, "staging", None)

    @contextmanager
    def published(self) -> Iterator[None]:
        """Note whether the save that is published meanwhile was."""
        try:
            yield
        except BaseException as error:
            # it may be published, or may still be: then no rank may remove its files
            if not isinstance(error, CheckpointError) or error.outcome_unknown:
                self.unfinished = False
            raise
        self.unfinished = False

    @contextmanager
    def staged_by(self, staging: Staging) -> Iterator[None]:
        self._local.staging = staging
        try:
            yield
        finally:
            self._local.staging = None

    def reset(self, place: str) -> None:
        if place and (threading.current_thread() is self._owner or not self._is_explicit):
            self._path = place
        self._announce(Save(place))

    def begin(self, *, rank: int, is_coordinator: bool, use_collectives: bool) -> None:
        """Begin the announced save of this thread; another one, at its place, if that has begun and failed."""
        save = self.announced
        if save.has_begun:
            save = self._announce(Save(save.path))
        save.path = save.path or self._path
        save.place = place_of(save.path) if self.staging is None else self.staging.place
        save.rank, save.is_coordinator, save.use_collectives = rank, is_coordinator, use_collectives
        save.started_seconds = time.perf_counter()
        save.has_begun = True

    @property
    def checkpoint_id(self) -> str:
        save = self._own
        return self._path if save is None or save.has_ended else save.path or self._path

    @property
    def save_id(self) -> str:
        save = self._own
        if save is None or save.has_ended:
            save = self._latest or self.announced
        return save.save_id

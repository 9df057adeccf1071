"""The durable tier: the run's root, on any storage."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.errors import CheckpointError, ConcurrentSaveError, ConfigurationError
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.abandoned import read_abandoned
from dcp_nvcomp.runs.keep import Keep, KeepRule, SavedStep, reasons_to_keep
from dcp_nvcomp.runs.pins import is_pinned, pinned_steps
from dcp_nvcomp.runs.removal import remove_step
from dcp_nvcomp.runs.steps import RUN_FOLDER, RunSteps, StepNames, list_steps
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

__all__ = ["Doomed", "DurableTier", "Removed"]

logger = logging.getLogger(__name__)

_ID = "id"
_MOST_ID_NBYTES = 1 << 10


@dataclass(frozen=True)
class Removed:
    """What a round of removals did.

    Attributes:
        steps: those that are gone.
        failed: why others could not be removed, by step; the next round tries again.
    """

    steps: tuple[int, ...]
    failed: Mapping[int, CheckpointError]


@dataclass(frozen=True)
class Doomed:
    """What a rule says of steps.

    Attributes:
        steps: those that nothing keeps.
        kept: why the others are kept.
    """

    steps: tuple[int, ...]
    kept: Mapping[int, tuple[str, ...]]


class DurableTier:
    """The steps at a run's root.

    Args:
        root: path or URL of the run.
        names: of the steps' directories.
        storage_options: for the fsspec filesystem.
    """

    def __init__(self, root: str, names: StepNames, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = place_of(root).rstrip("/") or "/"
        self.names = names
        self._storage_options = dict(storage_options or {})
        self._lock = threading.Lock()  # held while one step is removed
        self._busy: dict[int, int] = {}

    def path_of(self, step: int) -> str:
        """Return the path or URL of a step."""
        return f"{self.root.rstrip('/')}/{self.names.name_of(step)}"

    def open(self, step: int) -> Filesystem:
        """Open the directory of a step."""
        return self._open(self.path_of(step))

    def open_own(self) -> Filesystem:
        """Open the directory in which the run keeps what is its own."""
        return self._open(f"{self.root.rstrip('/')}/{RUN_FOLDER}")

    def _open(self, path: str) -> Filesystem:
        return open_filesystem(path, storage_options=self._storage_options)

    def run(self) -> str:
        """Return the id of the run: drawn by its first manager, and kept beside its steps."""
        own = self.open_own()
        if own.file_nbytes(_ID) is None:
            with contextlib.suppress(ConcurrentSaveError):
                own.publish(_ID, uuid.uuid4().hex.encode(), overwrite=False)
        return own.read_all(_ID, limit_nbytes=_MOST_ID_NBYTES).decode("utf-8", "replace")

    def refuse_checkpoint(self) -> None:
        """Refuse a step's directory for a run's root: a run would begin anew in it, as if nothing had been saved.

        Raises:
            ConfigurationError: there is a checkpoint, and no run yet.
            StorageError: the storage fails.
        """
        with contextlib.closing(self._open(self.root)) as filesystem:
            if filesystem.file_nbytes(METADATA_NAME) is None or self.open_own().file_nbytes(_ID) is not None:
                return
        raise ConfigurationError(
            "This is a checkpoint, not the directory of a run: pass the one above it. `restore` takes `step=`.",
            path=without_secrets(self.root),
        )

    def list(self) -> RunSteps:
        """Return the steps that are there.

        Raises:
            StorageError: the storage fails.
        """
        with contextlib.closing(self._open(self.root)) as filesystem:
            return list_steps(filesystem, self.names, read_abandoned(self.open_own()))

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[None]:
        """Keep a step from being removed; waits for a removal of it that is under way."""
        self.hold(step)
        try:
            yield
        finally:
            self.let_go(step)

    def hold(self, step: int) -> None:
        """Keep a step from being removed until `let_go`."""
        with self._lock:
            self._busy[step] = self._busy.get(step, 0) + 1

    def let_go(self, step: int) -> None:
        """Let a step be removed again."""
        with self._lock:
            self._busy[step] -= 1
            if not self._busy[step]:
                del self._busy[step]

    def doomed(
        self, rule: Keep | KeepRule | None, complete: Collection[SavedStep], abandoned: Collection[SavedStep] = ()
    ) -> Doomed:
        """Return what a rule keeps and what it does not.

        Never doomed are the newest of the steps, and what is pinned.

        Args:
            rule: says which are kept.
            complete: the complete steps.
            abandoned: those that the run has left behind, which no rule keeps; without a rule they stay.

        Raises:
            StorageError: the pins can't be read; then any step may be pinned.
        """
        ordered = sorted(complete, key=lambda saved: saved.step)
        kept = reasons_to_keep(rule, ordered)
        doomed = [saved.step for saved in ordered if saved.step not in kept]
        for saved in abandoned:
            if rule is None:
                kept[saved.step] = ("abandoned",)
            else:
                doomed.append(saved.step)
        pinned = pinned_steps(self.open_own()) if doomed else frozenset()
        for step in pinned & set(doomed):
            kept[step] = ("pinned",)
        return Doomed(tuple(step for step in sorted(doomed) if step not in pinned), kept)

    def remove(self, steps: Collection[int]) -> Removed:
        """Remove steps, but for those that are held."""
        gone, failed = [], {}
        for step in sorted(steps):
            with self._lock:
                if step in self._busy:
                    continue
                try:
                    with contextlib.closing(self.open(step)) as filesystem:
                        if remove_step(filesystem, lambda step=step: is_pinned(self.open_own(), step)):  # type: ignore[misc]
                            gone.append(step)
                except CheckpointError as error:
                    logger.warning("Step %d could not be removed, and will be at the next save: %s", step, error)
                    failed[step] = error
        return Removed(tuple(gone), failed)

"""The durable tier: the run's root, on any storage."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.metadata.roots import read_root
from dcp_nvcomp.format.metadata.shares import is_being_removed, needed_by_others, remove_marks
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES, Summary, summary_at_end
from dcp_nvcomp.format.names import METADATA_NAME, mark_name, marking_directory, shared_directories
from dcp_nvcomp.maintenance.completeness import RUN_FOLDER, SEEN_NAME, Seen, identity_of
from dcp_nvcomp.maintenance.run_listing import COMPLETE, Step, steps_below
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.lease import Lease
from dcp_nvcomp.runs.own_files import ID_NAME, is_pinned, pinned_steps, read_abandoned, run_id
from dcp_nvcomp.runs.retention import Doomed, Keep, KeepRule, SavedStep, what_goes
from dcp_nvcomp.runs.steps import RunSteps, StepNames, list_steps, remove_step
from dcp_nvcomp.storage.base import Filesystem, RecursiveListing
from dcp_nvcomp.storage.open import open_filesystem, place_of

logger = logging.getLogger(__name__)

BEGUN: Final = "its removal had begun"


@dataclass(frozen=True)
class Removed:
    steps: tuple[int, ...]  # those that are gone
    failed: Mapping[int, CheckpointError]  # why others could not be removed, by step; the next round tries again


class DurableTier:
    def __init__(self, root: str, names: StepNames, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = place_of(root).rstrip("/") or "/"
        self.names = names
        self.lease: Lease | None = None  # that a manager holds
        self._storage_options = dict(storage_options or {})
        self._changed = threading.Condition()
        self._busy: Counter[int] = Counter()
        self._being_removed: set[int] = set()
        self._seen: Seen[Step] | None = None  # until the first list
        self._written_seen = b""

    def path_of(self, step: int) -> str:
        return f"{self.root.rstrip('/')}/{self.names.name_of(step)}"

    def open(self, step: int) -> Filesystem:
        return self._open(self.path_of(step))

    def open_own(self) -> Filesystem:
        return self._open(f"{self.root.rstrip('/')}/{RUN_FOLDER}")

    def _open(self, path: str) -> Filesystem:
        return open_filesystem(path, storage_options=self._storage_options)

    def take(self, *, run_id: str | None, lease_seconds: float, take_over: bool) -> tuple[str, RunSteps]:
        """Take the run, and finish what an earlier manager left unfinished; return its id, and the steps there."""
        self.refuse_checkpoint()
        lease = Lease.take(self.open_own, run_id=run_id, lease_seconds=lease_seconds, take_over=take_over)
        try:
            run, found = self.run(), self.list()
            self.remove(dict.fromkeys(found.removing, BEGUN))
        except BaseException:
            lease.release()
            raise
        self.lease = lease
        return run, found

    def check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def release(self) -> None:
        if self.lease is not None:
            try:
                self.lease.release()
            except CheckpointError as error:
                logger.warning("The lease of the run could not be given back, and will run out: %s", error)

    def run(self) -> str:
        """Return the id of the run: drawn by its first manager, and kept beside its steps; the caller has the lease."""
        return run_id(self.open_own(), self.root, self._storage_options)

    def refuse_checkpoint(self) -> None:
        """Refuse a step's directory for a run's root: a run would begin anew in it, as if nothing had been saved."""
        with contextlib.closing(self._open(self.root)) as filesystem:
            if filesystem.file_nbytes(METADATA_NAME) is None or self.open_own().file_nbytes(ID_NAME) is not None:
                return
        raise ConfigurationError(
            "This is a checkpoint, not the directory of a run: pass the one above it. `restore` takes `step=`.",
            path=without_secrets(self.root),
        )

    def list(self) -> RunSteps:
        """Return the steps that are there. Those that were not seen complete as they are now are opened."""
        with contextlib.closing(self._open(self.root)) as filesystem:
            abandoned = read_abandoned(self.open_own())
            found, self._seen = list_steps(filesystem, self.names, abandoned, seen=self._seen)
            return found

    def problem_of(self, step: int) -> str:
        """Open a step, and return why it is not complete; empty if it is."""
        name = self.names.name_of(step)
        with contextlib.closing(self.open(step)) as filesystem:
            files = filesystem.list_files()
            found = steps_below(filesystem, RecursiveListing(files, [], {}), seen=Seen(), step_of=lambda _: step)
        is_complete = bool(found) and found[0].state == COMPLETE
        if self._seen is not None:
            self._seen.forget(name)
            if is_complete and not found[0].shares:  # which were not listed
                self._seen.note(name, identity_of(files), replace(found[0], name=name))
        if is_complete:
            return ""
        return (found[0].problem if found else "") or "It has no metadata."

    def write_seen(self) -> None:
        """Write down which steps need not be opened by others; if that fails they are opened."""
        data = b"" if self._seen is None else self._seen.to_bytes()
        if data == self._written_seen:
            return
        try:
            own = self.open_own()
            own.refuse_link()
            own.create_directory()
            own.publish(SEEN_NAME, data)
            self._written_seen = data
        except CheckpointError as error:
            logger.debug("Which steps are complete could not be written down: %s", error)

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[None]:
        """Keep a step from being removed; waits for a removal of it that is under way."""
        self.hold(step)
        try:
            yield
        finally:
            self.let_go(step)

    def hold(self, step: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: step not in self._being_removed)
            self._busy[step] += 1

    def let_go(self, step: int) -> None:
        with self._changed:
            self._busy[step] -= 1

    def decide(self, rule: Keep | KeepRule | None, found: RunSteps) -> Doomed:
        """Return what a rule keeps of the steps just listed, and what not; opens the newest before others go."""
        complete = sorted(found.complete, key=lambda saved: saved.step)
        while complete:
            doomed = what_goes(
                *(rule, complete, found.abandoned, lambda: pinned_steps(self.open_own())),
                shared=self._shared,
                needed=lambda step: self._needed(step, found.marks.get(step, ())),
            )
            if not doomed.why or self._is_complete(complete[-1].step):
                return doomed
            complete.pop()
        return Doomed({}, {})

    def _shared(self, saved: SavedStep) -> Sequence[int]:
        return [step for name in saved.shares if (step := self.names.step_of(name)) is not None]

    def _needed(self, step: int, marks: Sequence[str]) -> str:
        """Return which of the directories that have left marks in a step, and are no steps, need files of it."""
        others = {mark_name(name): name for name in marks if self.names.step_of(name) is None}
        if not others:
            return ""
        with contextlib.closing(self.open(step)) as filesystem:
            files = filesystem.list_files()
            theirs = [file for file in files if marking_directory(file.name) is None or file.name in others]
            needed = needed_by_others(filesystem, theirs)
        return ", ".join(sorted(name for mark, name in others.items() if mark in needed))

    def _is_complete(self, step: int) -> bool:
        try:
            problem = self.problem_of(step)
        except CheckpointError as error:
            problem = str(error)
        if problem:
            logger.warning("Step %d is not complete, so it does not count: %s", step, problem)
        return not problem

    def remove(self, why: Mapping[int, str], listed: Mapping[int, str] | None = None) -> Removed:
        """Remove steps; `listed` has the saves that they were when it was decided.

        Those that others need stay, and are looked at again when some of the others are gone.
        """
        gone: Sequence[int] = []
        failed: dict[int, CheckpointError] = {}
        waiting: Sequence[int] = sorted(why)
        before = -1
        while waiting and len(gone) > before:
            order, waiting, before = waiting, [], len(gone)
            for step in order:
                try:
                    with contextlib.ExitStack() as stack:
                        if not stack.enter_context(self._not_held(step)):
                            continue
                        filesystem = stack.enter_context(contextlib.closing(self.open(step)))
                        if why[step] == BEGUN and not is_being_removed(filesystem):
                            continue  # a save has taken the mark away since
                        if self._remove_one(filesystem, step, None if listed is None else listed.get(step)):
                            gone = [*gone, step]
                            logger.info("Step %d was removed: %s.", step, why[step])
                        elif needed_by_others(filesystem, filesystem.list_files()):
                            waiting = [*waiting, step]
                except CheckpointError as error:
                    logger.warning("Step %d could not be removed, and will be at the next save: %s", step, error)
                    failed[step] = error
        return Removed(tuple(sorted(gone)), failed)

    @contextlib.contextmanager
    def _not_held(self, step: int) -> Iterator[bool]:
        """Have `hold` of this step wait meanwhile; yields False if it is held, or removed by another thread."""
        with self._changed:
            may_go = not self._busy[step] and step not in self._being_removed
            if may_go:
                self._being_removed.add(step)
        try:
            yield may_go
        finally:
            if may_go:
                with self._changed:
                    self._being_removed.discard(step)
                    self._changed.notify_all()

    def _remove_one(self, filesystem: Filesystem, step: int, save_id: str | None) -> bool:
        shares = _shares_at(filesystem)

        def is_wanted() -> bool:
            is_replaced = save_id is not None and _save_id_at(filesystem) not in (None, save_id)
            return (
                is_replaced
                or is_pinned(self.open_own(), step)
                or bool(needed_by_others(filesystem, filesystem.list_files()))  # by what is no step, too
            )

        if not remove_step(filesystem, is_wanted):
            return False
        if filesystem.file_nbytes(METADATA_NAME) is None:  # else it was saved again meanwhile
            remove_marks(filesystem, self.names.name_of(step), shares)
        return True


def _save_id_at(filesystem: Filesystem) -> str | None:
    summary = _summary_at(filesystem)
    return None if summary is None else summary.save_id


def _summary_at(filesystem: Filesystem) -> Summary | None:
    """Return the summary of the checkpoint in a step's directory; None without a checkpoint or a summary."""
    nbytes = filesystem.file_nbytes(METADATA_NAME)
    if nbytes is None:
        return None
    return summary_at_end(filesystem.read(METADATA_NAME, max(nbytes - SUMMARY_NBYTES, 0), nbytes))


def _shares_at(filesystem: Filesystem) -> Sequence[str]:
    """Return the directories whose files a step shares; nothing if that can't be read: marks that stay do no harm."""
    try:
        summary = _summary_at(filesystem)
        if summary is None or summary.shares is not None:
            return () if summary is None else summary.shares or ()
        return shared_directories(read_root(filesystem, METADATA_NAME).files())
    except CheckpointError:
        return ()

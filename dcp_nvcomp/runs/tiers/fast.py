"""The fast tier: a directory on each node, in memory or on a local disk, and the room in it.

    <fast>/step-<N>/       what ranks of this node saved, copies of other nodes' files, and the `.metadata` of all;
                           `.equal`, with the save's id, once replicas were compared and found equal
    <fast>/.run/run        which run the directory belongs to

A step is complete when every file that its `.metadata` names is on some node. If room is needed, steps go that the last
restore found complete nowhere, then those that are not newer than the newest of the durable tier, the oldest first.
What is newer than all of the durable tier stays, and so does what is being saved, copied, or on its way there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from dcp_nvcomp.errors import CheckpointError, ConcurrentSaveError, ConfigurationError, StorageError
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.roots import Root, read_root
from dcp_nvcomp.format.metadata.shares import is_being_removed
from dcp_nvcomp.format.metadata.summary import REPLICA, SUMMARY_NBYTES, summary_at_end
from dcp_nvcomp.format.names import METADATA_NAME, data_file_rank
from dcp_nvcomp.maintenance.completeness import RUN_FOLDER
from dcp_nvcomp.runs.events import Event, StepsRemoved
from dcp_nvcomp.runs.retention import SavedStep
from dcp_nvcomp.runs.steps import EQUAL, StepNames, remove_step
from dcp_nvcomp.runs.tiers.trust import ALONE, fault_below, own_directory, refuse_fault_below
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, place_of

logger = logging.getLogger(__name__)

# In the summary of a step that is on its way to the durable tier.
TO_UPLOAD: Final = "upload"
_RUN = "run"
_PROBE = "probe"
_MOST_NAME_NBYTES = 1 << 12


@dataclass(frozen=True)
class HeldStep:
    step: int
    held: Mapping[str, int]  # the data files that are there, and their sizes
    saved: SavedStep | None = None  # as the `.metadata` that is there describes it
    wanted: Mapping[str, int] = field(
        default_factory=dict
    )  # the data files that the `.metadata` names, and their sizes
    is_due: bool = False  # it is to be uploaded
    is_equal: bool = False  # it was found to equal what other replicas saved


class FastTier:
    def __init__(self, root: str, names: StepNames, *, metadata_limit_nbytes: int = MAX_METADATA_NBYTES) -> None:
        self._metadata_limit_nbytes = metadata_limit_nbytes
        self.root, self.names = place_of(root).rstrip("/") or "/", names
        if "://" in self.root:
            raise ConfigurationError(f"fast={root!r} must be a directory of each node, such as one in /dev/shm.")
        self._run, self.is_claimed = "", False
        self._distrusted: set[int] = set()  # steps of which was said that they are not the user's own

    def path_of(self, step: int) -> str:
        return f"{self.root}/{self.names.name_of(step)}"

    def open(self, step: int) -> Filesystem:
        """Open the directory of a step; where it is made, it is for this user alone."""
        return _open(self.path_of(step))

    def read_root(self, filesystem: Filesystem) -> Root:
        return read_root(filesystem, METADATA_NAME, limit_nbytes=self._metadata_limit_nbytes)

    def make_directory(self, step: int) -> None:
        """Make the directory of a step for this user alone, before a writer makes it as the umask has it."""
        with contextlib.closing(self.open(step)) as filesystem:
            filesystem.create_directory()

    def refuse_foreign(self, step: int) -> None:
        """Raise if what is in a step's directory is not the user's own, so that nothing is written there."""
        fault = fault_below(self.root, self.names.name_of(step))
        if fault is not None:
            raise StorageError(f"Nothing is written there: {fault}. Remove it.", path=self.path_of(step))

    def claim(self, run: str) -> None:
        """Make sure that the directory is this run's, or no run's yet; one that is out of order is passed by."""
        self._run = run
        try:
            found = self._claimed_by(run)
        except StorageError as error:
            logger.warning(
                "The fast tier is out of order, and saves go to the durable tier until it is back: %s", error
            )
            return
        self.is_claimed = found == run
        if found != run:
            raise ConfigurationError(
                f"fast={self.root!r} holds steps of another run ({found}, and this one is {run}): choose another "
                "directory, or remove that one if the other run is not needed any more."
            )

    def _claimed_by(self, run: str) -> str:
        """Return the run that the directory is of; this one, if it was no run's yet."""
        own_directory(self.root)
        own = self._open_own()
        own.create_directory()
        refuse_fault_below(self.root, RUN_FOLDER)
        if own.file_nbytes(_RUN) is None:
            with contextlib.suppress(ConcurrentSaveError):  # another rank of this node was quicker
                own.publish(_RUN, run.encode(), overwrite=False)
        return own.read_all(_RUN, limit_nbytes=_MOST_NAME_NBYTES).decode("utf-8", "replace")

    def _open_own(self) -> Filesystem:
        return _open(f"{self.root}/{RUN_FOLDER}")

    def check_writable(self) -> None:
        """Raise if nothing can be written here now; a directory that was out of order may be back."""
        if not self.is_claimed:
            found = self._claimed_by(self._run)
            self.is_claimed = found == self._run
            if not self.is_claimed:
                raise ConfigurationError(f"fast={self.root!r} holds steps of another run ({found}).")
        self._open_own().publish(_PROBE, b"")

    def free_nbytes(self) -> int:
        found = open_filesystem(self.root).free_nbytes()
        assert found is not None
        return found

    def nbytes_of(self, step: int) -> int:
        """Return the size of what is there of a step."""
        with contextlib.closing(self.open(step)) as filesystem:
            return sum(file.nbytes for file in filesystem.list_files())

    def steps(self) -> list[int]:
        root = open_filesystem(self.root)
        folders = {file.name.partition("/")[0] for file in root.list_below().files if "/" in file.name}
        return sorted(step for folder in folders if (step := self.names.step_of(folder)) is not None)

    def held(self, *, after: int = -1) -> list[HeldStep]:
        """Return what is there of each step; what can't be read, or is not the user's own, counts as not there."""
        found = []
        for step in self.steps() if self.is_claimed else ():
            if step <= after:
                continue
            try:
                found.append(self._held_of(step))
            except CheckpointError as error:
                logger.warning(
                    "What the fast tier has of step %d can't be read, and counts as nothing: %s", step, error
                )
        return found

    def _held_of(self, step: int) -> HeldStep:
        if not self._is_own(step):
            return HeldStep(step, {})
        with contextlib.closing(self.open(step)) as filesystem:
            files = filesystem.list_files()
            held = {file.name: file.nbytes for file in files if data_file_rank(file.name) is not None}
            nothing = HeldStep(step, held)
            if not any(file.name == METADATA_NAME for file in files) or is_being_removed(filesystem):
                return nothing
            try:
                root = self.read_root(filesystem)
            except CheckpointError as error:
                logger.warning("The fast tier's metadata of step %d can't be read: %s", step, error)
                return nothing
            refs = root.files()
            summary = summary_at_end(root.data[-SUMMARY_NBYTES:])
            if summary is None or any(not isinstance(ref, DataFileRef) for ref in refs.values()):
                return nothing  # no manager wrote this
            if summary.step != step or summary.save_id != root.save_id:
                logger.warning("%s in the fast tier holds step %s: it is passed over.", filesystem.path, summary.step)
                return nothing
            wanted = {name: ref.nbytes for name, ref in refs.items() if ref is not None}
            saved = SavedStep(
                step,
                summary.saved_seconds,
                summary.metrics,
                root.save_id or "",
                sum(wanted.values()),
                str(summary.more.get(REPLICA, "")),
                summary.run_seconds,
                summary.lease,
            )
            is_equal = self._is_equal(filesystem, root.save_id)
            return HeldStep(step, held, saved, wanted, summary.more.get(TO_UPLOAD) is True, is_equal)

    def _is_own(self, step: int) -> bool:
        fault = fault_below(self.root, self.names.name_of(step))
        if fault is not None and step not in self._distrusted:
            self._distrusted.add(step)
            logger.warning("Step %d of the fast tier %s counts as not there: %s", step, self.root, fault)
        return fault is None

    @staticmethod
    def _is_equal(filesystem: Filesystem, save_id: str | None) -> bool:
        if filesystem.file_nbytes(EQUAL) is None:
            return False
        try:
            return filesystem.read_all(EQUAL, limit_nbytes=_MOST_NAME_NBYTES).decode("utf-8", "replace") == save_id
        except CheckpointError:
            return False

    def mark_equal(self, step: int, save_id: str) -> None:
        self.open(step).publish(EQUAL, save_id.encode())

    def remove_before(self, step: int, *, but: Collection[int]) -> tuple[int, ...]:
        """Remove what is here of older steps, whole or not; a failure is logged, and costs no more than space."""
        try:
            found = self.steps()
        except CheckpointError as error:
            logger.warning("The fast tier can't be listed, so that nothing is removed: %s", error)
            return ()
        return self.remove([one for one in found if one < step and one not in but])

    def remove(self, steps: Collection[int]) -> tuple[int, ...]:
        """Remove what is here of steps; a failure is logged, and costs no more than space."""
        gone = []
        for step in steps:
            try:
                with contextlib.closing(self.open(step)) as filesystem:
                    remove_step(filesystem)
                gone.append(step)
            except CheckpointError as error:
                logger.warning("Step %d could not be removed from the fast tier: %s", step, error)
        return tuple(gone)


def _open(path: str) -> Filesystem:
    # what is there is memory, or one copy of several
    return open_filesystem(path, sync_files=False, directory_mode=ALONE)


class Room:
    def __init__(self, fast: FastTier, awaited: Callable[[], Collection[int]], emit: Callable[[Event], None]) -> None:
        self._fast, self._awaited, self._emit = fast, awaited, emit
        self._lock = threading.Lock()
        self._torsos: frozenset[int] = frozenset()
        self._busy: Counter[int] = Counter()  # a step that is saved twice is there twice
        self._expected: dict[int, list[float]] = {}  # what is being saved comes to, with its copies on this node
        self._there_before: dict[int, int] = {}  # of a step that is saved again
        self._durable_step = -1

    def looked(self, complete: Collection[int]) -> None:
        """Note what a restore has seen, before it loads any of it: nothing is known to be whole yet."""
        try:
            here = self._fast.steps()
        except CheckpointError:  # nothing is removed then
            here = []
        with self._lock:
            self._torsos, self._durable_step = frozenset(here) - frozenset(complete), -1

    def restored(self, durable_step: int) -> None:
        """Note the newest step of the durable tier after a restore; -1 if there is none that is whole."""
        with self._lock:
            self._durable_step = durable_step

    def begun(self, step: int, nbytes: float = 0) -> None:
        """Note that a step is being saved, which will come to `nbytes` here, as far as that is known."""
        there = self._nbytes_of(step)
        with self._lock:
            self._there_before.setdefault(step, there)
            self._expected.setdefault(step, []).append(nbytes)
            self._busy[step] += 1
            self._torsos -= {step}

    def ended(self, step: int) -> None:
        with self._lock:
            self._busy[step] -= 1
            del self._expected[step][0]
            if not self._expected[step]:
                del self._expected[step], self._there_before[step]

    def expects(self, step: int, nbytes: float) -> None:
        """Note what a step that is being saved comes to, now that its ranks have written it."""
        with self._lock:
            if self._expected.get(step):
                self._expected[step][0] = nbytes

    def arrived(self, step: int) -> None:
        with self._lock:
            self._durable_step = max(self._durable_step, step)

    def make(self, nbytes: float, *, but: Collection[int] = ()) -> bool:
        """Return whether so much fits, once what may go is gone, as far as it has to."""
        for step, why in self._removable(but):
            if self._is_free(nbytes):
                return True
            if self._fast.remove([step]):
                logger.warning("The fast tier has too little room, so that step %d went: it is %s.", step, why)
                self._emit(StepsRemoved((step,), "fast"))
        return self._is_free(nbytes)

    def _is_free(self, nbytes: float) -> bool:
        """Return whether so much fits beside what saves that have begun will still write."""
        with self._lock:
            expected = {step: sum(sizes) + self._there_before[step] for step, sizes in self._expected.items()}
        # first: what is written meanwhile is counted twice rather than never
        unwritten = sum(max(size - self._nbytes_of(step), 0) for step, size in expected.items())
        return self._fast.free_nbytes() > nbytes + unwritten

    def _nbytes_of(self, step: int) -> int:
        try:
            return self._fast.nbytes_of(step)
        except CheckpointError:  # it is out of order, which the save finds out
            return 0

    def _removable(self, but: Collection[int]) -> Iterator[tuple[int, str]]:
        """Yield the steps that may go, in their order, and why; each is looked at anew, as saves go on meanwhile."""
        here = self._fast.steps()
        for step in here:
            with self._lock:
                may_go = step in self._torsos and not self._stays(step, but)
            if may_go:
                yield step, "complete nowhere"
        for step in here:
            with self._lock:
                may_go = step not in self._torsos and step <= self._durable_step and not self._stays(step, but)
            if may_go:
                yield step, "not newer than the durable tier's"

    def _stays(self, step: int, but: Collection[int]) -> bool:
        return step in but or self._busy[step] > 0 or step in self._awaited()

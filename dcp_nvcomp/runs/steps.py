"""The steps of a run: their directories, which hold a complete checkpoint, how one is removed, what saves refer to.

A step is removed so that it is never half visible: the mark `.removing` is published first (whoever pins the step looks
for it after the pin is there, so one of the two is seen, and if the step is pinned the mark goes again), then go the
metadata, the data files, and the mark. Whoever finds the mark goes on. A save into the same directory removes it before
it publishes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    REMOVING,
    is_stock_data_file,
    marking_directory,
    own_file,
    own_upload,
    rank_of_metadata_name,
    step_in,
)
from dcp_nvcomp.maintenance.completeness import Seen, read_seen
from dcp_nvcomp.maintenance.run_listing import COMPLETE, DAMAGED, MISNAMED, Step, steps_below
from dcp_nvcomp.runs.own_files import Abandoned
from dcp_nvcomp.runs.retention import SavedStep
from dcp_nvcomp.storage.base import Filesystem, RecursiveListing, published_name

_FIELD = "{step}"
_MOST_REFERENCES: Final = 2
EQUAL = ".equal"  # beside what a replica has saved: other replicas have saved the same


@dataclass(frozen=True)
class StepNames:
    template: str = "step-{step}"

    def __post_init__(self) -> None:
        if not isinstance(self.template, str) or self.template.count(_FIELD) != 1:
            raise ConfigurationError(f"step_template={self.template!r} must have {_FIELD} in it once.")
        rest = self.template.replace(_FIELD, "")
        if rest.startswith(".") or not re.fullmatch(r"[A-Za-z0-9._=\-]*", rest) or rest[:1].isdigit():
            raise ConfigurationError(
                f"step_template={self.template!r} must be a plain name: letters, digits, '.', '_', '=' and '-'."
            )

    def name_of(self, step: int) -> str:
        return self.template.replace(_FIELD, str(step))

    def step_of(self, name: str) -> int | None:
        """Return the step whose directory has this name; None if it is no step's."""
        return step_in(name, *self.template.split(_FIELD))


@dataclass(frozen=True)
class RunSteps:
    complete: tuple[SavedStep, ...]  # those that are complete (maintenance/run_listing.py), in ascending order
    abandoned: tuple[SavedStep, ...]  # complete ones that the run has left behind
    # not complete although they were published, or found damaged by a restore
    damaged: tuple[SavedStep, ...]
    removing: tuple[int, ...]  # those whose removal was begun; they count as gone
    # why directories that have the names of steps are not the run's: they hold other steps
    misnamed: Mapping[int, str] = field(default_factory=dict)
    # of each step the directories beside it that have marked it: they may need its data files
    marks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # newer than all that are complete: why it could not be read whether they are what the run has left behind
    unknown: Mapping[int, str] = field(default_factory=dict)


def list_steps(
    filesystem: Filesystem, names: StepNames, abandoned: Abandoned | None = None, *, seen: Seen[Step] | None = None
) -> tuple[RunSteps, Seen[Step]]:
    below = filesystem.list_below()
    for folder, error in below.failed.items():
        if names.step_of(folder) is not None:
            raise error
    seen = read_seen(filesystem, below) if seen is None else seen
    marks = (file.name.rpartition("/") for file in below.files)
    removing = {step for folder, _, name in marks if name == REMOVING and (step := names.step_of(folder)) is not None}
    ours = [file for file in below.files if names.step_of(file.name.partition("/")[0]) is not None]
    found = steps_below(filesystem, RecursiveListing(ours, below.uploads, {}), seen=seen, step_of=names.step_of)
    seen.keep([one.name for one in found])
    complete, damaged = (
        tuple(saved for saved in _saved_steps(found, names, state) if saved.step not in removing)
        for state in (COMPLETE, DAMAGED)
    )
    known = Abandoned() if abandoned is None else abandoned
    left = tuple(saved for saved in complete if known.has(saved.step, saved.save_id, saved.replica_id))
    complete = tuple(saved for saved in complete if saved not in left)
    damaged = (*damaged, *(saved for saved in left if saved.save_id in known.damaged))
    left = tuple(saved for saved in left if saved.save_id not in known.damaged)
    misnamed = {
        step: one.problem
        for one in found
        if one.state == MISNAMED and (step := names.step_of(one.name)) is not None and step not in removing
    }
    needed: dict[int, tuple[str, ...]] = {}
    for file in ours:
        folder, _, name = file.name.rpartition("/")
        step, directory = names.step_of(folder), marking_directory(name)
        if step is not None and directory is not None:
            needed[step] = (*needed.get(step, ()), directory)
    newest = max((saved.step for saved in complete), default=-1)
    unknown = {
        step: str(one.error)
        for one in found
        if one.error is not None and (step := names.step_of(one.name)) in known.saves and step not in removing
        if step is not None and step > newest
    }
    return RunSteps(complete, left, damaged, tuple(sorted(removing)), misnamed, needed, unknown), seen


def saved_step(step: int, found: Step) -> SavedStep:
    return SavedStep(
        step,
        found.saved_seconds or 0.0,
        found.metrics,
        found.save_id or "",
        found.stored_nbytes,
        found.replica_id,
        found.run_seconds,
        found.lease,
        found.shares,
    )


def _saved_steps(found: Iterable[Step], names: StepNames, state: str) -> tuple[SavedStep, ...]:
    saved = [
        saved_step(step, one) for one in found if one.state == state and (step := names.step_of(one.name)) is not None
    ]
    return tuple(sorted(saved, key=lambda one: one.step))


def remove_step(filesystem: Filesystem, is_wanted: Callable[[], bool] = lambda: False) -> bool:
    """Remove a checkpoint and what saves left beside it; other files stay, and then the directory does too."""
    filesystem.refuse_link()
    names = filesystem.list_names()
    uploads = [upload for upload in filesystem.list_uploads() if own_upload(upload.name) is not None]
    if not names and not uploads:
        filesystem.remove_directory()
        return True
    filesystem.publish(REMOVING, b"")
    try:
        stays = is_wanted()
    except BaseException:  # the next start goes on with what has the mark, without asking
        if REMOVING not in names:
            filesystem.remove([REMOVING])
        raise
    if stays:
        filesystem.remove([REMOVING])
        return False
    roots = [name for name in names if name == METADATA_NAME or rank_of_metadata_name(name) is not None]
    filesystem.remove(sorted(roots, key=lambda name: name != METADATA_NAME))
    own = {name: found.kind for name in names if (found := own_file(name)) is not None}
    filesystem.remove(sorted(name for name, kind in own.items() if kind == "metadata"))
    filesystem.remove(sorted(name for name, kind in own.items() if kind != "metadata"))
    filesystem.remove(sorted(name for name in names if is_stock_data_file(name)))
    marks = [name for name in names if name == EQUAL or published_name(name) in (EQUAL, REMOVING)]  # some cut short
    filesystem.remove(sorted(marks))
    filesystem.abort_uploads(uploads)
    filesystem.remove([REMOVING])
    filesystem.remove_directory()
    return True


class References:
    """The steps that saves of an incremental run may refer to, the newest first; the same on all ranks.

    Those were saved or restored right before. A save begins before the one before it is published, but after the one
    before that is over. So there are two, of which it takes the newest that is there, and neither is removed meanwhile.
    A step that is saved again is another one until it is published, so the next save does not refer to it.
    """

    def __init__(self, there: RunSteps) -> None:
        """Refer to the newest of the steps that are there."""
        self._steps: deque[int] = deque(maxlen=_MOST_REFERENCES)
        self._again: int | None = None  # saved last, in the place of another
        every = (*there.complete, *there.abandoned, *there.damaged)
        self._highest = max((saved.step for saved in every), default=-1)
        self.go_on_from(max((saved.step for saved in there.complete), default=None))

    def go_on_from(self, step: int | None) -> None:
        """Refer to the step that was restored, if any."""
        self._steps.clear()
        if step is not None:
            self._steps.append(step)

    def of(self, step: int) -> tuple[int, ...]:
        """Return the steps that the save of a step may refer to; those after it may refer to it."""
        found = tuple(one for one in self._steps if one not in (step, self._again))
        self._steps.appendleft(step)
        self._again = step if step <= self._highest else None
        self._highest = max(self._highest, step)
        return found

"""The directories of a run's steps: what they are called, and which hold a complete checkpoint.

<root>/step-<N>/     an ordinary checkpoint; step and metrics are in the summary in its `.metadata`
<root>/.run/         what the run keeps for itself: lease.py, pins.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.maintenance.run_listing import COMPLETE, DAMAGED, Step, steps_below
from dcp_nvcomp.runs.abandoned import Abandoned
from dcp_nvcomp.runs.keep import SavedStep
from dcp_nvcomp.runs.removal import REMOVING
from dcp_nvcomp.storage.base import Filesystem

__all__ = ["RUN_FOLDER", "RunSteps", "StepNames", "list_steps"]

RUN_FOLDER = ".run"
_FIELD = "{step}"


@dataclass(frozen=True)
class StepNames:
    """The names of the steps' directories.

    Args:
        template: a name with `{step}` in it once.

    Raises:
        ConfigurationError: it is no such name.

    Examples:
        >>> names = StepNames()
        >>> names.name_of(200), names.step_of("step-200"), names.step_of("step-200-old")
        ('step-200', 200, None)
    """

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
        """Return the name of a step's directory."""
        return self.template.replace(_FIELD, str(step))

    def step_of(self, name: str) -> int | None:
        """Return the step whose directory has this name; None if it is no step's."""
        before, after = map(re.escape, self.template.split(_FIELD))
        match = re.fullmatch(f"{before}(0|[1-9][0-9]{{0,17}}){after}", name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class RunSteps:
    """The steps that are at one place.

    Attributes:
        complete: those whose `.metadata` and data files are there, in ascending order.
        abandoned: complete ones that the run has left behind.
        damaged: those whose data files are not all there, or that a restore found damaged.
        removing: those whose removal was begun; they count as gone.
    """

    complete: tuple[SavedStep, ...]
    abandoned: tuple[SavedStep, ...]
    damaged: tuple[SavedStep, ...]
    removing: tuple[int, ...]


def list_steps(filesystem: Filesystem, names: StepNames, abandoned: Abandoned | None = None) -> RunSteps:
    """Return the steps below a run's root.

    Args:
        filesystem: the root.
        names: of the steps' directories.
        abandoned: the saves that the run has left behind.

    Raises:
        StorageError: the storage fails, or a folder of a step can't be listed.
    """
    below = filesystem.list_below()
    for folder, error in below.failed.items():
        if names.step_of(folder) is not None:
            raise error
    marks = (file.name.rpartition("/") for file in below.files)
    removing = {step for folder, _, name in marks if name == REMOVING and (step := names.step_of(folder)) is not None}
    found = steps_below(filesystem, below)
    complete, damaged = (
        tuple(saved for saved in _saved_steps(found, names, state) if saved.step not in removing)
        for state in (COMPLETE, DAMAGED)
    )
    known = Abandoned() if abandoned is None else abandoned
    left = tuple(saved for saved in complete if known.has(saved.step, saved.save_id, saved.replica_id))
    complete = tuple(saved for saved in complete if saved not in left)
    damaged = (*damaged, *(saved for saved in left if saved.step in known.damaged))
    left = tuple(saved for saved in left if saved.step not in known.damaged)
    return RunSteps(complete, left, damaged, tuple(sorted(removing)))


def _saved_steps(found: Iterable[Step], names: StepNames, state: str) -> tuple[SavedStep, ...]:
    saved = [
        SavedStep(step, one.saved_seconds or 0.0, one.metrics, one.save_id or "", one.stored_nbytes, one.replica_id)
        for one in found
        if one.state == state and (step := names.step_of(one.name)) is not None
    ]
    return tuple(sorted(saved, key=lambda one: one.step))

"""The steps of a run: their directories, which hold a complete checkpoint, which are kept and why, how one is removed.

A step is removed so that it is never half visible: the mark `.removing` is published first (whoever pins the step looks
for it after the pin is there, so one of the two is seen, and if the step is pinned the mark goes again), then go the
metadata, the data files, and the mark. Whoever finds the mark goes on. A save into the same directory removes it before
it publishes.

A rule is a `Keep`, or any callable that is given the complete steps and returns those to keep. What may not go whatever
a rule says (the newest step, pinned steps, those in use) is added by tiers/durable.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.format.names import METADATA_NAME, is_stock_data_file, own_file, rank_of_metadata_name
from dcp_nvcomp.maintenance.completeness import Seen, read_seen
from dcp_nvcomp.maintenance.run_listing import COMPLETE, DAMAGED, MISNAMED, Step, steps_below
from dcp_nvcomp.runs.own_files import REMOVING, Abandoned
from dcp_nvcomp.storage.base import Below, Filesystem, published_name

_FIELD = "{step}"
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
        before, after = map(re.escape, self.template.split(_FIELD))
        match = re.fullmatch(f"{before}(0|[1-9][0-9]{{0,17}}){after}", name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class RunSteps:
    complete: tuple[SavedStep, ...]  # those that are complete (maintenance/run_listing.py), in ascending order
    abandoned: tuple[SavedStep, ...]  # complete ones that the run has left behind
    # not complete although they were published, or found damaged by a restore
    damaged: tuple[SavedStep, ...]
    removing: tuple[int, ...]  # those whose removal was begun; they count as gone
    # why directories that have the names of steps are none of the run: they hold other steps
    misnamed: Mapping[int, str] = field(default_factory=dict)


def list_steps(
    filesystem: Filesystem, names: StepNames, abandoned: Abandoned | None = None, *, seen: Seen | None = None
) -> tuple[RunSteps, Seen]:
    below = filesystem.list_below()
    for folder, error in below.failed.items():
        if names.step_of(folder) is not None:
            raise error
    seen = read_seen(filesystem, below) if seen is None else seen
    marks = (file.name.rpartition("/") for file in below.files)
    removing = {step for folder, _, name in marks if name == REMOVING and (step := names.step_of(folder)) is not None}
    ours = [file for file in below.files if names.step_of(file.name.partition("/")[0]) is not None]
    found = steps_below(filesystem, Below(ours, below.uploads, {}), seen=seen, step_of=names.step_of)
    seen.keep([one.name for one in found])
    complete, damaged = (
        tuple(saved for saved in _saved_steps(found, names, state) if saved.step not in removing)
        for state in (COMPLETE, DAMAGED)
    )
    known = Abandoned() if abandoned is None else abandoned
    left = tuple(saved for saved in complete if known.has(saved.step, saved.save_id, saved.replica_id))
    complete = tuple(saved for saved in complete if saved not in left)
    damaged = (*damaged, *(saved for saved in left if saved.step in known.damaged))
    left = tuple(saved for saved in left if saved.step not in known.damaged)
    misnamed = {
        step: one.problem
        for one in found
        if one.state == MISNAMED and (step := names.step_of(one.name)) is not None and step not in removing
    }
    return RunSteps(complete, left, damaged, tuple(sorted(removing)), misnamed), seen


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
    uploads = filesystem.list_uploads()
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


@dataclass(frozen=True)
class SavedStep:
    """A complete checkpoint of a run.

    Attributes:
        step: the step of training.
        saved_seconds: when it was saved, in seconds since 1970, by the clock of the storage.
        metrics: of that step, as given to `CheckpointManager.save`.
        save_id: id of the save; empty if the checkpoint does not tell, as those of stock DCP.
        nbytes: size of its data files.
        replica_id: what it has in common with what other replicas saved of this step; empty if there are none.
        run_seconds: how long the run had been under way when it was saved, without what lay between its jobs, and
            without what was lost when one ended; None if the step does not say.
        lease: which of the run's managers saved it, counted by their leases; 0 if the step does not say.
    """

    step: int
    saved_seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    save_id: str = ""
    nbytes: int = 0
    replica_id: str = ""
    run_seconds: float | None = None
    lease: int = 0

    def seconds_since(self, earlier: SavedStep) -> float:
        """Return how long after another step of the run it was saved; less than 0 if their times contradict that."""
        if self.run_seconds is not None and earlier.run_seconds is not None:
            return self.run_seconds - earlier.run_seconds
        return self.saved_seconds - earlier.saved_seconds


KeepRule: TypeAlias = Callable[[Sequence[SavedStep]], Collection[int]]


@dataclass(frozen=True)
class Best:
    """Keep the best steps by a metric.

    Args:
        metric: name of a metric, as in `metrics=` of `CheckpointManager.save`.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are.
        count: how many. Of equal values the later step counts as better. Steps without the metric, or with NaN, are
            never among the best.

    Raises:
        ConfigurationError: a value can't work.

    Examples:
        >>> steps = [SavedStep(step, 0.0, {"loss": loss}) for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))]
        >>> Best("loss", "min", 2).of(steps)
        [2, 3]
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigurationError(f"Best(metric={self.metric!r}): name a metric, such as 'loss'.")
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f"Best(mode={self.mode!r}) must be 'min' or 'max'.")
        _check_count("Best", "count", self.count)

    def of(self, steps: Sequence[SavedStep]) -> list[int]:
        """Return the best steps, the best one first."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = ((step.metrics.get(self.metric, math.nan), step.step) for step in steps)
        ranked = sorted((sign * value, -step) for value, step in values if not math.isnan(value))
        return [-step for _, step in ranked[: self.count]]


@dataclass(frozen=True)
class Keep:
    """What to keep of a run: each step for which one of the rules speaks.

    Args:
        last: the newest steps, this many; at least one, since the newest is never removed.
        every: all steps that are multiples of this number.
        newer_than: all steps that were saved less than this long before the newest one; a `timedelta`, or seconds.
            It counts the time that the run was under way (`SavedStep.run_seconds`), which no machine's clock changes;
            for steps that do not say it, when they were saved. A step that seems later than the newest is not old.
        best: the best by a metric, or by each of several.
        milestones: these steps, for good.

    Raises:
        ConfigurationError: a value can't work.

    Examples:
        >>> steps = [SavedStep(step, float(step), {"loss": 1 / (step + 1)}) for step in range(0, 100, 10)]
        >>> keep = Keep(last=2, every=50, best=Best("loss", "max"), milestones=(10,))
        >>> {step: ", ".join(why) for step, why in keep.reasons(steps).items()}
        {0: 'every 50, best loss', 10: 'milestone', 50: 'every 50', 80: 'last 2', 90: 'last 2'}
    """

    last: int = 1
    every: int | None = None
    newer_than: timedelta | float | None = None
    best: Best | tuple[Best, ...] | None = None
    milestones: Collection[int] = ()

    def __post_init__(self) -> None:
        _check_count("Keep", "last", self.last)
        if self.every is not None:
            _check_count("Keep", "every", self.every)
        if self.newer_than is not None and not self._newer_than_seconds > 0:
            raise ConfigurationError(f"Keep(newer_than={self.newer_than!r}) must be a positive time.")
        if any(not isinstance(best, Best) for best in self._bests):
            raise ConfigurationError(f"Keep(best={self.best!r}) must be a Best, or a tuple of several.")
        if isinstance(self.milestones, str) or any(not _is_whole(step) for step in self.milestones):
            raise ConfigurationError(f"Keep(milestones={self.milestones!r}) must be step numbers.")

    @property
    def _bests(self) -> tuple[Best, ...]:
        return () if self.best is None else self.best if isinstance(self.best, tuple) else (self.best,)

    @property
    def _newer_than_seconds(self) -> float:
        given = self.newer_than
        if isinstance(given, timedelta):
            return given.total_seconds()
        return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else math.nan

    def reasons(self, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
        """Return why each step is kept; those that no rule keeps are not in it.

        Args:
            steps: the complete steps of a run, in ascending order.
        """
        found: dict[int, list[str]] = {step.step: [] for step in steps}
        for step in steps[-self.last :]:
            found[step.step].append(f"last {self.last}")
        if self.every is not None:
            for number in found:
                if number % self.every == 0:
                    found[number].append(f"every {self.every}")
        if self.newer_than is not None and steps:
            for step in steps:
                if steps[-1].seconds_since(step) < self._newer_than_seconds:
                    found[step.step].append("newer")
        for best in self._bests:
            for number in best.of(steps):
                found[number].append(f"best {best.metric}")
        for number in found.keys() & set(self.milestones):
            found[number].append("milestone")
        return {number: tuple(reasons) for number, reasons in found.items() if reasons}

    def __str__(self) -> str:
        """Return its rules, as messages name them."""
        rules = [f"last {self.last}"]
        if self.every is not None:
            rules.append(f"every {self.every}")
        if self.newer_than is not None:
            rules.append(f"newer than {timedelta(seconds=self._newer_than_seconds)} before the newest")
        rules += [f"best {best.count} by {best.metric} ({best.mode})" for best in self._bests]
        return ", ".join([*rules, *(["milestones"] if self.milestones else [])])

    def missing_metrics(self, steps: Sequence[SavedStep]) -> list[str]:
        """Return the metrics by which the best are kept and that none of the steps has: the name may be misspelled."""
        return [best.metric for best in self._bests if not any(best.metric in step.metrics for step in steps)]

    def __call__(self, steps: Sequence[SavedStep]) -> Collection[int]:
        """Return the steps to keep."""
        return self.reasons(steps).keys()


NEWEST: Final = "newest"


def why_not(rule: Keep | KeepRule | None) -> str:
    return f"no rule keeps it: {rule}" if isinstance(rule, Keep) else "the rule does not keep it"


def reasons_to_keep(rule: Keep | KeepRule | None, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
    if rule is None:
        found: dict[int, tuple[str, ...]] = {step.step: ("all",) for step in steps}
    elif isinstance(rule, Keep):
        found = rule.reasons(steps)
    else:
        wanted = set(rule(steps))
        found = {step.step: ("rule",) for step in steps if step.step in wanted}
    if steps and steps[-1].step not in found:
        found[steps[-1].step] = (NEWEST,)
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_count(owner: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{owner}({name}={value!r}) must be a positive whole number.")

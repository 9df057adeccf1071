"""Which steps of a run stay, and why: the rules, and the decision about the steps that were just listed.

A rule is a `Keep`, or any callable that is given the complete steps and returns those to keep. Whatever it says, the
newest complete step stays (tiers/durable.py opens it first), and so do pinned steps and those in use. `prune` and a
manager decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from dcp_nvcomp.errors import ConfigurationError


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
        shares: names of the directories, beside its own, whose data files it needs too.
    """

    step: int
    saved_seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    save_id: str = ""
    nbytes: int = 0
    replica_id: str = ""
    run_seconds: float | None = None
    lease: int = 0
    shares: tuple[str, ...] = ()

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


@dataclass(frozen=True)
class Doomed:
    why: Mapping[int, str]  # why those go that nothing keeps, by step, in ascending order
    kept: Mapping[int, tuple[str, ...]]  # why the others are kept

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.why)


def what_goes(
    rule: Keep | KeepRule | None,
    complete: Sequence[SavedStep],
    abandoned: Collection[SavedStep],
    pinned: Callable[[], Collection[int]],
    shared: Callable[[SavedStep], Collection[int]] = lambda saved: (),
    needed: Callable[[int], str] = lambda step: "",
) -> Doomed:
    """Return what a rule says of complete steps, but for what is pinned, and what steps that stay share.

    Args:
        rule: what is kept; by default all.
        complete: the complete steps, in ascending order.
        abandoned: steps that the run has left behind.
        pinned: returns the steps that are pinned; called if anything would go.
        shared: returns the steps whose data files a step needs too.
        needed: returns which checkpoints that are no steps need files of a step that would go; "" if none does.
    """
    kept = reasons_to_keep(rule, complete)
    why = {saved.step: why_not(rule) for saved in complete if saved.step not in kept}
    for saved in abandoned:  # no rule keeps them; without a rule they stay
        if rule is None:
            kept[saved.step] = ("abandoned",)
        else:
            why[saved.step] = "the run has left it behind: it went back to an earlier step, and saved from there"
    staying = frozenset(pinned()) if why else frozenset()
    for step in staying & why.keys():
        kept[step] = ("pinned",)
    for step in why.keys() - kept.keys():
        if others := needed(step):
            kept[step] = (f"shared by {others}",)
    needs = {saved.step: shared(saved) for saved in (*complete, *abandoned)} if why else {}
    looked = list(kept)
    for step in looked:  # which grows
        for other in needs.get(step, ()):
            if other in why and other not in kept:
                kept[other] = (f"shared by {step}",)
                looked.append(other)
    return Doomed({step: why[step] for step in sorted(why) if step not in kept}, kept)

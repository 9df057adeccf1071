"""What was saved, what must be restorable, and what must still be there.

Saves have tags, later ones larger ones. A save is *sure* while it is whole and the run has not gone back behind it. One
of which that is not known, because a job died while it went back, is unsure: it may come back, and need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dcp_nvcomp import Keep

from .look import Look, Seen

Place = tuple[int, int]  # step and tag


class Finding(AssertionError):
    """Something is not as it must be."""


@dataclass(frozen=True)
class Known:
    """A save that some rank began."""

    step: int
    line: tuple[int, ...]  # the saves that it comes from
    loss: float  # its metric


@dataclass(frozen=True)
class Before:
    """What is there when a job begins."""

    sure: frozenset[Place]  # what is whole and part of the run
    possible: frozenset[Place]  # what is there, whole or not
    durable: Mapping[int, int]  # the tags of the whole ones in the durable tier, by step
    seeming: Mapping[int, int]  # those too whose files have their sizes, and other bytes: rules count them
    run_seconds: Mapping[Place, float]  # how long the run had been under way when each of these was saved

    @property
    def newest(self) -> Place | None:
        """The newest of the sure ones."""
        return max(self.sure, default=None)


@dataclass
class Oracle:
    """What is known of a run."""

    look: Look = field(default_factory=Look)  # looks at directories
    known: dict[int, Known] = field(default_factory=dict)  # the saves, by tag
    left: set[int] = field(default_factory=set)  # the saves that the run has left behind
    unsure: set[int] = field(default_factory=set)  # those that it may have left behind
    pins: set[int] = field(default_factory=set)  # steps that are pinned

    def before(self, run: Path, nodes: Iterable[Path]) -> Before:
        """Look at what a job finds on its nodes and in the durable tier."""
        durable = self.look.durable(run)
        seen = [*durable.values(), *self.look.on_nodes(nodes)]
        whole = {step: one.root.tag for step, one in durable.items() if one.is_whole}
        seeming = {step: one.root.tag for step, one in durable.items() if one.is_there}
        times = {place: durable[place[0]].root.run_seconds for place in seeming.items()}
        return Before(
            frozenset(_place(one) for one in seen if one.is_whole and self._is_sure(one.root.tag)),
            frozenset(map(_place, seen)),
            whole,
            seeming,
            times,
        )

    def _is_sure(self, tag: int) -> bool:
        return tag in self.known and tag not in self.left and tag not in self.unsure

    def saving(self, step: int, tag: int, line: Sequence[int], loss: float) -> None:
        """Note that a save began."""
        self.known.setdefault(tag, Known(step, tuple(line), loss))

    def check_restored(self, before: Before, word: Mapping[str, object], asked: int | None) -> None:
        """Check what a restore gave."""
        step, tag = word["step"], word["tag"]
        if step is None:
            _expect(before.newest is None or asked is not None, f"nothing was restored, and {before.newest} is whole")
            return
        assert isinstance(step, int) and isinstance(tag, int)
        self.check_values(word)
        _expect((step, tag) in before.possible, f"{(step, tag)} was restored, and was not there: {before.possible}")
        if asked is not None:
            _expect(step == asked, f"step {step} was restored, and {asked} was asked for")
            return
        _expect(tag not in self.left, f"{(step, tag)} was restored, and the run has left it behind")
        newest = before.newest
        _expect(newest is None or newest <= (step, tag), f"{(step, tag)} was restored, and {newest} is whole")

    def check_values(self, word: Mapping[str, object]) -> None:
        """Check that what was restored is what was saved."""
        tag = word["tag"]
        assert isinstance(tag, int)
        _expect(not word["wrong"], f"wrong values: {word}")
        _expect(tag in self.known, f"values of a save that nobody made: {word}")
        known = self.known[tag]
        _expect(known.step == word["step"], f"step {word['step']} has the values of step {known.step}: {word}")
        _expect(known.line == tuple(word["line"]), f"it comes from {known.line}: {word}")  # type: ignore[arg-type]

    def went_back(self, before: Before, restored: Place, newer: Iterable[Place], *, is_sure: bool) -> None:
        """Note that a job restored a save, and began another after it."""
        step, tag = restored
        behind = {other for number, other in {*before.sure, *newer} if number > step}
        others = {other for other, known in self.known.items() if known.step > step and other <= max(behind, default=0)}
        if tag in self.left:
            (self.left if is_sure else set()).discard(tag)
            self.unsure |= set() if is_sure else {tag}
        else:
            self.unsure.discard(tag)
        if is_sure:
            self.left |= behind & {other for number, other in before.sure if number > step}
        self.unsure |= (behind | others) - self.left

    def check_kept(
        self,
        before: Before,
        after: Before,
        confirmed: Iterable[Place],
        destroyed: Iterable[int],
        rules: Sequence[Keep | None],
    ) -> None:
        """Check that nothing is gone from the durable tier that rules or pins keep."""
        there = {**before.durable, **dict(confirmed), **after.durable}
        times = {**before.run_seconds, **after.run_seconds}
        counted = sorted(step for step, tag in there.items() if tag not in self.left)
        sure = [step for step in counted if self._is_sure(there[step])]
        lost = {step for step in sure if step not in set(destroyed) and after.durable.get(step, -1) < there[step]}
        tags = {**before.seeming, **after.seeming, **there}
        seeming = sorted(step for step, tag in tags.items() if tag in self.known and tag not in self.left)
        kept = set(counted)
        for rule in rules:  # whether or not a step's bytes were harmed by then
            kept &= self._kept(rule, counted, there, times) & self._kept(rule, seeming, tags, times)
        missing = lost & (kept | self.pins)
        _expect(
            not missing,
            f"lost of the durable tier: {[(step, there[step]) for step in sorted(missing)]}; it had {there}, and has "
            f"{dict(after.durable)}",
        )

    def _kept(
        self, rule: Keep | None, steps: Sequence[int], tags: Mapping[int, int], times: Mapping[Place, float]
    ) -> set[int]:
        """Return what a rule keeps whichever of the steps there were when it was asked."""
        if rule is None:
            return set(steps)
        kept = set(steps[-rule.last :])
        kept |= {step for step in steps if rule.every is not None and step % rule.every == 0}
        kept |= set(rule.milestones) & set(steps)
        for best in (rule.best,) if rule.best is not None and not isinstance(rule.best, tuple) else ():
            sign = 1 if best.mode == "min" else -1
            kept |= set(sorted(steps, key=lambda step: sign * self.known[tags[step]].loss)[: best.count])
        if isinstance(rule.newer_than, float):
            for number, step in enumerate(steps):
                since = [times.get((later, tags[later]), float("inf")) - rule.newer_than for later in steps[number:]]
                kept |= {step} if all(times.get((step, tags[step]), 0.0) > one for one in since) else set()
        return kept


def _place(seen: Seen) -> Place:
    return seen.root.step, seen.root.tag


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Finding(what)

"""The steps of a soak, and what each must lead to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import errors
from tests.conformance.sabotage import Sabotage

from . import actions, places
from .places import Place
from .ranks import Job, Outcome, Unmet, errors_of, run_jobs

CODECS = ("auto", "auto", "planes-zstd", "planes-deflate", "zstd", "none")
PATHS = 4


class Lie(AssertionError):
    """The product said or did something that is not so."""


def expect(holds: bool, *what: Any) -> None:
    """Raise Lie unless it holds."""
    if not holds:
        raise Lie(" ".join(map(str, what)))


def causes_of(error: BaseException) -> list[BaseException]:
    """Return what the ranks raised inside a CheckpointException, or the error itself if it is another."""
    if isinstance(error, CheckpointException):
        return [wrapped[0] for wrapped in error.failures.values()]
    return [error]


def describe(outcomes: Sequence[Outcome]) -> str:
    """For the message of a lie."""
    return "\n".join(
        f"rank {rank}: {'killed' if outcome.killed else outcome.trace or outcome.value!r}"
        for rank, outcome in enumerate(outcomes)
    )


class Model:
    """What each checkpoint may hold, and steps that change and test it."""

    def __init__(self, place: Place, seed: int, set_faults: Callable[[dict[str, float]], None] | None = None) -> None:
        self.place = place
        self.draw = random.Random(seed)
        self.family = {f"p{number}": seed * 100 + number for number in range(PATHS)}
        # what a load may give; None: that there is no checkpoint
        self.possible: dict[str, list[int | None]] = {path: [None] for path in self.family}
        self.next_content = 1
        self.save_seconds = 0.5
        self.counts: Counter[str] = Counter()
        self._set_faults = set_faults

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> str:
        """Do something at random and check what became of it."""
        path = self.draw.choice(list(self.family))
        steps: dict[Callable[[str], None], int] = {
            self.save: 4,
            self.killed_save: 5,
            self.failing_save: 2,
            self.load: 5,
            self.two_writers: 2,
            self.reader_during_save: 3,
            self.damage: 4,
            self.verify: 2,
            self.clean: 2,
            self.clean_during_save: 1,
        }
        (chosen,) = self.draw.choices(list(steps), list(steps.values()))
        if self._set_faults is not None:
            self._set_faults(self._random_faults())
        before, content = list(self.possible[path]), self.next_content
        try:
            chosen(path)
        except Unmet:
            self.counts["unmet"] += 1
            self.possible[path] = [*before, *range(content + 1, self.next_content + 1)]
            self._settle(path)
        self.counts[chosen.__name__] += 1
        return f"{chosen.__name__} {path}"

    def _random_faults(self) -> dict[str, float]:
        draw = self.draw
        return {
            "unavailable": draw.choice([0.0, 0.1, 0.2, 0.4]),
            "broken": draw.choice([0.0, 0.05]),
            "reset": draw.choice([0.0, 0.05]),
            "late": draw.choice([0.0, 0.02]),
            "lost": draw.choice([0.0, 0.05]),
            "truncated": draw.choice([0.0, 0.05]),
            "shortened": draw.choice([0.0, 0.02]),
            "flipped": draw.choice([0.0, 0.05]),
        }

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _save_job(self, path: str, content: int, *, most_ranks: int = 3, **more: Any) -> Job:
        draw = self.draw
        writer_options = {
            "codec": draw.choice(CODECS),
            "thread_count": draw.choice([1, 2]),
            "single_file_per_rank": draw.random() < 0.7,
            "sync_files": draw.random() < 0.5,
            **more.pop("writer_options", {}),
        }
        world_size = draw.randint(1, most_ranks)
        options = {
            "how": draw.choice(["sync", "sync", "async", "staged", "copied"]),
            "writer_options": writer_options,
            **more,
        }
        arguments = (self.place, path, self.family[path], content, options)
        return Job(_save, arguments, world_size)

    def _load_job(
        self, path: str, candidates: Sequence[int | None], *, most_ranks: int = 3, plain: bool = False
    ) -> Job:
        contents = [content for content in candidates if content is not None] or [0]
        place = self.place.plain() if plain else self.place
        verify = self.draw.choice(["stored", "full"])
        arguments = (place, path, self.family[path], contents, self.draw.randrange(1 << 30), verify)
        return Job(_load, arguments, self.draw.randint(1, most_ranks))

    def _alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What one process returns, through no faults."""
        ((outcome,),) = run_jobs(Job(function, (self.place.plain(), *arguments)))
        expect(outcome.error is None, describe([outcome]))
        return outcome.value

    def _new_content(self) -> int:
        self.next_content += 1
        return self.next_content

    def _settle(self, path: str) -> int | None:
        """Find out, through no faults, which of the contents that it may hold a checkpoint holds."""
        (outcomes,) = run_jobs(self._load_job(path, self.possible[path], most_ranks=1, plain=True))
        held = self._held(path, outcomes, self.possible[path], may_fail=False)
        self.possible[path] = [held]
        return held

    def _held(
        self, path: str, outcomes: Sequence[Outcome], possible: Sequence[int | None], *, may_fail: bool
    ) -> int | None:
        """Which content a load gave; Lie if it may not be. With `may_fail`, -1 where it failed in an honest way."""
        failed = errors_of(outcomes)
        if failed:
            expect(len(failed) == len(outcomes), "only some ranks failed:", describe(outcomes))
            causes = [cause for error in failed for cause in causes_of(error)]
            if all(isinstance(cause, errors.CheckpointNotFoundError) for cause in causes) and None in possible:
                return None
            honest = may_fail and all(isinstance(cause, errors.CheckpointError) for cause in causes)
            expect(honest, f"{path} may hold {possible}:", describe(outcomes))
            self.counts["honest failure"] += 1
            return -1
        fits = set.intersection(*[set(outcome.value) for outcome in outcomes])
        expect(bool(fits), f"{path} may hold {possible}; what was loaded is something else:", describe(outcomes))
        return next(iter(fits))

    # --- steps ------------------------------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """A save that nothing disturbs, but the faults of the place; sometimes over nothing only."""
        content, before = self._new_content(), self.possible[path]
        overwrite = self.draw.random() < 0.8
        (outcomes,) = run_jobs(self._save_job(path, content, writer_options={"overwrite": overwrite}))
        failed = errors_of(outcomes)
        if not failed:
            expect(overwrite or None in before, f"overwrite=False replaced {before} at {path}")
            self.possible[path] = [content]
            return
        expect(len(failed) == len(outcomes), "only some ranks failed:", describe(outcomes))
        causes = [cause for error in failed for cause in causes_of(error)]
        if not overwrite and before != [None]:
            exists = (errors.CheckpointExistsError, errors.ConcurrentSaveError)
            if any(isinstance(cause, exists) for cause in causes):
                self.possible[path] = [held for held in before if held is not None]
                return
        expect(self.place.faulty, "a save failed for no reason:", describe(outcomes))
        expect(all(isinstance(cause, errors.CheckpointError) for cause in causes), describe(outcomes))
        self.counts["honest failure"] += 1
        self.possible[path] = [*before, content]

    def killed_save(self, path: str) -> None:
        """One rank is killed at any time; the others end too, and what was there stays or what is new is whole."""
        content = self._new_content()
        job = self._save_job(path, content)
        job.victim = self.draw.randrange(job.world_size)
        job.kill_after_seconds = self.draw.uniform(0.0, 1.5 * self.save_seconds)
        (outcomes,) = run_jobs(job)
        if outcomes[job.victim].killed:
            self.counts["killed"] += 1
            self.save_seconds *= 1.03  # so that about as many are killed as are too fast
            self.possible[path] = [*self.possible[path], content]
            self._settle(path)
        elif not errors_of(outcomes):
            self.save_seconds /= 1.06
            self.possible[path] = [content]
        else:
            expect(self.place.faulty, describe(outcomes))
            self.possible[path] = [*self.possible[path], content]

    def failing_save(self, path: str) -> None:
        """One rank raises: all must hear of it, and nothing changes."""
        job = self._save_job(path, self._new_content())
        options = job.arguments[-1]
        options["failing_rank"] = self.draw.randrange(job.world_size)
        (outcomes,) = run_jobs(job)
        failed = errors_of(outcomes)
        expect(len(failed) == len(outcomes), "not all ranks failed:", describe(outcomes))
        causes = [cause for error in failed for cause in causes_of(error)]
        told = any(_is_sabotage(cause) for cause in causes)
        expect(told or self.place.faulty, describe(outcomes))
        self._settle(path)

    def load(self, path: str) -> None:
        """A load by any number of ranks, with any placements."""
        (outcomes,) = run_jobs(self._load_job(path, self.possible[path]))
        held = self._held(path, outcomes, self.possible[path], may_fail=self.place.faulty)
        self.possible[path] = [self._settle(path) if held == -1 else held]

    def two_writers(self, path: str) -> None:
        """With overwrite both succeed and one of them stays; without, exactly one does.

        On S3 one of two overwriting saves of the same moment may hear that it is not known which was last.
        """
        overwrite = self.draw.random() < 0.6 or self._settle(path) is not None
        before = list(self.possible[path])
        both = [self._new_content(), self._new_content()]
        options = {"overwrite": overwrite}
        found = run_jobs(*[self._save_job(path, one, most_ranks=2, writer_options=options) for one in both])
        won = [one for one, outcomes in zip(both, found, strict=True) if not errors_of(outcomes)]
        text = "\n".join(map(describe, found))
        if not self.place.faulty:
            causes = [cause for outcomes in found for error in errors_of(outcomes) for cause in causes_of(error)]
            unsure = self.place.options and all(isinstance(cause, errors.ConcurrentSaveError) for cause in causes)
            good = won == both or (unsure and len(won) == 1) if overwrite else len(won) == 1
            expect(good, f"of {both}, {won} were saved:", text)
        elif not overwrite:
            expect(len(won) <= 1, f"of {both}, {won} were saved:", text)
        # with faults, one that reported an error may be there nevertheless; what was there before, if none succeeded
        lost = [one for one in both if one not in won] if self.place.faulty else []
        self.possible[path] = [*won, *lost, *([] if won else before)]
        self._settle(path)

    def reader_during_save(self, path: str) -> None:
        """A load beside a save gives the old or the new, or says that it was replaced."""
        before, content = self.possible[path], self._new_content()
        save, load = self._save_job(path, content, most_ranks=2), self._load_job(path, [*before, content], most_ranks=2)
        saved, loaded = run_jobs(save, load)
        if self.place.faulty and errors_of(saved):
            self.possible[path] = [*before, content]
        else:
            expect(not errors_of(saved), describe(saved))
            self.possible[path] = [content]
        failed = errors_of(loaded)
        causes = [cause for error in failed for cause in causes_of(error)]
        if failed and all(isinstance(cause, errors.CheckpointReplacedError) for cause in causes):
            expect(before != [None], describe(loaded))
            self.counts["replaced"] += 1
        else:
            self._held(path, loaded, [*before, content], may_fail=self.place.faulty)
        self._settle(path)

    def damage(self, path: str) -> None:
        """A file is harmed: loads must notice or not be concerned, `verify` must notice; then it is mended."""
        held = self._settle(path)
        if held is None:
            return
        named = self._alone(actions.named_files, path)
        name = self.draw.choice([".metadata", named[0], *named[1:], *named[1:]])
        how, data = self._alone(places.break_file, path, name, self.draw.randrange(1 << 30))
        (outcomes,) = run_jobs(self._load_job(path, [held], most_ranks=1, plain=True))
        if self._held(path, outcomes, [held], may_fail=True) == -1:
            expect(name != named[0], "the copy of the metadata was harmed, and the load failed:", describe(outcomes))
        findings = self._alone(actions.verify, path)
        expect(bool(findings), f"{name} of {path} was harmed ({how}), and verify saw nothing")
        if name == ".metadata":
            outcome = self._alone(actions.recover, path, named[0][2:-9])
            expect(outcome == "recovered", f"{name} of {path} was harmed ({how}), and recover said {outcome}")
        elif self.draw.random() < 0.5:
            try:
                self.save(path)
            finally:
                # where it failed; and where a fault has kept it from removing this file, which `clean` would refuse
                failed = self.possible[path] == [held] or len(self.possible[path]) > 1
                if failed or name in self._alone(places.list_files, path):
                    self._alone(places.write_file, path, name, data)
        else:
            self._alone(places.write_file, path, name, data)
        self._settle(path)

    def verify(self, path: str) -> None:
        """An undamaged checkpoint is found to be so."""
        if self._settle(path) is not None:
            findings = self._alone(actions.verify, path)
            expect(not findings, f"verify saw damage at {path} where none was done: {findings}")

    def clean(self, path: str) -> None:
        """Days later, all that is left is what the checkpoint needs."""
        if self._settle(path) is None:
            return
        self.counts["orphans"] += self._alone(actions.clean_later, path)
        left, named = self._alone(places.list_files, path), self._alone(actions.named_files, path)
        expect(left == sorted([".metadata", *named]), f"clean left {left} at {path}, which needs {named}")
        self._settle(path)

    def clean_during_save(self, path: str) -> None:
        """What a save under way has written is too young to go."""
        if self._settle(path) is None:
            return
        content = self._new_content()
        saved, cleaned = run_jobs(
            self._save_job(path, content, most_ranks=2), Job(actions.clean_now, (self.place.plain(), path))
        )
        expect(not errors_of(cleaned) and cleaned[0].value == 0, describe(cleaned))
        if not errors_of(saved):
            self.possible[path] = [content]
        else:
            expect(self.place.faulty, describe(saved))
            self.possible[path] = [*self.possible[path], content]
        self._settle(path)


def _is_sabotage(error: BaseException) -> bool:
    """True for what a rank raised on purpose, and for our error that names it."""
    named = isinstance(error, errors.RankFailedError) and "Sabotage: resolve_data" in str(error)
    return named or isinstance(error, Sabotage)


def _save(place: Place, path: str, family: int, seed: int, options: dict[str, Any]) -> None:
    actions.save(place, path, family, seed, **options)


def _load(place: Place, path: str, family: int, candidates: list[int], seed: int, verify: str) -> list[int]:
    return actions.load(place, path, family, candidates, seed, verify=verify)

"""A soak of training runs: job after job on one run, on drawn ranks and nodes, killed at drawn times.

draw nodes, lose one, damage a file -> what must come back, by the files alone (tests/runs/kills/oracle.py)
a job restores, and must find that bit for bit -> saves some steps -> a rank or a node is killed, or it ends
what the rules keep is still there
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_nvcomp import CheckpointManager, Keep
from tests.runs import jobs
from tests.runs.kills import oracle, processes

__all__ = ["soak_runs"]

EVERY, FAST_EVERY, KEPT, FAST_KEPT = 20, 10, 3, 2
SHAPES = ((0, 0, 1, 1), (0, 1), (0, 0), (0, 1, 2), (0,))  # the nodes of the ranks
MOST_NODES = 4


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        number: of the job.
        run: the durable tier.
        node_of: the directory of each rank's node.
        copies: on how many peers files are.
        first: the step that it saves first if there is nothing to restore.
        count: how many steps it saves.
        victims: the ranks that are killed.
        after_seconds: when; counted from the restore.
    """

    number: int
    run: Path
    node_of: tuple[Path, ...]
    copies: int
    first: int
    count: int
    victims: tuple[int, ...]
    after_seconds: float


def train(job: Job, where: Path) -> tuple[int, int] | None:
    """Restore and save, as one rank; return the step that was restored, and the seed of its values."""
    node = job.node_of[dist.get_rank()]
    with CheckpointManager(
        job.run,
        every=EVERY,
        keep=Keep(last=KEPT),
        fast=node,
        fast_every=FAST_EVERY,
        fast_keep=FAST_KEPT,
        copies=min(job.copies, len(set(job.node_of)) - 1),
        node=node.name,
        run_id="soak",
        preemption_signals=(),
    ) as manager:
        state = jobs.state_of(123)
        restored = manager.restore(state)
        found = None if restored is None else (restored.step, state["step"])
        if found is not None:
            jobs.assert_state_of(found[1], state)
        if job.victims and dist.get_rank() == job.victims[0]:
            threading.Timer(job.after_seconds, processes.strike, (where, job.victims)).start()
        first = job.first if found is None else found[0] + FAST_EVERY
        for step in range(first, first + job.count * FAST_EVERY, FAST_EVERY):
            state = jobs.state_of(1_000_000 * job.number + step)
            manager.save(step, state)
            jobs.spoil(state)
            time.sleep(0.03)  # a step of training
        manager.wait()
    return found


class RunSoak:
    """The run, and what must be true of it.

    Args:
        directory: an empty directory.
        seed: of the draws.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.run = directory, directory / "run"
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.number = 0

    def step(self) -> str:
        """Run one job; return what it was.

        Raises:
            AssertionError: something was not as it must be.
        """
        self.number += 1
        nodes = self._nodes()
        shape = self.random.choice(SHAPES)
        node_of = tuple(nodes[one] for one in shape)
        here = list(dict.fromkeys(node_of))
        durable, fast = oracle.complete_in(self.run), oracle.complete_on_nodes(here)
        newest = max(durable | fast, default=None)
        victims, lost = self._victims(shape, here)
        copies, count, after = self.random.choice((0, 1, 1)), self.random.randint(1, 6), self.random.random() * 1.2
        job = Job(self.number, self.run, node_of, copies, FAST_EVERY, count, victims, after)
        ends = processes.run(train, job, world_size=len(shape), directory=self.directory / f"ranks-{self.number}")
        self._check_ends(ends, newest, has_victims=bool(victims))
        died = any(end.exit_code != 0 for end in ends)
        if died and lost is not None:
            shutil.rmtree(lost, ignore_errors=True)
            self.counts["nodes lost"] += 1
        self._check_left(durable)
        shutil.rmtree(self.directory / f"ranks-{self.number}")
        self.counts["killed" if died else "ended"] += 1
        return f"job {self.number}: {len(shape)} ranks on {len(here)} nodes, from step {newest}, {victims} killed"

    def _nodes(self) -> list[Path]:
        """Return the nodes that jobs may use: some are new, some have lost what they had."""
        nodes = [self.directory / f"node-{number}" for number in range(MOST_NODES)]
        self.random.shuffle(nodes)
        if self.random.random() < 0.3:
            shutil.rmtree(nodes[0], ignore_errors=True)
            self.counts["nodes new"] += 1
        return nodes

    def _victims(self, shape: Sequence[int], here: Sequence[Path]) -> tuple[tuple[int, ...], Path | None]:
        """Draw who is killed, and the directory that is lost with a node."""
        drawn = self.random.random()
        if drawn < 0.25:
            return (), None
        victim = self.random.randrange(len(shape))
        if drawn < 0.6:
            return (victim,), None
        return tuple(rank for rank, node in enumerate(shape) if node == shape[victim]), here[shape[victim]]

    def _check_ends(self, ends: Sequence[processes.End], newest: int | None, *, has_victims: bool) -> None:
        assert not any(end.hung for end in ends), f"it hangs: {[end.log for end in ends]}"
        for end in ends:
            died = end.exit_code != 0 or (end.error is not None and has_victims)
            assert died or not end.error, f"{end.error}\n{end.log}"
            if end.value is None:
                continue
            self.counts["restores"] += 1
            assert end.value[0] == newest, f"step {end.value[0]} was restored, and {newest} is complete"
            assert end.value[1] % 1_000_000 == newest, end.value

    def _check_left(self, before: set[int]) -> None:
        after = oracle.complete_in(self.run)
        kept = oracle.last(KEPT, before | after)
        assert kept <= after, f"lost of the durable tier: {sorted(kept - after)}"
        self.counts["durable steps"] += len(after - before)


def soak_runs(minutes: float, seed: int) -> dict[str, Any]:
    """Run jobs until the time is up, or something is not as it must be.

    Args:
        minutes: how long.
        seed: of the draws.

    Returns:
        What was done; `lie` says what was wrong.
    """
    directory = Path(tempfile.mkdtemp(prefix="soak-runs-"))
    soak, began, told = RunSoak(directory, seed), time.monotonic(), time.monotonic()
    record: dict[str, Any] = {}
    while time.monotonic() - began < 60 * minutes:
        try:
            done = soak.step()
        except AssertionError as error:
            record["lie"] = f"job {soak.number}: {error}"
            print(f"{record['lie']}\nit is kept in {directory}", flush=True)
            break
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"{told - began:6.0f} s, {done}; {dict(soak.counts)}", flush=True)
    else:
        shutil.rmtree(directory)
    return {"seconds": round(time.monotonic() - began), "steps": soak.number, "counts": dict(soak.counts), **record}

"""What a job is to do, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_nvcomp import Best, Keep

# the node of each rank
SHAPES = ((0,), (0, 0), (0, 1), (0, 1, 2), (0, 0, 1), (0, 0, 1, 1))
CODECS = ("auto", "auto", "planes-zstd", "zstd", "none")
MINUTE, HOUR, YEAR = 60, 3600, 365 * 86400
CLOCKS = (0, 0, 0, 0, 7 * MINUTE, -7 * MINUTE, 5 * HOUR, -5 * HOUR, YEAR, -YEAR)
LEASE_SECONDS = 5.0


@dataclass(frozen=True)
class Plan:
    """A job."""

    number: int  # of the job
    family: int  # of the contents that the run saves
    run: Path  # the durable tier
    node_of: tuple[Path, ...]  # the directory of each rank's node
    options: dict[str, Any]  # of the manager
    keep: Keep | None  # the rule for the durable tier
    go_to: int | None = None  # the step that is asked for; None for the newest
    looks_first: bool = False  # whether the newest is restored before that
    first: int = 0  # the step after which it begins if nothing is there
    count: int = 10  # how many steps it trains
    step_seconds: float = 0.05  # how long each of them takes
    waits: bool = False  # whether it waits after each save
    back_at: int | None = None  # after how many steps it goes back to where it began; None for never
    ends_durably: bool = False  # whether the last step is saved to the durable tier
    closes: bool = True  # whether the manager is closed
    clock_seconds: int = 0  # how much its clock is off
    jump: tuple[int, int] | None = None  # after how many steps the clock jumps, and to where
    waits_for_lease: bool = False  # whether another job may hold the lease

    @property
    def nodes(self) -> tuple[Path, ...]:
        """The directories of its nodes."""
        return tuple(dict.fromkeys(self.node_of))

    @property
    def has_fast(self) -> bool:
        """True if there is a fast tier."""
        return "fast_every" in self.options

    def __str__(self) -> str:
        nodes = "".join(node.parent.name.removeprefix("node-") for node in self.node_of)
        shown = " ".join(f"{name}={value}" for name, value in self.options.items())
        rest = [f"restore(step={self.go_to})"] if self.go_to is not None else []
        rest += [f"back at {self.back_at}"] if self.back_at is not None else []
        rest += [f"clock {self.clock_seconds:+}"] if self.clock_seconds else []
        rest += [f"jump {self.jump}"] if self.jump else []
        rest += [] if self.closes else ["does not close"]
        return f"ranks on {nodes}, {self.count} steps, {shown}, keep {_shown(self.keep)}, {', '.join(rest)}"


def _shown(keep: Keep | None) -> str:
    if keep is None:
        return "all"
    given = {name: getattr(keep, name) for name in ("last", "every", "newer_than", "best", "milestones")}
    return ",".join(f"{name}={value}" for name, value in given.items() if value)


def draw_keep(draw: random.Random) -> Keep | None:
    """Return a rule."""
    last = draw.randint(1, 3)
    return draw.choice(
        [
            None,
            Keep(last=last),
            Keep(last=last),
            Keep(last=last, every=draw.choice([20, 30])),
            Keep(last=last, best=Best("loss", draw.choice(["min", "max"]), draw.randint(1, 2))),
            Keep(last=1, newer_than=draw.choice([5.0, 600.0])),
            Keep(last=1, milestones=(10, 20, 40)),
        ]
    )


def draw_plan(draw: random.Random, number: int, family: int, run: Path, nodes: list[Path], has_clock: bool) -> Plan:
    """Return a job."""
    shape = draw.choice(SHAPES)
    every = draw.choice([5, 10, 20])
    options: dict[str, Any] = {
        "every": every,
        "asynchronous": draw.random() < 0.8,
        "on_backlog": draw.choice(["wait", "wait", "skip"]),
        "codec": draw.choice(CODECS),
        "run_id": "soak" if draw.random() < 0.8 else f"soak-{number}",
        "lease_seconds": LEASE_SECONDS,
    }
    if draw.random() < 0.75:
        options |= {"fast_every": draw.choice([2, 5]), "fast_keep": draw.choice([1, 2, 3])}
        options["copies"] = draw.choice([0, 1, 1]) if len(set(shape)) > 1 else 0
    else:
        options["incremental"] = draw.random() < 0.8
    count = draw.randint(3, 30)
    clock = draw.choice(CLOCKS) if has_clock else 0
    has_jump = has_clock and draw.random() < 0.15
    return Plan(
        number,
        family,
        run,
        tuple(nodes[one] for one in shape),
        options,
        draw_keep(draw),
        count=count,
        step_seconds=draw.choice([0.01, 0.03, 0.1]),
        waits=draw.random() < 0.2,
        back_at=draw.randint(1, count) if draw.random() < 0.1 else None,
        ends_durably=draw.random() < 0.4,
        closes=draw.random() < 0.9,
        clock_seconds=clock,
        jump=(draw.randint(0, count), draw.choice(CLOCKS)) if has_jump else None,
    )

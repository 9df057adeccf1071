"""What happens while a job runs: who is stopped or killed, which disk fails, which commands run beside it."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import field as made_by
from pathlib import Path

from dcp_nvcomp import Keep
from tests.faults.failpoints import Seam
from tests.runs.kills.stages import STAGES

from . import field as disks
from .clocks import can_set_clocks, set_clock
from .field import Field
from .harms import HARMS
from .jobs import look_at
from .look import folders_of
from .oracle import Oracle
from .plans import CLOCKS, Plan
from .running import Running, Side

# those of the kill matrix that any run reaches; removals are of steps with other numbers there
SEAMS: dict[str, Seam] = {
    stage.name: stage.seam
    for stage in STAGES
    if not stage.name.startswith(("fast tier:", "durable tier:", "replicas:", "restore:"))
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Scene:
    """A job and all that is around it."""

    draw: random.Random
    field: Field
    oracle: Oracle  # what is known
    plan: Plan
    running: Running
    where: Path  # a directory for outputs
    sides: list[Side] = made_by(default_factory=list)  # the commands beside it
    rules: list[Keep | None] = made_by(default_factory=list)  # by which steps may have been removed
    destroyed: set[int] = made_by(default_factory=set)  # the steps of the durable tier that were harmed
    excuses: set[str] = made_by(default_factory=set)  # why the job may fail
    done: list[str] = made_by(default_factory=list)
    has_lost_fast: bool = False  # True if files of the fast tier may be gone
    others: list[Running] = made_by(default_factory=list)  # other jobs on the run, and whether each may take it over

    def ranks(self) -> list[int]:
        """Draw who is struck: one rank, a node's, or all."""
        node_of = self.plan.node_of
        victim = self.draw.randrange(len(node_of))
        how = self.draw.choice(["one", "one", "node", "all"])
        if how == "one":
            return [victim]
        return [rank for rank, node in enumerate(node_of) if how == "all" or node == node_of[victim]]


@dataclass(frozen=True)
class Disturbance:
    """Something that happens."""

    kind: str  # a name, by which it is counted
    apply: Callable[[Scene], str | None]  # does it; returns what was done, or None if it can't be done now
    undo: Callable[[Scene], None] | None = None  # called some time later
    after_restore: bool = False  # whether it waits for the restore


def _kill(scene: Scene) -> str | None:
    struck = scene.running.send(scene.ranks(), signal.SIGKILL)
    if not struck:
        return None
    scene.excuses.add("kill")
    return f"ranks {struck} killed"


def _stop(scene: Scene) -> str | None:
    struck = scene.running.send(scene.ranks(), signal.SIGSTOP)
    if not struck:
        return None
    scene.excuses.add("stop")
    return f"ranks {struck} stopped"


def _go_on(scene: Scene) -> None:
    struck = scene.running.send(sorted(scene.running.stopped), signal.SIGCONT)
    scene.done.append(f"ranks {struck} continued")


def _terminate(scene: Scene) -> str | None:
    if not scene.running.has_said("made"):  # it would be nothing but a kill
        return None
    struck = scene.running.send(scene.ranks(), signal.SIGTERM)
    return f"ranks {struck} told to end" if struck else None


def _fill_fast(scene: Scene) -> str | None:
    node = scene.draw.choice(scene.plan.nodes)
    return f"{node} filled" if scene.field.disk_of(node).fill() else None


def _forbid_fast(scene: Scene) -> str | None:
    node = scene.draw.choice(scene.plan.nodes)
    return f"{node} read-only" if scene.field.disk_of(node).forbid() else None


def _lose_fast(scene: Scene) -> str | None:
    node = scene.draw.choice(scene.plan.nodes)
    scene.has_lost_fast = True
    return f"{node} lost" if scene.field.disk_of(node).lose() else None


def _obstruct_fast(scene: Scene) -> str | None:
    node = scene.draw.choice(scene.plan.nodes)
    scene.has_lost_fast = True
    return f"a file stands in the way of {node}" if disks.stand_in_the_way(node) else None


def _mend_fast(scene: Scene) -> None:
    for node, disk in zip(scene.field.nodes, scene.field.disks, strict=True):
        disk.allow()
        disk.empty()
        disks.clear_the_way(node)


def _fill_durable(scene: Scene) -> str | None:
    scene.excuses.add("durable")
    return "durable tier filled" if scene.field.durable.fill() else None


def _forbid_durable(scene: Scene) -> str | None:
    scene.excuses.add("durable")
    return "durable tier read-only" if scene.field.durable.forbid() else None


def _mend_durable(scene: Scene) -> None:
    scene.field.durable.allow()
    scene.field.durable.empty()


def _harm_durable(scene: Scene) -> str | None:
    before = set(folders_of(scene.field.run))
    kind = scene.draw.choice(sorted(HARMS.keys() - {"step moved", "step half copied"}))
    try:
        what = HARMS[kind](scene.draw, scene.oracle.look, scene.field.run)
    except OSError:  # it is read-only, full, or the job removed what it is about
        return None
    if what is not None and kind not in ("garbage", "foreign file"):
        scene.destroyed |= {step for step in before if f"step-{step}/" in f"{what.split(' ')[0]}/"}
    return what


def command(where: Path, clock_seconds: int, name: str, *arguments: str) -> Side:
    """Start a command of `dcp-nvcomp`."""

    def target() -> None:
        from dcp_nvcomp.cli.app import main

        set_clock(clock_seconds)
        sys.argv = ["dcp-nvcomp", name, *arguments]
        main()

    return Side(f"{name} {' '.join(arguments[1:])}".strip(), where, target)


def _command(scene: Scene, name: str, *arguments: str) -> str:
    clock = scene.draw.choice(CLOCKS) if can_set_clocks() else 0
    side = command(scene.where / f"side-{len(scene.sides)}", clock, name, *arguments)
    scene.sides.append(side)
    return f"dcp-nvcomp {side.name}" + (f" with the clock {clock:+}" if clock else "")


def _ls(scene: Scene) -> str | None:
    return _command(scene, "ls", str(scene.field.run))


def draw_prune(draw: random.Random, run: Path) -> tuple[Keep, list[str]]:
    """Return a rule, and the command that says so."""
    last, every = draw.randint(1, 3), draw.choice([None, 10, 20])
    more = ["--keep-every", str(every)] if every else []
    return Keep(last=last, every=every), ["prune", str(run), "--keep-last", str(last), *more]


def _prune(scene: Scene) -> str | None:
    rule, arguments = draw_prune(scene.draw, scene.field.run)
    scene.rules.append(rule)
    return _command(scene, *arguments)


def _pin(scene: Scene) -> str | None:
    steps = [step for step, seen in scene.oracle.look.durable(scene.field.run).items() if seen.is_whole]
    if not steps:
        return None
    return _command(scene, "pin", str(scene.field.run), str(scene.draw.choice(steps)))


def _verify(scene: Scene) -> str | None:
    steps = sorted(folders_of(scene.field.run))
    if not steps:
        return None
    return _command(scene, "verify", f"{scene.field.run}/step-{scene.draw.choice(steps)}")


def _consolidate(scene: Scene) -> str | None:
    steps = [step for step, seen in scene.oracle.look.durable(scene.field.run).items() if seen.is_whole]
    if not steps:
        return None
    return _command(scene, "consolidate", f"{scene.field.run}/step-{scene.draw.choice(steps)}")


def _other_job(scene: Scene) -> str | None:
    if not scene.running.has_said("made"):
        return None
    where = scene.where / f"other-{len(scene.others)}"
    plan, clock = scene.plan, scene.draw.choice(CLOCKS) if can_set_clocks() else 0
    scene.others.append(Running(where, 1, lambda rank: look_at(plan.run, plan.family, "another job", where, clock)))
    return "another job"


def strike_at(scene_draw: random.Random, plan: Plan, where: Path) -> tuple[str, Callable[[int], None]]:
    """Draw a stage at which a rank, its node, or all are killed or stopped, by the first one of them to come there."""
    name = scene_draw.choice(sorted(SEAMS))
    rank = scene_draw.randrange(len(plan.node_of))
    how = scene_draw.choice(["kill", "kill", "stop"])
    nth = scene_draw.choice([1, 1, 2, 3])

    def arm(own: int) -> None:
        if own != rank:
            return
        seam = SEAMS[name]

        def strike() -> None:
            (where / "struck").write_text(name)
            os.kill(os.getpid(), SIGNALS[how])

        Seam(seam.owner, seam.name, seam.when, nth * seam.nth, seam.counts).arm(strike)

    return f"rank {rank}: {how} at {name!r} ({nth})", arm


KINDS: Sequence[Disturbance] = (
    Disturbance("killed", _kill),
    Disturbance("killed late", _kill, after_restore=True),
    Disturbance("killed late", _kill, after_restore=True),
    Disturbance("stopped", _stop, after_restore=True),
    Disturbance("stopped and continued", _stop, _go_on),
    Disturbance("told to end", _terminate, after_restore=True),
    Disturbance("told to end", _terminate, after_restore=True),
    Disturbance("fast full", _fill_fast, _mend_fast),
    Disturbance("fast read-only", _forbid_fast, _mend_fast),
    Disturbance("fast lost", _lose_fast, after_restore=True),
    Disturbance("fast obstructed", _obstruct_fast, _mend_fast, after_restore=True),
    Disturbance("durable full", _fill_durable, _mend_durable),
    Disturbance("durable read-only", _forbid_durable, _mend_durable),
    Disturbance("durable harmed", _harm_durable, after_restore=True),
    Disturbance("ls", _ls),
    Disturbance("prune", _prune, after_restore=True),
    Disturbance("pin", _pin, after_restore=True),
    Disturbance("verify", _verify, after_restore=True),
    Disturbance("consolidate", _consolidate, after_restore=True),
    Disturbance("another job", _other_job, after_restore=True),
)

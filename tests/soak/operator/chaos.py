"""The draws and the loop: incarnation after incarnation, until the time is up or something is not as it must be."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.forked import PRELOADED

from .clocks import can_set_clocks
from .disturbances import KINDS, Disturbance, Scene, command, draw_prune, strike_at
from .ends import ALL_DAMAGED, check_ends, check_sides, note_words
from .field import Field, stand_in_the_way
from .harms import HARMS
from .jobs import GROUP_SECONDS, serve
from .oracle import Before, Finding, Oracle
from .plans import LEASE_SECONDS, Plan, draw_plan
from .running import Running

# Without a word of any rank: what ranks wait for ends by the group's limit, and a close may wait for one thing more.
# Before that is over they say where they are.
LIMIT_SECONDS, ASKED_SECONDS = 2 * GROUP_SECONDS + 15.0, 1.5 * GROUP_SECONDS
GRACE_SECONDS = 0.5  # how long the others go on after a death, where torchrun ends them
MOST_INCARNATIONS = 25  # of one run
MiB = 1 << 20


class Chaos:
    """One run, and what happens to it."""

    def __init__(self, directory: Path, seed: str, without: frozenset[str], counts: Counter[str]) -> None:
        self.seed, self.without, self.counts = seed, without, counts
        draw = self.draw = random.Random(seed)
        sizes = [draw.choice([8, 12, 24, 64]) * MiB for _ in range(3)]
        self.field = Field(directory, sizes, 4096 * MiB)
        self.oracle = Oracle()
        self.family = draw.randrange(1 << 30)
        self.number = 0
        self.has_clock = can_set_clocks() and "clock" not in without
        self.slowest_seconds = self.waited_seconds = 0.0
        self.is_over = False
        self.holders: set[str] = set()  # whose leases may still last
        self.done: list[str] = []
        self.where = directory

    def step(self) -> str:
        """Run one job; return what it was."""
        self.number += 1
        # what is drawn for one job does not depend on what was drawn, and when, for the ones before it
        self.draw = random.Random(f"{self.seed} {self.number}")
        self.where = self.field.directory / f"job-{self.number}"
        self.done = self._between()
        self._prune_between()
        plan = self._plan()
        before = self.oracle.before(self.field.run, plan.nodes if plan.has_fast else ())
        plan = self._go_back(plan, before)
        obstacle = self._obstacle(plan)
        if obstacle:
            before = self.oracle.before(self.field.run, plan.nodes if plan.has_fast else ())
        scene = self._start(plan)
        self.done.append(f"{plan}; there: {sorted(before.sure)}")
        scene.done = self.done
        if obstacle == "durable":
            scene.excuses.add("durable")
        try:
            self._watch(scene)
        finally:
            self._end(scene)
        note_words(scene, before)
        self.field.mend()
        scene.destroyed |= self.oracle.look.sharing(self.field.run, scene.destroyed)
        check_sides(scene, before)
        after = self.oracle.before(self.field.run, plan.nodes if plan.has_fast else ())
        outcome = check_ends(scene, before, after)
        self.counts[f"outcome: {outcome}"] += 1
        self.is_over = outcome == ALL_DAMAGED
        run_id = scene.plan.options["run_id"]
        self.holders = {run_id} if any(scene.running.all_words("made")) else self.holders | {run_id}
        if any(any(other.all_words("made")) for other in scene.others):
            self.holders.add("another job")
        shutil.rmtree(self.where)
        slow = f", {self.waited_seconds:.0f} s without a word" if self.waited_seconds > GROUP_SECONDS else ""
        self.slowest_seconds = max(self.slowest_seconds, self.waited_seconds)
        return f"{self.number}: {'; '.join(self.done)} -> {outcome}{slow}"

    # --- before a job -----------------------------------------------------------------------------------------------

    def _between(self) -> list[str]:
        """Do what people do between jobs."""
        done = []
        kinds = sorted(HARMS.keys() - self.without)
        while kinds and self.draw.random() < 0.4:
            kind = self.draw.choice(kinds)
            place = self.draw.choice([self.field.run] * 4 + self.field.nodes)
            what = HARMS[kind](self.draw, self.oracle.look, place)
            if what is not None:
                self.counts[kind] += 1
                done.append(what)
        if self.draw.random() < 0.15 and "node lost" not in self.without:
            node = self.draw.choice(self.field.nodes)
            self.field.disk_of(node).lose()
            self.counts["node lost"] += 1
            done.append(f"{node} lost")
        return done

    def _prune_between(self) -> None:
        """Prune the run while no job runs, now and then, and before it fills its disk by itself."""
        is_crowded = self.field.durable.is_mounted and self.field.durable.used > 0.5
        if "prune" in self.without or not self.field.run.is_dir() or (self.draw.random() > 0.2 and not is_crowded):
            return
        rule, arguments = draw_prune(self.draw, self.field.run)
        before = self.oracle.before(self.field.run, ())
        code, output = command(self.field.directory / "pruned", 0, *arguments).join(LIMIT_SECONDS)
        self.counts["prune between jobs"] += 1
        self.done.append(f"dcp-nvcomp {' '.join(arguments)} ended with {code}")
        has_any = not before.sure.isdisjoint(before.durable.items())  # a run that went back may have left all there is
        if code is None or "Traceback" in output or (code and has_any):
            raise Finding(output)
        self.oracle.check_kept(before, self.oracle.before(self.field.run, ()), [], [], [rule])

    def _plan(self) -> Plan:
        draw, nodes = random.Random(f"{self.seed} {self.number} plan"), list(self.field.nodes)
        draw.shuffle(nodes)
        plan = draw_plan(draw, self.number, self.family, self.field.run, nodes, self.has_clock)
        return dataclasses.replace(plan, waits_for_lease=bool(self.holders - {plan.options["run_id"]}))

    def _go_back(self, plan: Plan, before: Before) -> Plan:
        """Let some jobs ask for a step; nodes that are away get an empty fast tier then."""
        sure = sorted({step for step, _ in before.sure})
        if not sure or self.draw.random() > 0.15:
            return plan
        for node in set(self.field.nodes) - set(plan.nodes):
            self.field.disk_of(node).lose()
        self.counts["goes back"] += 1
        return dataclasses.replace(plan, go_to=self.draw.choice(sure), looks_first=self.draw.random() < 0.3)

    def _obstacle(self, plan: Plan) -> str:
        """Let some jobs begin with a disk that is out of order; return which tier's."""
        if self.draw.random() > 0.2:
            return ""
        node = self.draw.choice(plan.nodes)
        disk = self.field.disk_of(node)
        obstacles: dict[str, Callable[[], bool]] = {
            "fast full at the start": disk.fill,
            "fast read-only at the start": disk.forbid,
            "fast obstructed at the start": lambda: stand_in_the_way(node),
            "durable full at the start": self.field.durable.fill,
            "durable read-only at the start": self.field.durable.forbid,
        }
        kind = self.draw.choice(sorted(obstacles))
        if kind in self.without or not obstacles[kind]():
            return ""
        self.counts[kind] += 1
        self.done.append(f"{kind}: {node.parent.name}")
        return kind.split()[0]

    def _start(self, plan: Plan) -> Scene:
        what, arm = strike_at(self.draw, plan, self.where)
        if self.draw.random() > 0.25 or "stage" in self.without:
            what, arm = "", lambda rank: None
        else:
            self.done.append(what)
        running = Running(self.where, len(plan.node_of), lambda rank: serve(plan, rank, self.where, arm))
        scene = Scene(self.draw, self.field, self.oracle, plan, running, self.where, rules=[plan.keep])
        if plan.clock_seconds or plan.jump:
            self.counts["clock"] += 1
        return scene

    # --- while it runs ----------------------------------------------------------------------------------------------

    def _disturbances(self) -> list[tuple[float, float, Disturbance]]:
        """Draw what happens, each with the time when, and how long it lasts; counted from the restore or the start."""
        found = []
        kinds = [kind for kind in KINDS if kind.kind not in self.without]
        for _ in range(self.draw.choice([0, 0, 1, 1, 1, 2, 3]) if kinds else 0):
            kind = self.draw.choice(kinds)
            when = self.draw.uniform(0.0, 2.5 if kind.after_restore else 4.0)
            found.append((when, self.draw.uniform(0.2, 3.0), kind))
        return found

    def _watch(self, scene: Scene) -> None:
        """Let things happen until all ranks have ended."""
        self.waited_seconds, running = 0.0, scene.running
        coming, undo = self._disturbances(), list[tuple[float, Disturbance]]()
        is_like_torchrun = self.draw.random() < 0.7
        restored_at: float | None = None
        quiet_since, died_at, words, was_asked = time.monotonic(), None, 0, False
        while True:
            running.poll()
            now = time.monotonic()
            if words != (words := sum(map(len, running.words))):
                quiet_since = now
            if restored_at is None and running.has_said("restored"):
                restored_at = now
            for entry in list(coming):
                when, lasts, kind = entry
                begin = restored_at if kind.after_restore else running.began_seconds
                if begin is None or now < begin + when:
                    continue
                coming.remove(entry)
                what = kind.apply(scene)
                if what is not None:
                    self.counts[kind.kind] += 1
                    scene.done.append(f"{now - running.began_seconds:.1f} s: {what}")
                    quiet_since = now
                    if kind.undo is not None:
                        undo.append((now + lasts, kind))
            for at, kind in list(undo):
                if now >= at:
                    assert kind.undo is not None
                    kind.undo(scene)
                    undo.remove((at, kind))
                    quiet_since = now
            alive = running.alive()
            if len(alive) < running.count and died_at is None:
                died_at = quiet_since = now
                is_violent = any(code is not None and code < 0 for code in running.exit_codes())
                if is_violent:
                    scene.excuses.add("kill")
                if not is_violent or not is_like_torchrun:
                    died_at = float("inf")
            if (self.where / "struck").exists() and "struck" not in scene.excuses:
                scene.excuses.add("struck")
                self.counts["struck at a stage"] += 1
                scene.done.append(f"{now - running.began_seconds:.1f} s: struck")
                quiet_since = now
            if died_at is not None and now > died_at + GRACE_SECONDS:
                running.send(alive, signal.SIGKILL)
            going = [rank for rank in alive if rank not in self._stopped(running)]
            if not going and not undo:
                if not alive:
                    break
                running.send(alive, signal.SIGKILL)  # they are stopped
            self.waited_seconds = max(self.waited_seconds, now - quiet_since)
            if now - quiet_since > ASKED_SECONDS and not was_asked:
                was_asked = True
                running.send(going, signal.SIGUSR1)
            if now - quiet_since > LIMIT_SECONDS + self._lease(scene):
                running.send(going, signal.SIGUSR1)
                time.sleep(1.0)
                raise Finding(f"ranks {going} did not end: see log-<rank> in {self.where}")
            time.sleep(0.02)

    @staticmethod
    def _lease(scene: Scene) -> float:
        return 3 * LEASE_SECONDS if scene.plan.waits_for_lease else 0.0

    @staticmethod
    def _stopped(running: Running) -> set[int]:
        """Return the ranks that are stopped, by whomever."""
        found = set(running.stopped)
        for rank in running.alive():
            if running.is_stopped(rank):
                found.add(rank)
        return found

    def _end(self, scene: Scene) -> None:
        for other in scene.others:
            deadline = time.monotonic() + LIMIT_SECONDS
            while other.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
            if other.alive():
                scene.done.append("the other job did not end")
                other.send([0], signal.SIGKILL)
            other.end()
        scene.running.send(scene.running.alive(), signal.SIGKILL)
        scene.running.end()


def operate(
    minutes: float, seed: int, *, without: frozenset[str] = frozenset(), verbose: bool = False
) -> dict[str, Any]:
    """Operate runs until the time is up, or something is not as it must be."""
    for name in PRELOADED:
        importlib.import_module(name)
    counts = Counter[str]()
    began, incarnations, slowest = time.monotonic(), 0, 0.0
    record: dict[str, Any] = {}
    while time.monotonic() - began < 60 * minutes and not record:
        directory = Path(tempfile.mkdtemp(prefix="soak-operator-"))
        chaos = Chaos(directory, f"{seed} {incarnations}", without, counts)
        for _ in range(MOST_INCARNATIONS):
            incarnations += 1
            try:
                done = chaos.step()
            except Finding as error:
                record["lie"] = f"seed {seed}, incarnation {incarnations}: {error}"
                print("\n".join([*chaos.done, record["lie"], f"it is kept in {directory}: {chaos.where}"]), flush=True)
                (directory / "finding.json").write_text(json.dumps({"done": chaos.done, **record}, indent=1))
                break
            if verbose:
                print(f"{time.monotonic() - began:6.0f} s, {done}", flush=True)
            slowest = max(slowest, chaos.slowest_seconds)
            if time.monotonic() - began >= 60 * minutes or chaos.is_over:
                break
        else:
            counts["runs"] += 1
        if not record:
            chaos.field.remove()
    return {
        "seconds": round(time.monotonic() - began),
        "incarnations": incarnations,
        "slowest_seconds": round(slowest, 1),
        "counts": dict(sorted(counts.items())),
        "findings": len(record),
        **record,
    }

"""What the ranks of a job run, and the words that they leave behind: one line each, so that a killed one has said them.

began met made restored (saving saved event)* back* left closed, or raised
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointManager
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptDataError,
    FormatError,
    MetadataError,
    RunInUseError,
)
from dcp_nvcomp.runs.events import StepSaved, StepsRemoved
from tests.distributed.launch import STOCK_WARNINGS
from tests.soak.contents import CHANGE_EVERY, content, local, placed

from .clocks import set_clock
from .plans import LEASE_SECONDS, Plan

GROUP_SECONDS = 15.0
TRIES_FOR_LEASE = int(3 * LEASE_SECONDS / 0.5)
MOST_NBYTES_MORE = 1 << 20

Report = Callable[..., None]


def tag_of(job: int, save: int) -> int:
    """Return the number of a save, the same for no two; later ones have larger ones."""
    return CHANGE_EVERY * job + save


def serve(plan: Plan, rank: int, where: Path, arm: Callable[[int], None]) -> None:
    """Be one rank of a job."""
    report = _begin(where, rank)
    set_clock(plan.clock_seconds)
    report("began")
    world_size = len(plan.node_of)
    if world_size > 1:
        method, limit = f"file://{where / 'meeting'}", timedelta(seconds=GROUP_SECONDS)
        try:
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit)
            dist.barrier()
        except Exception:
            report("unmet", text=traceback.format_exc())
            os._exit(0)
    report("met")
    _told(report, lambda: _train(plan, rank, report, arm))


def look_at(run: Path, family: int, run_id: str, where: Path, clock_seconds: int) -> None:
    """Be another job, of one process, that is after the run: restore what is there, and leave."""
    report = _begin(where, 0)
    set_clock(clock_seconds)
    report("began")

    def look() -> None:
        with CheckpointManager(run, run_id=run_id, preemption_signals=()) as manager:
            report("made")
            _restored(manager, _fresh(family, 0), None, family, 0, report)
        report("closed")

    _told(report, look)


def _begin(where: Path, rank: int) -> Report:
    log = os.open(where / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    words = os.open(where / f"words-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(threadName)s %(message)s", force=True)
    warnings.simplefilter("default")
    for message in STOCK_WARNINGS:
        warnings.filterwarnings("ignore", message=message)

    def report(what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **more})
        os.write(words, f"{line}\n".encode())

    return report


def _told(report: Report, function: Callable[[], None]) -> None:
    """Call a function, say what it raises, and end."""
    try:
        function()
    except BaseException as error:
        is_ours = isinstance(error, CheckpointError)
        report(
            "raised", kind=type(error).__name__, is_ours=is_ours, text=str(error)[:4000], trace=traceback.format_exc()
        )
    sys.stderr.flush()
    os._exit(0)


def _train(plan: Plan, rank: int, report: Report, arm: Callable[[int], None]) -> None:
    manager = _made(plan, rank, report)
    report("made")
    if not plan.closes:
        _train_with(manager, plan, report, lambda: arm(rank))
        return
    with manager:
        _train_with(manager, plan, report, lambda: arm(rank))
    report("closed")


def _made(plan: Plan, rank: int, report: Report) -> CheckpointManager:
    """Return a manager; one with another `run_id` than the last one's waits until that one's lease is over."""
    options = dict(plan.options)
    if plan.has_fast:
        options["fast"] = plan.node_of[rank]

    def on_event(event: Any) -> None:
        if isinstance(event, StepSaved):
            tag = int(event.metrics["tag"])
            report("event", event="StepSaved", step=event.step, tag=tag, tiers=event.tiers)
        elif isinstance(event, StepsRemoved):
            report("event", event="StepsRemoved", steps=event.steps, tier=event.tier)
        else:
            report("event", event=type(event).__name__, text=str(event)[:300])

    for attempt in range(TRIES_FOR_LEASE):
        try:
            return CheckpointManager(
                plan.run,
                keep=plan.keep,
                node=plan.node_of[rank].parent.name,
                thread_count=1,
                on_event=on_event,
                **options,
            )
        except RunInUseError:
            if not plan.waits_for_lease or attempt == TRIES_FOR_LEASE - 1:
                raise
            time.sleep(0.5)
    raise AssertionError("not reached")


def _train_with(manager: CheckpointManager, plan: Plan, report: Report, arm: Callable[[], None]) -> None:
    state = _fresh(plan.family, plan.number)
    if plan.looks_first:
        _restored(manager, state, None, plan.family, plan.number, report, looks=True)
    found = _restored(manager, state, plan.go_to, plan.family, plan.number, report)
    arm()
    step, line = (plan.first, []) if found is None else found
    began, last, trained, saves, due_tag = step, step + plan.count, 0, 0, None
    while step < last:
        time.sleep(plan.step_seconds)
        step, trained = step + 1, trained + 1
        if plan.jump is not None and plan.jump[0] == trained:
            set_clock(plan.jump[1])
        is_last = step == last
        if manager.should_save(step) or (is_last and plan.ends_durably):
            saves += 1
            tag = tag_of(plan.number, saves)
            loss = random.Random(tag).random()
            report("saving", step=step, tag=tag, line=line, loss=loss)
            state = _state(plan.family, plan.number, step, tag, line)
            durable = is_last and plan.ends_durably
            manager.save(step, state, metrics={"loss": loss, "tag": tag}, durable=durable)
            report("saved", step=step, tag=tag)
            _spoil(state)
            line = [*line, tag]
            due_tag = tag if durable or manager.preempted else None
            if plan.waits:
                manager.wait()
        if manager.preempted:
            break
        if plan.back_at == trained and began > 0 and found is not None:
            back = _went_back(manager, plan, state, began, report)
            if back is not None:
                step, line = back
    report("left", step=step, due_tag=due_tag, preempted=manager.preempted)


def _went_back(
    manager: CheckpointManager, plan: Plan, state: dict[str, Any], step: int, report: Report
) -> tuple[int, list[int]] | None:
    """Restore an earlier step that may be gone or harmed since; the words come before, for who is killed in it."""
    report("back", step=step)
    try:
        return _restored(manager, state, step, plan.family, plan.number, report, looks=True)
    except (CheckpointNotFoundError, MetadataError, FormatError, CorruptDataError) as error:
        report("not there", step=step, kind=type(error).__name__, text=str(error))
        return None


def _restored(
    manager: CheckpointManager,
    state: dict[str, Any],
    step: int | None,
    family: int,
    seed: int,
    report: Report,
    *,
    looks: bool = False,
) -> tuple[int, list[int]] | None:
    """Restore, check each value, and say what came back."""
    event = manager.restore(state, step)
    what = "looked" if looks else "restored"
    if event is None:
        report(what, step=None, tag=None, wrong=None)
        return None
    facts = state["facts"]
    wanted = _state(family, seed, facts["step"], facts["tag"], list(facts["line"]))
    wrong = [
        key for key, tensor in state["tensors"].items() if not torch.equal(local(tensor), local(wanted["tensors"][key]))
    ]
    if not torch.equal(facts["more"][0], wanted["facts"]["more"][0]):
        wrong.append("more")
    if facts["step"] != event.step or event.metrics.get("tag") != facts["tag"]:
        wrong.append(f"step {event.step} has the values of step {facts['step']}")
    line = list(facts["line"])
    report(what, step=event.step, tag=facts["tag"], line=line, wrong=wrong, damaged=event.damaged)
    return event.step, [*line, facts["tag"]]


def _state(family: int, seed: int, step: int, tag: int, line: list[int]) -> dict[str, Any]:
    more = torch.arange(random.Random(-tag).randrange(1, MOST_NBYTES_MORE // 8)) * (tag + 1)
    return {
        "tensors": placed(content(family, tag), seed),
        "facts": {"step": step, "tag": tag, "line": list(line), "more": [more]},
    }


def _fresh(family: int, seed: int) -> dict[str, Any]:
    state = _state(family, seed, -1, -1, [])
    _spoil(state)
    return {"tensors": state["tensors"], "facts": {}}


def _spoil(state: dict[str, Any]) -> None:
    """Change a state, as the next step of training does."""
    for tensor in state["tensors"].values():
        own = local(tensor)
        own.copy_(~own)
    for tensor in state["facts"].get("more", ()):
        tensor.fill_(-1)

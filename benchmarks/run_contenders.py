"""What the ranks do in the suite `runs`: save with each contender beside steps, and restore from each place."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.measuring import core_count
from benchmarks.peers import stock_fsspec
from benchmarks.sinks import LimitedFileSystem, link
from benchmarks.states import State, assert_same, build_state, destination
from dcp_nvcomp import CheckpointManager, Keep, async_save
from dcp_nvcomp.runs import StepSaved

RATE = 200e6
NODES = 2

assert LimitedFileSystem.protocol == "limited"  # importing it registers it, in each process

SYNC, ASYNC, KEPT = "dcp.save", "dcp.async_save", "dcp.async_save, kept stager"
OURS, MEMORY = "async_save", "async_save into memory"
DIRECT, FAST, COPIES = "manager", "manager, fast tier", "manager, fast tier, copies=1"
IN_MEMORY = (MEMORY, FAST, COPIES)
SAVES = (SYNC, ASYNC, KEPT, OURS, DIRECT, FAST, COPIES)
OWN, PEER, DURABLE, LOAD = "own memory", "a peer", "durable tier", "dcp.load"
RESTORES = (OWN, PEER, DURABLE, LOAD)

_TIERS: dict[str, dict[str, Any]] = {DIRECT: {}, FAST: {"fast_every": 1}, COPIES: {"fast_every": 1, "copies": 1}}
_LOST = {PEER: (1,), DURABLE: (0, 1)}
_OPTIONS: dict[str, Any] = {"thread_count": max(1, core_count() // NODES)}
_STEP_SECONDS = 0.03
_BASELINE_STEPS = 15


@dataclass(frozen=True)
class Saved:
    """What one save cost a rank.

    Attributes:
        stall_seconds: how long the caller waited.
        background_seconds: from then until it was in all its tiers.
        slowdown: a step beside it over a step without one.
        tier_seconds: from the call until it was complete in a tier, by tier.
        stored_nbytes: size of this rank's data files.
        uploaded_nbytes: what its manager sent from the fast tier.
        sent_nbytes: all that this rank sent through its link.
    """

    stall_seconds: float
    background_seconds: float
    slowdown: float
    tier_seconds: Mapping[str, float]
    stored_nbytes: int
    uploaded_nbytes: int
    sent_nbytes: int

    @property
    def lost_seconds(self) -> float:
        return self.stall_seconds + self.background_seconds * max(0.0, 1 - 1 / self.slowdown)


@dataclass(frozen=True)
class Behind:
    """What is left of a save when the caller may go on.

    Attributes:
        saved: done when it is in all its tiers.
        finish: waits until nothing is left to do; returns when it was complete, by tier, and what this rank uploaded.
    """

    saved: Future[Any]
    finish: Callable[[], tuple[dict[str, float], int]]


# Saves a step; returns when the caller may go on.
Begin = Callable[[int, State], Behind]


def save_with_each(
    names: tuple[str, ...], nbytes: int, source: Path | None, place: str, repeats: int, every: int
) -> dict[str, list[Saved]]:
    """Return what saves cost this rank; before the `repeats` that count is one that does not."""
    state, training = _state_of(nbytes, source), _new_step()
    costs: dict[str, list[Saved]] = {name: [] for name in names}
    with ExitStack() as stack:
        begins = {name: stack.enter_context(_contender(name, place, every)) for name in names}
        for number in range(1 + repeats):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                saved = _one_save(name, begins[name], number + 1, state, place, training)
                if number:
                    costs[name].append(saved)
    return costs


def seconds_of_asking(place: str, count: int) -> list[float]:
    """Return how long calls of `should_save` take this rank, one after each step."""
    training, seconds = _new_step(), []
    with _manager(COPIES, f"{place}/asking", 10**9) as manager:
        for number in range(1 + count):
            training()
            dist.barrier()  # as the ranks of a job wait for each other's gradients
            start = time.perf_counter()
            manager.should_save(number)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _state_of(nbytes: int, source: Path | None) -> dict[str, State]:
    return {f"rank {dist.get_rank()}": build_state(nbytes, source)}


def _new_step() -> Callable[[], None]:
    """Return a step of training: arithmetic of one thread that takes about `_STEP_SECONDS`."""
    matrix = torch.randn(256, 256)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    multiply(50)
    start = time.perf_counter()
    multiply(100)
    count = max(1, int(_STEP_SECONDS / ((time.perf_counter() - start) / 100)))
    return lambda: multiply(count)


def _one_save(
    name: str, begin: Begin, step: int, state: dict[str, State], place: str, training: Callable[[], None]
) -> Saved:
    gc.collect()
    writing = link(RATE, name).writing
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_BASELINE_STEPS):
        training()
    step_seconds = (time.perf_counter() - start) / _BASELINE_STEPS
    dist.barrier()
    before_nbytes = writing.passed_nbytes
    start = time.perf_counter()
    behind = begin(step, state)
    stalled = time.perf_counter()
    steps = 0
    while not behind.saved.done():
        training()
        steps += 1
    ended = time.perf_counter()
    slowdown = (ended - stalled) / steps / step_seconds if steps else 1.0
    seconds, uploaded_nbytes = behind.finish()
    dist.barrier()
    sent_nbytes = writing.passed_nbytes - before_nbytes
    files = Path(_path_of(name, place, step)).glob(f"__{dist.get_rank()}_*.distcp")
    stored_nbytes = sum(file.stat().st_size for file in files)
    dist.barrier()
    if dist.get_rank() == 0 and name not in _TIERS:  # managers do so by themselves
        shutil.rmtree(_path_of(name, place, step - 1), ignore_errors=True)
    return Saved(stalled - start, ended - stalled, slowdown, seconds, stored_nbytes, uploaded_nbytes, sent_nbytes)


def _path_of(name: str, place: str, step: int | None = None) -> str:
    folder = "".join(letter if letter.isalnum() else "-" for letter in name)
    return f"{place}/{folder}/run" + ("" if step is None else f"/step-{step}")


def _fast_of(name: str, place: str, node: int) -> str:
    return f"{Path(_path_of(name, place)).parent}/node-{node}"


@contextmanager
def _contender(name: str, place: str, every: int) -> Iterator[Begin]:
    os.environ["LOCAL_WORLD_SIZE"] = str(NODES)  # as torchrun does where they share a host
    if name in _TIERS:
        with _manager(name, place, every) as manager:
            yield _managed(manager, copies="copies" in _TIERS[name])
    elif name in (OURS, MEMORY):
        yield _own(name, place)
    else:
        stager = DefaultStager(StagingOptions(False, False, False, False)) if name == KEPT else None
        yield _stock(name, place, stager)
        if stager is not None:
            stager.close()


def _manager(name: str, place: str, every: int = 1) -> CheckpointManager:
    rank = dist.get_rank()
    fast = {"fast": _fast_of(name, place, rank)} if "fast_every" in _TIERS[name] else {}
    return CheckpointManager(
        f"limited://{_path_of(name, place)}",
        every=every,
        keep=Keep(last=1),
        node=f"node {rank}",
        run_id="benchmark",
        preemption_signals=(),
        rate=RATE,
        label=name,
        **_OPTIONS,
        **fast,
        **_TIERS[name],
    )


def _managed(manager: CheckpointManager, *, copies: bool) -> Begin:
    def begin(step: int, state: State) -> Behind:
        start = time.perf_counter()
        save = manager.save(step, state)

        def finish() -> tuple[dict[str, float], int]:
            manager.wait()
            waited_seconds = time.perf_counter() - start
            saved = save.saved.result()
            assert isinstance(saved, StepSaved)
            late = {"copies": waited_seconds} if copies else {}  # copies that came after the upload are not told of
            return {**late, **saved.seconds}, saved.uploaded_nbytes

        return Behind(save.saved, finish)

    return begin


def _own(name: str, place: str) -> Begin:
    is_durable = name == OURS
    protocol, options = ("limited://", {"rate": RATE, "label": name}) if is_durable else ("", {"sync_files": False})

    def begin(step: int, state: State) -> Behind:
        start = time.perf_counter()
        saving = async_save(state, protocol + _path_of(name, place, step), **_OPTIONS, **options)
        return _behind(saving.upload_completion, "durable" if is_durable else "fast", start)

    return begin


def _stock(name: str, place: str, stager: DefaultStager | None) -> Begin:
    peer = stock_fsspec(1, rate=RATE, label=name)
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {} if stager is None else {"async_stager": stager}

    def begin(step: int, state: State) -> Behind:
        start = time.perf_counter()
        writer = peer.writer(f"limited://{_path_of(name, place, step)}")
        if name == SYNC:
            dcp.save(state, storage_writer=writer, process_group=group)
            done: Future[None] = Future()
            done.set_result(None)
            return _behind(done, "durable", start)
        saving: Any = dcp.async_save(state, storage_writer=writer, process_group=group, **options)
        return _behind(getattr(saving, "upload_completion", saving), "durable", start)

    return begin


def _behind(future: Future[Any], tier: str, start: float) -> Behind:
    seconds: dict[str, float] = {}
    future.add_done_callback(lambda _: seconds.update({tier: time.perf_counter() - start}))

    def finish() -> tuple[dict[str, float], int]:
        future.result()
        return seconds, 0

    return Behind(future, finish)


def restore_from_each(
    nbytes: int, source: Path | None, place: str, repeats: int
) -> dict[str, list[tuple[float, float, int]]]:
    """Return how long restores took this rank: making the manager, restoring, and bytes received through its link."""
    state = _state_of(nbytes, source)
    into = {key: destination(values) for key, values in state.items()}
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in RESTORES}
    for number in range(1 + repeats):
        for name in RESTORES:
            for values in into.values():
                for tensor in values.values():
                    tensor.zero_()
            gc.collect()
            with _lost_nodes(_LOST.get(name, ()), place):
                measured = _load(place, into) if name == LOAD else _restore(name, place, into)
            for key, values in state.items():
                assert_same(into[key], values, name)
            if number:
                found[name].append(measured)
    return found


@contextmanager
def _lost_nodes(nodes: tuple[int, ...], place: str) -> Iterator[None]:
    """Move away the fast tiers of some nodes, and bring them back."""
    own = Path(_fast_of(COPIES, place, dist.get_rank()))
    is_lost = dist.get_rank() in nodes
    if is_lost:
        own.rename(own.with_suffix(".lost"))
    dist.barrier()
    yield
    dist.barrier()
    if is_lost:
        shutil.rmtree(own)
        own.with_suffix(".lost").rename(own)
    dist.barrier()


def _restore(name: str, place: str, into: dict[str, State]) -> tuple[float, float, int]:
    reading = link(RATE, COPIES).reading
    before_nbytes, start = reading.passed_nbytes, time.perf_counter()
    with _manager(COPIES, place) as manager:
        opened = time.perf_counter()
        event = manager.restore(into)
        restored = time.perf_counter()
        received_nbytes = reading.passed_nbytes - before_nbytes
        source = {OWN: "own", PEER: "own" if dist.get_rank() == 0 else "peer"}.get(name, "durable")
        assert event is not None and set(event.files) == {source}, (name, event)
    return opened - start, restored - opened, received_nbytes


def _load(place: str, into: dict[str, State]) -> tuple[float, float, int]:
    reading = link(RATE, SYNC).reading
    before_nbytes = reading.passed_nbytes
    (path,) = Path(_path_of(SYNC, place)).glob("step-*")
    start = time.perf_counter()
    dcp.load(into, storage_reader=stock_fsspec(1, rate=RATE, label=SYNC).reader(f"limited://{path}"))
    return 0.0, time.perf_counter() - start, reading.passed_nbytes - before_nbytes

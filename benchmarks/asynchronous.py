"""`asynchronous`: what does a save in the background cost the training?

Training seconds that a save costs: those in which the caller waits (the stall), and those by which the steps that run
beside the save are slower: its seconds in the background times (1 - 1 / how often a step takes as long as without one).
Each rank saves the same state, through a link of 200 MB/s of its own, beside steps of about 30 ms.

`lost`: on one rank, which leaves a core to spare, and on as many as there are cores. Beside it, what nobody can leave
out: a copy of the state, to memory that is there already and to new memory, encoding it, and how much steps are slowed
if nothing but a plain loop writes as many bytes beside them, or another process of the lowest priority encodes.
`small`: the stall of a save of 10,000 tensors of 1 KB.
`returns`: how soon `wait="nothing"` returns, with 100 tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import torch_checkpointing_peer
from benchmarks.measuring import Settings, Spread, core_count, paired
from benchmarks.peers import ours, save, stock_fsspec
from benchmarks.processes import Ranks, quiet
from benchmarks.results import Plot, Report
from benchmarks.sinks import LimitedFileSystem
from benchmarks.staging import Staged, staged_by
from benchmarks.states import State, build_state, nbytes_of
from dcp_nvcomp import NvcompReader, async_save

RATE = 200e6
STEP_SECONDS = 0.03
_BASELINE_STEPS = 60
_PIECE_NBYTES = 1 << 20

assert LimitedFileSystem.protocol == "limited"  # importing it registers it, in each process

# Begins a save; returns when the caller may go on, with the future of the checkpoint.
Begin = Callable[[State, str], Future[Any]]


@dataclass(frozen=True)
class Cost:
    """What one save cost a rank.

    Attributes:
        stall_seconds: how long the caller waited.
        durable_seconds: from the call until the checkpoint was published.
        slowdown: a step beside the save over a step without one.
        peak_nbytes: resident memory of the process at its highest, beyond what it was before the save.
        copy_seconds: a copy of the state to memory that is there, right before the save: how fast memory is changes
            from minute to minute.
    """

    stall_seconds: float
    durable_seconds: float
    slowdown: float
    peak_nbytes: int
    copy_seconds: float

    @property
    def lost_seconds(self) -> float:
        background = max(0.0, self.durable_seconds - self.stall_seconds)
        return self.stall_seconds + background * max(0.0, 1 - 1 / self.slowdown)


_STAGING: dict[str, Staged | None] = {
    "dcp_nvcomp": None,
    "dcp_nvcomp, copy": "copy",
    "dcp_nvcomp, encode": "encode",
}
_META = "torch_checkpointing"
CONTENDERS = ("dcp", "dcp, kept stager", "dcp, process", "dcp_nvcomp behind dcp", *_STAGING, _META)


def run(settings: Settings) -> Report:
    report = Report("asynchronous", settings)
    nbytes = settings.nbytes_or(503_000_000)
    with settings.scratch() as scratch:
        if settings.wants("lost"):
            lost: dict[str, list[tuple[Any, Spread]]] = {name: [] for name in CONTENDERS}
            for world_size in (1,) if settings.quick else (1, core_count()):
                for name, spread in _lost(report, world_size, nbytes, scratch).items():
                    lost[name].append(("1 rank" if world_size == 1 else f"{world_size} ranks", spread))
            report.plots.append(Plot("Training that a save costs", f"on {core_count()} cores", "seconds lost", lost))
        if settings.wants("small"):
            _small(report, scratch)
        if settings.wants("returns"):
            _returns(report, nbytes, scratch)
    return report


# --- lost ------------------------------------------------------------------------------------------------------------


def _lost(report: Report, world_size: int, nbytes: int, scratch: Path) -> dict[str, Spread]:
    settings = report.settings
    repeats = settings.repeats_or(5)
    settings.say(f"{world_size} ranks of {nbytes / 1e6:.0f} MB, a link of {RATE / 1e6:.0f} MB/s each, {repeats} times")
    table = report.table(
        f"lost-{world_size}",
        f"One save of {nbytes / 1e6:.0f} MB a rank on {world_size} of {core_count()} cores, link of "
        f"{RATE / 1e6:.0f} MB/s: median (lowest-highest) of {repeats}, of the slowest rank",
        peer=("saved with", ""),
        lost=("lost training, s", ".3f"),
        stall=("stall, s", ".3f"),
        first=("stall of the first, s", ".3f"),
        copy=("a copy right before, s", ".3f"),
        durable=("published after, s", ".2f"),
        slowdown=("steps slowed", ".3f"),
        peak=("peak memory, MB", ".0f"),
    )
    rows = {}
    for name in CONTENDERS:
        if name == _META and not torch_checkpointing_peer.is_installed():
            report.notes.append("torch_checkpointing is not installed: pip install --no-deps torch_checkpointing==0.1")
            continue
        with Ranks(world_size) as ranks:  # processes of its own: memory that one keeps must not serve the next
            each = ranks.run(world_size, _measure, name, nbytes, settings.state, str(scratch / "c"), repeats)
        costs = [max(of_ranks, key=lambda cost: cost.lost_seconds) for of_ranks in zip(*each, strict=True)]
        rows[name] = table.add(
            peer=name,
            lost=Spread(tuple(cost.lost_seconds for cost in costs[1:])),
            stall=Spread(tuple(cost.stall_seconds for cost in costs[1:])),
            first=costs[0].stall_seconds,
            copy=Spread(tuple(cost.copy_seconds for cost in costs[1:])),
            durable=Spread(tuple(cost.durable_seconds for cost in costs[1:])),
            slowdown=Spread(tuple(cost.slowdown for cost in costs[1:])),
            peak=max(cost.peak_nbytes for cost in costs) / 1e6,
        )
        shutil.rmtree(scratch / "c", ignore_errors=True)
    stock = [rows[name] for name in CONTENDERS[:3]]
    best = min(stock, key=lambda row: row["lost"].median)
    mine, copying, encoding = (rows[name] for name in _STAGING)
    of = f"{world_size} rank{'s' * (world_size > 1)}"
    bound = 1.0 if world_size == 1 else 1.3
    report.at_most(f"{of}: lost over stock's best", mine["lost"].median / best["lost"].median, bound)
    soonest = min(row["durable"].median for row in stock)
    report.at_least(f"{of}: stock's soonest publication over ours", soonest / mine["durable"].median, 1.3)
    report.at_most(f"{of}: first stall over stock's first", mine["first"] / min(row["first"] for row in stock), 1.0)
    report.at_most(f"{of}: steps slowed, encode", encoding["slowdown"].median, 1.05)
    with Ranks(world_size) as ranks:
        bounds = ranks.run(world_size, _bounds, nbytes, settings.state, str(scratch), repeats)
    table = report.table(
        f"bounds-{world_size}",
        f"What can't be left out, on {world_size} of {core_count()} cores",
        copy=("copy to memory that is there, s", ".3f"),
        copy_new=("copy to new memory, s", ".3f"),
        encode=("encoding alone, s", ".3f"),
        encoded=("encoded, MB", ".0f"),
        slowed=("steps slowed by writing as much", ".3f"),
        slowed_plain=("by writing it uncompressed", ".3f"),
        slowed_encoding=("by a process that encodes", ".3f"),
    )
    slowest = {name: max((getattr(one, name) for one in bounds), key=lambda spread: spread.median) for name in _SPREADS}
    encode, encoded_nbytes = slowest["encode"], max(one.encoded_nbytes for one in bounds)
    table.add(encoded=encoded_nbytes / 1e6, **slowest)
    report.at_most(f"{of}: stall over encoding alone, encode", encoding["stall"].median / encode.median, 1.15)
    over_copy = paired(copying["stall"], copying["copy"]).median
    report.at_most(f"{of}: stall over a copy, copy", over_copy, 1.05 if world_size == 1 else 1.2)
    most_nbytes = encoded_nbytes + 2**26
    report.at_most(f"{of}: peak memory over encoded size + 64 MiB, encode", encoding["peak"] * 1e6 / most_nbytes, 1.0)
    if _META in rows:
        report.at_most(f"{of}: lost over torch_checkpointing's", mine["lost"].median / rows[_META]["lost"].median, 1.0)
    return {name: row["lost"] for name, row in rows.items()}


def _measure(name: str, nbytes: int, source: Path | None, place: str, repeats: int) -> list[Cost]:
    """Return what saves cost this rank: first the first one, then `repeats` others."""
    torch.set_num_threads(1)
    state = {f"rank {dist.get_rank()}": build_state(nbytes, source)}
    step, copy = _new_step(), _copying(next(iter(state.values())))
    costs = []
    with _begin_of(name) as begin:
        for number in range(1 + repeats):
            dist.barrier()
            step_seconds = _seconds_of(step, _BASELINE_STEPS) / _BASELINE_STEPS
            dist.barrier()
            copy_seconds = _seconds_of(copy, 1)
            dist.barrier()
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the kernel's peak
            before_nbytes = _status("VmRSS")
            start = time.perf_counter()
            future = begin(state, f"limited://{place}/{number}")
            stalled = time.perf_counter()
            steps = 0
            while not future.done():
                step()
                steps += 1
            ended = time.perf_counter()
            future.result()
            slowdown = (ended - stalled) / steps / step_seconds if steps else 1.0
            peak_nbytes = _status("VmHWM") - before_nbytes
            costs.append(Cost(stalled - start, ended - start, slowdown, peak_nbytes, copy_seconds))
            dist.barrier()
            if dist.get_rank() == 0:
                if name.startswith("dcp_nvcomp"):
                    NvcompReader(f"{place}/{number}").read_metadata()
                shutil.rmtree(f"{place}/{number}")
    return costs


@contextmanager
def _begin_of(name: str) -> Iterator[Begin]:
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun does
    group = dist.new_group(backend="gloo")
    threads = max(1, core_count() // dist.get_world_size())
    stager: DefaultStager | None = None
    options: dict[str, Any] = {"process_group": group}
    if name in ("dcp, kept stager", "dcp, process"):  # the others of its options need CUDA
        stager = DefaultStager(StagingOptions(False, name == "dcp, process", False, False))
        options["async_stager"] = stager
    if name == "dcp, process":
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    peer = ours(threads, rate=RATE) if name.startswith("dcp_nvcomp") else stock_fsspec(1, rate=RATE)

    meta = torch_checkpointing_peer.Manager(RATE) if name == _META else None

    def begin(state: State, url: str) -> Future[Any]:
        if meta is not None:
            return meta.begin(state, url.removeprefix("limited://"))
        if name in _STAGING:
            how = _STAGING[name]
            with nullcontext() if how is None else staged_by(how):
                return async_save(state, url, thread_count=threads, rate=RATE).upload_completion
        saving: Any = dcp.async_save(state, storage_writer=peer.writer(url), **options)
        future: Future[Any] = getattr(saving, "upload_completion", saving)
        return future

    yield begin
    if meta is not None:
        meta.close()
    if stager is not None:
        stager.close()


def _new_step() -> Callable[[], None]:
    """Return a step of training: arithmetic of one thread that takes about `STEP_SECONDS`."""
    matrix = torch.randn(256, 256)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    multiply(50)
    count = max(1, int(STEP_SECONDS / (_seconds_of(lambda: multiply(100), 1) / 100)))
    return lambda: multiply(count)


def _copying(state: State) -> Callable[[], None]:
    """Return what copies a state to memory that is there."""
    there = [torch.ones_like(value) for value in state.values()]

    def copy() -> None:
        for target, value in zip(there, state.values(), strict=True):
            target.copy_(value)

    return copy


def _seconds_of(work: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - start


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@dataclass(frozen=True)
class _Bounds:
    """What nobody can leave out, on one rank: seconds of work, and how much writing beside steps slows those."""

    copy: Spread
    copy_new: Spread
    encode: Spread
    encoded_nbytes: int
    slowed: Spread
    slowed_plain: Spread
    slowed_encoding: Spread


_SPREADS = ("copy", "copy_new", "encode", "slowed", "slowed_plain", "slowed_encoding")


def _bounds(nbytes: int, source: Path | None, place: str, repeats: int) -> _Bounds:
    torch.set_num_threads(1)
    state = build_state(nbytes, source)
    copy = _copying(state)
    threads = max(1, core_count() // dist.get_world_size())
    encoder = ours(threads, discard=True)
    url = f"limited://{place}/encoded-{dist.get_rank()}"
    step = _new_step()
    spent: dict[str, list[float]] = {name: [] for name in _SPREADS}

    for _ in range(1 + repeats):
        dist.barrier()
        spent["copy"].append(_seconds_of(copy, 1))
        dist.barrier()
        spent["copy_new"].append(_seconds_of(lambda: [value.clone() for value in state.values()], 1))
        dist.barrier()
        writer: Any = save(encoder, url, state)
        spent["encode"].append(writer.last_save.seconds["encode"])
        encoded_nbytes = writer.last_save.stored_nbytes
        for name, size in (("slowed", encoded_nbytes), ("slowed_plain", nbytes)):
            dist.barrier()
            spent[name].append(_slowed_by_writing(step, size, f"{place}/written-{dist.get_rank()}"))
        dist.barrier()
        with _encoding(nbytes, source, url):
            spent["slowed_encoding"].append(_seconds_of(step, _BASELINE_STEPS))
        spent["slowed_encoding"][-1] /= _seconds_of(step, _BASELINE_STEPS)
    measured = {name: Spread(tuple(values[1:])) for name, values in spent.items()}
    return _Bounds(encoded_nbytes=encoded_nbytes, **measured)


@contextmanager
def _encoding(nbytes: int, source: Path | None, url: str) -> Iterator[None]:
    """Let another process encode on one thread, at the lowest priority."""
    context = multiprocessing.get_context("spawn")
    ours_end, theirs = context.Pipe()
    process = context.Process(target=_encode_for_ever, args=(theirs, nbytes, source, url), daemon=True)
    process.start()
    ours_end.recv()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _encode_for_ever(connection: Any, nbytes: int, source: Path | None, url: str) -> None:
    quiet()
    torch.set_num_threads(1)
    os.nice(19)
    state, encoder = build_state(nbytes, source), ours(1, discard=True)
    connection.send(None)
    while True:
        save(encoder, f"{url}-beside", state)


def _slowed_by_writing(step: Callable[[], None], nbytes: int, path: str) -> float:
    """Return how much slower a step is while a thread writes `nbytes` to a file behind the link."""
    data = memoryview(np.ones(nbytes, np.uint8))  # all of it: what is staged comes from no cache
    step_seconds = _seconds_of(step, _BASELINE_STEPS) / _BASELINE_STEPS

    def write() -> None:
        with LimitedFileSystem(rate=RATE).open(path, "wb") as file:
            for at in range(0, nbytes, _PIECE_NBYTES):
                file.write(data[at : at + _PIECE_NBYTES])

    writing, steps, start = threading.Thread(target=write), 0, time.perf_counter()
    writing.start()
    while writing.is_alive():
        step()
        steps += 1
    seconds = time.perf_counter() - start
    os.unlink(path)
    return seconds / steps / step_seconds


# --- small, returns --------------------------------------------------------------------------------------------------


def _small(report: Report, scratch: Path) -> None:
    settings = report.settings
    repeats, count = settings.repeats_or(7), 300 if settings.quick else 10_000
    settings.say(f"{count} tensors of 1 KB, {repeats} times")
    stalls = {name: _stalls(name, count, scratch, repeats) for name in ("dcp", "dcp_nvcomp")}
    table = report.table(
        "small",
        f"Small tensors, one rank: median (lowest-highest) of {repeats}",
        peer=("saved with", ""),
        stall=(f"stall of a save of {count:,} tensors of 1 KB, s", ".3f"),
    )
    for name, stall in stalls.items():
        table.add(peer=name, stall=stall)
    report.at_most("10,000 tensors: stall over stock's", paired(stalls["dcp_nvcomp"], stalls["dcp"]).median, 0.5)


def _stalls(name: str, count: int, scratch: Path, repeats: int) -> Spread:
    with Ranks(1) as ranks:
        (stalls,) = ranks.run(1, _stalls_on_rank, name, count, str(scratch / "small"), repeats)
    return Spread(tuple(stalls))


def _stalls_on_rank(name: str, count: int, place: str, repeats: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    state = {f"tensor.{number}": torch.randn(256, generator=generator) for number in range(count)}
    stalls = []
    with _begin_of(name) as begin:
        for number in range(1 + repeats):
            start = time.perf_counter()
            future = begin(state, f"limited://{place}/{number}")
            stalls.append(time.perf_counter() - start)
            future.result()
    return stalls[1:]


def _returns(report: Report, nbytes: int, scratch: Path) -> None:
    settings = report.settings
    repeats = settings.repeats_or(10)
    settings.say(f'wait="nothing", {repeats} times')
    with Ranks(1) as ranks:
        (seconds,) = ranks.run(1, _return_seconds, nbytes, str(scratch / "returns"), repeats)
    table = report.table(
        "returns",
        f"Returning at once: median (lowest-highest) of {repeats}",
        returns=(f'async_save(wait="nothing") of 100 tensors, {nbytes / 1e6:.0f} MB, returns after, ms', ".2f"),
    )
    row = table.add(returns=Spread(tuple(seconds)).scaled(1e3))
    report.at_most('wait="nothing" returns after, ms', row["returns"].median, 5.0)


def _return_seconds(nbytes: int, place: str, repeats: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    state = {f"w{number}": torch.randn(nbytes // 400, generator=generator) for number in range(100)}
    assert nbytes_of(state) == nbytes // 400 * 400
    spent = []
    for number in range(1 + repeats):
        start = time.perf_counter()
        saving = async_save(state, f"{place}/{number}", wait="nothing")
        spent.append(time.perf_counter() - start)
        saving.staging_completion.result()
        saving.upload_completion.result()
        shutil.rmtree(f"{place}/{number}")
    return spent[1:]

"""`limits`: what stops a save and a load in memory, where nothing but the processor and its memory does.

`work` times what cannot be left out, on one thread and on two at once: encoding and decoding, and copying into and out
of files in memory, from and to buffers that caches hold. `bounds` adds that up for a state: about what would be left if
all else took no time. DCP's own figures beside it are of the same run.

`planning` divides saves and loads of 10,000 small tensors among DCP's planner, this project, and the rest of DCP.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.measuring import Case, Settings, Spread, alternate
from benchmarks.peers import load, ours, remove, save, stock
from benchmarks.results import Plot, Report, Table
from benchmarks.states import State, assert_same, build_state, component, destination, nbytes_of, small_tensors
from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.codecs import CodecChain, Planes, Zstd
from dcp_nvcomp.engines.cpu import CpuEngine

U8 = npt.NDArray[np.uint8]

_THREADS = 2
_MIB = 1 << 20
_PIECE_NBYTES = 256 << 10


def run(settings: Settings) -> Report:
    report = Report("limits", settings)
    with settings.scratch() as scratch:
        if settings.wants("work"):
            states = _states(settings)
            _bounds(report, states, _work(report, states, scratch), scratch)
        if settings.wants("planning"):
            _planning(report, scratch)
    return report


def _states(settings: Settings) -> dict[str, State]:
    """Large tensors: bf16, and fp32 moments."""
    real = build_state(settings.nbytes_or(354 << 20, quick=24 << 20), settings.state)
    return {
        "large bf16": {name: tensor for name, tensor in real.items() if tensor.dtype == torch.bfloat16},
        "large fp32": {name: tensor for name, tensor in real.items() if component(name).startswith("exp_avg")},
    }


class _Worker:
    """One thread's part of a state: its blocks, what they are encoded to, and a file of its own."""

    def __init__(self, state: State, path: Path) -> None:
        tensors = [tensor.reshape(-1) for tensor in state.values()]
        flat: U8 = torch.cat(tensors).view(torch.uint8).numpy()
        self.blocks = [flat[at : at + _MIB] for at in range(0, flat.size - _MIB + 1, _MIB)]
        self._chain = CodecChain(Planes(tensors[0].element_size()), Zstd(literals_only=True))
        self._engine, self._path = CpuEngine(), path
        self._room = memoryview(bytearray(self._chain.max_encoded_nbytes(_MIB)))
        self._out = np.empty(_MIB, np.uint8)
        self._encoded = []
        for block in self.blocks:
            encoded = self._engine.encode(block, self._chain, self._room)
            self._encoded.append((memoryview(bytes(encoded.data)), encoded.row))
        self.stored_nbytes = sum(len(data) for data, _ in self._encoded)

    def encode(self) -> None:
        for block in self.blocks:
            self._engine.encode(block, self._chain, self._room)

    def decode(self) -> None:
        for data, row in self._encoded:
            self._engine.decode(data, row, self._chain, self._out, verify="full")

    def write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT)
        for _ in self.blocks:
            for at in range(0, _MIB, _PIECE_NBYTES):
                os.write(descriptor, self._out[at : at + _PIECE_NBYTES])
        os.close(descriptor)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        for _ in self.blocks:
            os.readv(descriptor, [self._out])
        os.close(descriptor)


def _beside(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(report: Report, states: dict[str, State], scratch: Path) -> dict[str, dict[str, float]]:
    """Return the seconds that a byte of each state takes on two threads, by kind of work, and its ratio."""
    repeats = report.settings.repeats_or(7)
    table = report.table(
        "work",
        f"What each MiB takes on one core, and on {_THREADS} at once: median (lowest-highest) of {repeats}",
        state=("tensors", ""),
        work=("work", ""),
        one=("one core, us", ".0f"),
        two=(f"{_THREADS} cores, us", ".0f"),
        gain=("gain", ".2f"),
    )
    found = {}
    for name, state in states.items():
        report.settings.say(f"{name}: what must be done, {repeats} times each")
        workers = [_Worker(state, scratch / f"{number}") for number in range(_THREADS)]
        found[name] = _seconds(table, name, workers, repeats)
        _ready(workers, "write")
    return found


def _seconds(table: Table, name: str, workers: list[_Worker], repeats: int) -> dict[str, float]:
    nbytes = sum(block.nbytes for block in workers[0].blocks)
    found = {"ratio": nbytes / workers[0].stored_nbytes}
    for kind in ("encode", "decode", "write", "read"):
        cases = {
            count: Case(
                lambda count=count, kind=kind: _beside([getattr(worker, kind) for worker in workers[:count]]),
                before=lambda kind=kind: _ready(workers, kind),
            )
            for count in (1, _THREADS)
        }
        spent = alternate({str(count): case for count, case in cases.items()}, repeats=repeats)
        one, two = spent["1"].scaled(1 / nbytes), spent[str(_THREADS)].scaled(1 / nbytes / _THREADS)
        table.add(
            state=name, work=kind, one=one.scaled(1e6 * _MIB), two=two.scaled(1e6 * _MIB), gain=one.median / two.median
        )
        found[kind] = two.median
    return found


def _ready(workers: list[_Worker], kind: str) -> None:
    for worker in workers:
        if kind == "write":
            worker.remove()
        elif kind == "read":
            worker.write()


def _bounds(report: Report, states: dict[str, State], work: dict[str, dict[str, float]], scratch: Path) -> None:
    repeats = report.settings.repeats_or(7)
    table = report.table(
        "bounds",
        f"Seconds of a save and a load of a state in memory, and the least that work alone takes: medians of {repeats}",
        state=("tensors", ""),
        action=("", ""),
        least=("work alone, s", ".3f"),
        ours=("dcp_nvcomp, s", ".3f"),
        stock=("DCP, s", ".3f"),
        possible=("most, x DCP", ".2f"),
    )
    for name, state in states.items():
        report.settings.say(f"{name}: saves and loads, {repeats} times each")
        cost, nbytes = work[name], nbytes_of(state)
        saved, loaded = _measured(state, scratch, repeats)
        least = {
            "save": nbytes * (cost["encode"] + cost["write"] / cost["ratio"]),
            "load": nbytes * (cost["decode"] + cost["read"] / cost["ratio"]),
        }
        for action, spent in (("save", saved), ("load", loaded)):
            plain = spent["dcp"]
            possible = plain.median / least[action]
            table.add(
                state=name, action=action, least=least[action], ours=spent["ours"], stock=plain, possible=possible
            )
    shown = {"work alone": "least", "dcp_nvcomp": "ours", "dcp": "stock"}
    series = {
        label: [(f"{row['state']}, {row['action']}", row[name]) for row in table.rows] for label, name in shown.items()
    }
    report.plots.append(Plot("In memory", "", "seconds", series))


def _measured(state: State, scratch: Path, repeats: int) -> tuple[dict[str, Spread], dict[str, Spread]]:
    peers = {"ours": ours(_THREADS), "dcp": stock(_THREADS)}
    into, places = destination(state), {name: scratch / name for name in peers}
    saved = alternate(
        {
            name: Case(
                lambda peer=peer, name=name: save(peer, places[name], state),
                before=lambda name=name: remove(places[name]),
            )
            for name, peer in peers.items()
        },
        repeats=repeats,
    )
    loads = {name: Case(lambda peer=peer, name=name: load(peer, places[name], into)) for name, peer in peers.items()}
    loaded = alternate(loads, repeats=repeats)
    assert_same(into, state, "the last that was loaded")
    for place in places.values():
        remove(place)
    return saved, loaded


class _Clock:
    """Seconds spent inside of some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def timed(self, kind: type, methods: tuple[str, ...]) -> type:
        """Return a subclass whose methods are timed."""

        def wrapped(name: str) -> Callable[..., Any]:
            @functools.wraps(getattr(kind, name))  # DCP looks at signatures
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                with self.running():
                    return getattr(kind, name)(instance, *args, **kwargs)

            return call

        return type(kind.__name__, (kind,), {name: wrapped(name) for name in methods})


_PLANNING = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
_WRITING = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
_READING = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


def _planning(report: Report, scratch: Path) -> None:
    repeats = report.settings.repeats_or(5)
    state = small_tensors(200 if report.settings.quick else 10_000, report.settings.state)
    report.settings.say(f"{len(state)} small tensors, {repeats} times")
    path, into = scratch / "small", destination(state)
    parts: dict[str, list[tuple[float, float, float]]] = {"save": [], "load": []}
    for repeat in range(-1, repeats):
        for action in parts:
            whole, planner, own = _Clock(), _Clock(), _Clock()
            if action == "save":
                writer = own.timed(NvcompWriter, _WRITING)(path, thread_count=_THREADS)
                chosen = planner.timed(dcp.DefaultSavePlanner, _PLANNING)()
                with whole.running():
                    dcp.save(state, storage_writer=writer, planner=chosen, no_dist=True)
            else:
                reader = own.timed(NvcompReader, _READING)(path, thread_count=_THREADS)
                chosen = planner.timed(dcp.DefaultLoadPlanner, _PLANNING)()
                with whole.running():
                    dcp.load(into, storage_reader=reader, planner=chosen, no_dist=True)
            if repeat >= 0:
                parts[action].append((planner.seconds, own.seconds, whole.seconds - planner.seconds - own.seconds))
    assert_same(into, state, "small tensors")
    table = report.table(
        "planning",
        f"Seconds of a save and a load of {len(state)} tensors of 1 KB: median (lowest-highest) of {repeats}",
        action=("", ""),
        planner=("DCP's planner, s", ".3f"),
        rest=("the rest of DCP, s", ".3f"),
        ours=("dcp_nvcomp, s", ".3f"),
    )
    for action, rows in parts.items():
        planner_s, own_s, rest_s = (Spread(tuple(column)) for column in zip(*rows, strict=True))
        table.add(action=action, planner=planner_s, rest=rest_s, ours=own_s)
    shown = {"DCP's planner": "planner", "the rest of DCP": "rest", "dcp_nvcomp": "ours"}
    series = {label: [(row["action"], row[name]) for row in table.rows] for label, name in shown.items()}
    report.plots.append(Plot(f"{len(state)} tensors", "", "seconds", series))

"""Parts of `gpu`: whole checkpoints of a state on the GPU, to files in memory and on a disk.

The simple baseline is what one writes in an afternoon, after NVIDIA's examples: each tensor encoded by nvCOMP in its
own container, brought to the CPU, and all of them given to torch.save. It uses ANS, nvCOMP's fastest.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_device import synchronize
from benchmarks.measuring import Settings, Spread, core_count, paired
from benchmarks.peers import Peer, load, ours, remove, save, stock
from benchmarks.results import Plot, Report
from benchmarks.states import State, assert_same, build_state, destination, nbytes_of
from dcp_nvcomp.engines.cuda.device import Device

MIB = 1 << 20
DEVICE_BUDGET = 512 * MIB


class SimpleBaseline:
    """nvCOMP's ANS for each tensor, then torch.save.

    Args:
        device: whose nvCOMP to use.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._codecs: dict[str, Any] = {}

    def _codec(self, dtype: torch.dtype) -> Any:
        # the types of NVIDIA's example: halves as such, all else as bytes
        data_type = "<f2" if dtype.itemsize == 2 else "|u1"
        if data_type not in self._codecs:
            self._codecs[data_type] = self._device.nvcomp.Codec(algorithm="ANS", data_type=data_type)
        return self._codecs[data_type]

    def save(self, path: Path, state: State) -> None:
        nvcomp = self._device.nvcomp
        path.mkdir(parents=True)
        stored = {}
        for name, tensor in state.items():
            encoded = self._codec(tensor.dtype).encode(nvcomp.as_array(tensor.view(torch.uint8).reshape(-1)))
            stored[name] = torch.from_numpy(np.array(encoded.cpu(), copy=True).view(np.uint8).reshape(-1))
        torch.save(stored, path / "state.pt")

    def load(self, path: Path, into: State) -> None:
        nvcomp = self._device.nvcomp
        stored = torch.load(path / "state.pt", weights_only=True)
        for name, tensor in into.items():
            encoded = nvcomp.as_array(stored[name].numpy()).cuda()
            decoded = self._codec(tensor.dtype).decode(encoded)
            synchronize(self._device.torch_device)  # nvCOMP's stream is its own
            tensor.view(torch.uint8).reshape(-1).copy_(torch.as_tensor(decoded, device=tensor.device).view(torch.uint8))


@dataclass
class Way:
    """One way to save and load, and what was measured of it."""

    save: Callable[[Path, State], Any]
    load: Callable[[Path, State], Any]
    save_seconds: list[float] = field(default_factory=list)
    load_seconds: list[float] = field(default_factory=list)
    save_peak_nbytes: int = 0
    load_peak_nbytes: int = 0
    stored_nbytes: int = 0


def way_of(peer: Peer) -> Way:
    return Way(lambda path, state: save(peer, path, state), lambda path, into: load(peer, path, into))


@contextmanager
def _place(settings: Settings, part: str) -> Iterator[Path]:
    if part == "memory":
        with Settings().scratch() as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-bench-", dir=settings.directory) as name:
        yield Path(name)


WAYS = ("dcp_nvcomp", "dcp_nvcomp, ans", "dcp", "dcp+zstd", "simple baseline")


def checkpoints(report: Report, device: Device, part: str, names: Sequence[str] = WAYS) -> None:
    """Save and load in each way, in turn; each checkpoint is removed before the next way's, as memory may be short."""
    settings, threads = report.settings, core_count()
    repeats = settings.repeats_or(3)
    state = build_state(
        settings.nbytes_or(16 << 30, quick=64 << 20),
        settings.state,
        device=device.torch_device,
        tensor_nbytes=128 * MIB,
    )
    into = destination(state)
    baseline = SimpleBaseline(device)
    all_ways = {
        "dcp_nvcomp": way_of(ours(threads, device_memory_budget=DEVICE_BUDGET)),
        "dcp_nvcomp, ans": way_of(ours(threads, codec="ans", device_memory_budget=DEVICE_BUDGET)),
        "dcp": way_of(stock(threads)),
        "dcp+zstd": way_of(stock(threads, zstd=True)),
        "simple baseline": Way(baseline.save, baseline.load),
    }
    ways = {name: all_ways[name] for name in names}
    with _place(settings, part) as scratch:
        for repeat in range(-1, repeats):
            turn = repeat % len(names)
            for name in (*names[turn:], *names[:turn]):
                settings.say(f"{part}, {'warm-up' if repeat < 0 else f'repeat {repeat + 1}'}: {name}")
                measure(ways[name], name, scratch / "checkpoint", state, into, warm=repeat >= 0)
    _report(report, part, ways, nbytes_of(state), repeats)


def measure(way: Way, name: str, path: Path, state: State, into: State, *, warm: bool) -> None:
    for tensor in into.values():
        tensor.zero_()
    seconds, peak = _watched(state, lambda: way.save(path, state))
    way.save_peak_nbytes = max(way.save_peak_nbytes, peak)
    way.stored_nbytes = sum(file.stat().st_size for file in path.iterdir())
    load_seconds, peak = _watched(state, lambda: way.load(path, into))
    way.load_peak_nbytes = max(way.load_peak_nbytes, peak)
    remove(path)
    if warm:
        way.save_seconds.append(seconds)
        way.load_seconds.append(load_seconds)
    else:
        assert_same(into, state, name)


def _watched(state: State, work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and the peak of GPU memory beyond what was allocated before. nvCOMP's is torch's, so it is counted."""
    device = next(iter(state.values())).device
    gc.collect()
    synchronize(device)
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated(device) - before if on_gpu else 0)


def _report(report: Report, part: str, ways: dict[str, Way], nbytes: int, repeats: int) -> None:
    table = report.table(
        f"checkpoints_{part}",
        f"{nbytes / 1e9:.1f} GB on the GPU to and from {'files in memory' if part == 'memory' else 'a disk'}, "
        f"{core_count()} threads: median (lowest-highest) of {repeats}",
        writer=("writer", ""),
        ratio=("ratio", ".3f"),
        save_seconds=("save, s", ".3f"),
        load_seconds=("load, s", ".3f"),
        save_rate=("save, GB/s", "~.2f"),
        load_rate=("load, GB/s", "~.2f"),
        save_speedup=("save, x DCP", ".2f"),
        load_speedup=("load, x DCP", ".2f"),
        save_peak=("save, GPU MiB", ".0f"),
        load_peak=("load, GPU MiB", ".0f"),
    )
    spreads = {name: (Spread(tuple(way.save_seconds)), Spread(tuple(way.load_seconds))) for name, way in ways.items()}
    for name, way in ways.items():
        saved, loaded = spreads[name]
        table.add(
            writer=name,
            ratio=nbytes / way.stored_nbytes,
            save_seconds=saved,
            load_seconds=loaded,
            save_rate=saved.rate(nbytes / 1e9),
            load_rate=loaded.rate(nbytes / 1e9),
            save_speedup=paired(spreads["dcp"][0], saved),
            load_speedup=paired(spreads["dcp"][1], loaded),
            save_peak=way.save_peak_nbytes / MIB,
            load_peak=way.load_peak_nbytes / MIB,
        )
    against = paired(spreads["simple baseline"][0], spreads["dcp_nvcomp"][0]).median
    report.at_least(f"save to {part}, speed over the simple baseline", against, 5.0)
    for action in ("save", "load"):
        peak = max(getattr(way, f"{action}_peak_nbytes") for name, way in ways.items() if name.startswith("dcp_nvcomp"))
        report.at_most(f"{action} from {part}, peak extra GPU memory over the budget", peak / DEVICE_BUDGET, 1.15)
    series = {
        name: [("save", s.rate(nbytes / 1e9)), ("load", r.rate(nbytes / 1e9))] for name, (s, r) in spreads.items()
    }
    report.plots.append(Plot(f"{nbytes / 1e9:.1f} GB, {part}", "", "GB/s", series))

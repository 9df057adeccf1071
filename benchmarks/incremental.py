"""`incremental`: ten saves of a training run of which part does not change, whole and with a reference to the last.

Each state is trained between saves: what is not frozen takes a step of AdamW, with noise for gradients, and is saved
with its moments: adapters in bf16, as torchtune trains them, else in fp32. A save with a reference writes what has
changed, and hashes all of it to know. Seconds are of `dcp_nvcomp.save`, whole and with a reference in turn; the last
checkpoint is loaded and compared.
"""

from __future__ import annotations

import gc
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Settings, Spread, core_count, paired
from benchmarks.results import Plot, Report
from benchmarks.states import TENSOR_NBYTES, State, assert_same, build_state, component, destination, nbytes_of
from dcp_nvcomp import load, save
from dcp_nvcomp.saving.references import hash_of

_SAVES = 10
_WAYS = ("whole", "with a reference")


@dataclass(frozen=True)
class _Kind:
    name: str
    frozen: float  # the part of its bytes that is not trained, in bf16
    dtype: torch.dtype  # of what is trained, and its moments
    least_saved: float  # bytes of a later save over the first, at most
    most_seconds: float | None  # of a later save over a whole one


_KINDS = (
    _Kind("adapters, 90 % frozen", 0.9, torch.bfloat16, 0.12, 0.4),
    _Kind("a frozen tower, 40 %", 0.4, torch.float32, 0.7, None),
    _Kind("all trained", 0.0, torch.float32, 1.01, None),
)


def run(settings: Settings) -> Report:
    report = Report("incremental", settings)
    nbytes, repeats = settings.nbytes_or(400_000_000), settings.repeats_or(_SAVES - 1)
    table = report.table(
        "saves",
        f"The second and later saves of {nbytes / 1e6:.0f} MB on {core_count()} cores: median (lowest-highest) of "
        f"{repeats}",
        state=("state", ""),
        way=("save", ""),
        seconds=("s", ".3f"),
        factor=("time over a whole save", ".3f"),
        nbytes=("bytes over the first save", ".4f"),
    )
    points: list[tuple[Any, Spread]] = []
    for kind in _KINDS:
        settings.say(kind.name)
        with settings.scratch() as scratch:
            seconds, sizes, first = _measured(kind, nbytes, repeats, settings.state, scratch)
        factor = paired(seconds[_WAYS[1]], seconds[_WAYS[0]])
        for way in _WAYS:
            over = factor if way == _WAYS[1] else None
            table.add(state=kind.name, way=way, seconds=seconds[way], factor=over, nbytes=sizes[way].scaled(1 / first))
        points.append((kind.name, factor))
        report.at_most(
            f"{kind.name}: bytes of a later save over the first", sizes[_WAYS[1]].high / first, kind.least_saved
        )
        if kind.most_seconds is not None:
            report.at_most(f"{kind.name}: time over a whole save", factor.median, kind.most_seconds)
    _hashing(report)
    report.plots.append(Plot("Saves with a reference", "state", "x time of a whole save", {"save": points}, level=1.0))
    return report


def _measured(
    kind: _Kind, nbytes: int, repeats: int, source: Path | None, scratch: Path
) -> tuple[dict[str, Spread], dict[str, Spread], int]:
    """Return seconds and bytes of later saves by way, and the bytes of the first."""
    state, optimizer = _state(kind, nbytes, source)
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    sizes: dict[str, list[float]] = {way: [] for way in _WAYS}
    first = save(state, scratch / f"{_WAYS[1]}-0", no_dist=True, reference=()).stored_nbytes
    save(state, scratch / f"{_WAYS[0]}-0", no_dist=True)
    for number in range(1, repeats + 1):
        _train(optimizer, number)
        for way in _WAYS if number % 2 else reversed(_WAYS):
            path, before = scratch / f"{way}-{number}", scratch / f"{way}-{number - 1}"
            gc.collect()
            start = time.perf_counter()
            stats = save(state, path, no_dist=True, reference=before if way == _WAYS[1] else None)
            seconds[way].append(time.perf_counter() - start)
            sizes[way].append(float(stats.stored_nbytes))
        shutil.rmtree(scratch / f"{_WAYS[0]}-{number - 1}")
        if 1 < number < repeats:  # the first one has what is frozen
            shutil.rmtree(scratch / f"{_WAYS[1]}-{number - 1}")
    into = destination(state)
    load(into, scratch / f"{_WAYS[1]}-{repeats}", no_dist=True)
    assert_same(into, state, kind.name)
    return (
        {way: Spread(tuple(seconds[way])) for way in _WAYS},
        {way: Spread(tuple(sizes[way])) for way in _WAYS},
        first,
    )


def _state(kind: _Kind, nbytes: int, source: Path | None) -> tuple[State, torch.optim.Optimizer]:
    """Return a state of frozen weights and of trained ones with their moments, and what trains these."""
    real = build_state(6 * nbytes, source, tensor_nbytes=min(TENSOR_NBYTES, nbytes // 500))
    weights = iter([tensor for name, tensor in real.items() if component(name) == "model" and tensor.dim() == 2])
    state, trained = State(), list[torch.nn.Parameter]()
    while nbytes_of(state) < kind.frozen * nbytes:
        state[f"frozen.{len(state)}"] = next(weights)
    while nbytes_of(state) + 3 * sum(one.nbytes for one in trained) < nbytes:
        trained.append(torch.nn.Parameter(next(weights).to(kind.dtype)))
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
    for number in range(3):
        _train(optimizer, -1 - number)
    for number, parameter in enumerate(trained):
        moments = optimizer.state[parameter]
        state[f"trained.{number}"] = parameter.detach()
        state[f"exp_avg.{number}"], state[f"exp_avg_sq.{number}"] = moments["exp_avg"], moments["exp_avg_sq"]
    return state, optimizer


def _train(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.mul_(parameter.detach().abs() + 1e-4).to(parameter.dtype)
    optimizer.step()


def _hashing(report: Report) -> None:
    """How fast a tensor in memory is hashed, by one thread."""
    tensor = torch.randn(32 << 20 if not report.settings.quick else 1 << 20)
    hash_of(tensor)
    rates = []
    for _ in range(report.settings.repeats_or(5)):
        start = time.perf_counter()
        hash_of(tensor)
        rates.append(tensor.nbytes / (time.perf_counter() - start) / 1e9)
    report.table("hashing", "A tensor hashed by one thread", nbytes=("bytes", ",d"), rate=("GB/s", ".1f")).add(
        nbytes=nbytes_of({"": tensor}), rate=Spread(tuple(rates))
    )

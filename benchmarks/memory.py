"""Part of `scale`: peak memory of save and load beyond the state itself, for several budgets and sizes.

Measured from outside, in a process of its own for each row: the parent reads what the kernel says of the child
(processes.py). The child has imported everything and saved and loaded something small before; what it loads into was
touched before. So what is counted is buffers, whatever holds them: this project, the storage client, the allocator. A
tensor that is not contiguous is among the state, a quarter of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_memory import as_bytes
from benchmarks.measuring import available_nbytes, core_count
from benchmarks.peers import Peer, load, ours, save, stock
from benchmarks.processes import watch
from benchmarks.results import Plot, Report
from benchmarks.states import State, build_state
from dcp_nvcomp.codecs.base import checksum

MIB = 1 << 20
BUDGETS = {256 * MIB: (0.5, 1.0, 2.0, 4.0, 8.0), 512 * MIB: (0.5, 2.0, 8.0), 1024 * MIB: (0.5, 1.0, 4.0, 8.0)}
QUICK_BUDGETS = {64 * MIB: (1.0,)}


@dataclass(frozen=True)
class Job:
    """Parameters of the child process."""

    writer: str
    nbytes: int
    budget: int
    state: Path | None
    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)

    def peer(self) -> Peer:
        if self.writer == "dcp":
            return stock(core_count())
        return ours(core_count(), host_memory_budget=self.budget, **self.storage_options)


def memory(report: Report) -> None:
    """Save and load under budgets, compared with DCP, which has none."""
    settings = report.settings
    budgets = QUICK_BUDGETS if settings.quick else BUDGETS
    table = report.table(
        "memory",
        "Peak host memory beyond the state, MiB: all that is resident, by the kernel's account; DCP knows no budget",
        storage=("storage", ""),
        budget=("budget", ".0f"),
        nbytes=("state", ".0f"),
        save_peak=("save", ".1f"),
        load_peak=("load", ".1f"),
        stock_save_peak=("DCP's save", ".1f"),
        stock_load_peak=("DCP's load", ".1f"),
    )
    worst = 0.0
    with settings.scratch() as scratch:
        storages = {"files": (str(scratch / "checkpoint"), {})}
        if settings.s3 is not None:
            from benchmarks.s3 import new_bucket, storage_options

            storages["S3"] = (new_bucket(settings.s3), storage_options(settings.s3))
        for storage, (url, options) in storages.items():
            for budget, factors in budgets.items():
                for factor in factors:
                    nbytes = int(budget * factor)
                    if nbytes * 2.2 > available_nbytes():  # the state or what it is loaded into, and the checkpoint
                        report.notes.append(f"a state of {nbytes / 1e9:.1f} GB is left out: memory does not hold it")
                        continue
                    settings.say(f"{storage}: budget {budget >> 20} MiB, state {nbytes >> 20} MiB")
                    job = Job("dcp_nvcomp", nbytes, budget, settings.state, url, options)
                    _, mine = watch(save_and_load, job)
                    row = table.add(
                        storage=storage,
                        budget=budget / MIB,
                        nbytes=nbytes / MIB,
                        save_peak=mine["save"].peak_nbytes / MIB,
                        load_peak=mine["load"].peak_nbytes / MIB,
                        save_anonymous=mine["save"].anonymous_nbytes / MIB,
                        load_anonymous=mine["load"].anonymous_nbytes / MIB,
                    )
                    worst = max(worst, *(mine[action].peak_nbytes / budget for action in ("save", "load")))
                    if storage == "files":
                        _, theirs = watch(save_and_load, Job("dcp", nbytes, budget, settings.state, url))
                        row["stock_save_peak"] = theirs["save"].peak_nbytes / MIB
                        row["stock_load_peak"] = theirs["load"].peak_nbytes / MIB
            if storage == "S3":
                from benchmarks.s3 import remove_bucket

                remove_bucket(settings.s3, url)
    if settings.s3 is None:
        report.notes.append("memory while saving to S3 is left out: no server was named (--s3)")
    report.at_most("peak host memory beyond the state over the budget, worst of all", worst, 1.15)
    files = [row for row in table.rows if row["storage"] == "files"]
    series = {
        f"{action}, budget {budget >> 20} MiB": [
            (row["nbytes"] / row["budget"], row[f"{action}_peak"] / row["budget"])
            for row in files
            if row["budget"] == budget / MIB
        ]
        for budget in budgets
        for action in ("save", "load")
    }
    report.plots.append(
        Plot("Peak memory beyond the state", "state over budget", "peak over budget", series, log_x=True, level=1.15)
    )


def _state(job: Job) -> State:
    state = build_state(job.nbytes * 3 // 4, job.state)
    values = next(tensor for tensor in state.values() if tensor.dtype == torch.float32 and tensor.dim() == 2)
    columns = 4096
    lines = job.nbytes // 4 // 4 // columns
    values = values.reshape(-1).repeat(-(-lines * columns // values.numel()))[: lines * columns]
    state["not.contiguous"] = values.reshape(columns, lines).t()
    assert not state["not.contiguous"].is_contiguous()
    return state


def _checksums(state: State) -> dict[str, int]:
    return {name: checksum(as_bytes(tensor.contiguous())) for name, tensor in state.items()}


def save_and_load(job: Job) -> Generator[str, None, None]:
    """In the child."""
    torch.set_num_threads(core_count())
    peer, state = job.peer(), _state(job)
    small = {"warm": torch.arange(1000.0), "warmer": torch.ones(600, 600)}
    warm_url = f"{job.url}-warm"
    save(peer, warm_url, small)
    load(peer, warm_url, small)
    yield "save"
    save(peer, job.url, state)
    yield ""
    expected = _checksums(state)
    for tensor in state.values():
        tensor.zero_()  # and loaded into: a second state of this size might not fit
    yield "load"
    load(peer, job.url, state)
    yield ""
    assert _checksums(state) == expected, f"{job.writer} did not load what was saved"
    if "://" not in job.url:
        shutil.rmtree(job.url)
        shutil.rmtree(warm_url)

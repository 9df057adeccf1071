"""Part of `scale`: what the coordinator does for a save of many ranks, on one process and without their data.

Every rank has a row shard of each of `tensors` tensors. Its plan and its write results arrive pickled, as DCP's
collectives carry them, so the coordinator first unpickles them. Then it runs DCP's `DefaultSavePlanner`, the writer's
`prepare_global_plan`, pickles the plans for the ranks, and after the results came in the writer's `finish`, which
publishes `.metadata`. The same is done with DCP's own writer: the difference is what this project adds.

Each run is a process of its own, so that its peak memory can be watched (processes.py).
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what DCP's own writer reports of each shard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.measuring import Spread, available_nbytes, paired
from benchmarks.processes import Memory, watch
from benchmarks.results import Plot, Report
from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.names import METADATA_NAME, data_file_name
from dcp_nvcomp.saving.rank_save import RankResults
from dcp_nvcomp.saving.stats import RankTotals, Totals

# ranks, tensors: as many shards again on 8 times the ranks, then twice as many shards
CASES = ((64, 1_000), (512, 1_000), (4_096, 125), (1_024, 1_000))
TARGET = (512, 1_000)
QUICK_CASES = ((16, 20),)
# What the coordinator takes at its peak for each shard, with room; cases that memory does not hold are left out.
_SHARD_NBYTES = 6_000
STEPS = ("gather plans", "global plan", "prepare", "scatter plans", "gather results", "finish")


@dataclass(frozen=True)
class Job:
    """The job that a process simulates."""

    writer: str
    ranks: int
    tensors: int
    directory: str


@dataclass(frozen=True)
class _Run:
    seconds: dict[str, float]
    memory: Memory
    metadata_nbytes: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def planning(report: Report) -> None:
    """Planning and commit of simulated ranks, and the read of the `.metadata` that came of it."""
    settings = report.settings
    cases = QUICK_CASES if settings.quick else CASES
    titles = {step: (step.replace(" ", "\n") + ", s", "~.3f") for step in STEPS}
    table = report.table(
        "planning",
        "The coordinator's work for a save: medians, and (lowest-highest); memory by the kernel's account",
        writer=("writer", ""),
        ranks=("ranks", ",d"),
        tensors=("tensors", ",d"),
        **titles,
        total=("all, s", ".3f"),
        memory=("memory, MB", ".0f"),
        metadata_nbytes=(".metadata, bytes", ",d"),
    )
    added = report.table(
        "added",
        "What this project adds to DCP's own planning and commit, and its safe read of `.metadata` beside pickle.loads",
        ranks=("ranks", ",d"),
        tensors=("tensors", ",d"),
        shards=("shards", ",d"),
        time=("time, x DCP", "+.3f"),
        memory=("memory, x DCP", "+.3f"),
        metadata=(".metadata, x DCP's", ".3f"),
        safe_seconds=("safe read, s", ".3f"),
        pickle_seconds=("pickle.loads, s", ".3f"),
        read_factor=("x pickle", ".2f"),
        safe_memory=("safe read, MB", ".0f"),
        pickle_memory=("pickle.loads, MB", ".0f"),
    )
    for ranks, tensors in cases:
        shards = ranks * tensors
        if shards * _SHARD_NBYTES > available_nbytes():
            need = shards * _SHARD_NBYTES / 1e9
            report.notes.append(
                f"{ranks:,} ranks x {tensors:,} tensors are left out: the coordinator needs ~{need:.0f} GB"
            )
            continue
        repeats = settings.repeats_or(3 if shards <= 600_000 else 1)
        settings.say(f"{ranks:,} ranks x {tensors:,} tensors, {repeats} times each")
        _one_case(report, table, added, ranks, tensors, repeats)
    _check_and_plot(report, added)


def _one_case(report: Report, table: Any, added: Any, ranks: int, tensors: int, repeats: int) -> None:
    runs: dict[str, list[_Run]] = {"dcp": [], "dcp_nvcomp": []}
    with report.settings.scratch() as scratch:
        for repeat in range(repeats):
            for writer in list(runs) if repeat % 2 else list(reversed(runs)):
                directory = scratch / f"{writer}-{repeat}"
                seconds, memory = watch(coordinate, Job(writer, ranks, tensors, str(directory)))
                nbytes = (directory / METADATA_NAME).stat().st_size
                runs[writer].append(_Run(seconds, memory["coordinator"], nbytes))
        ours = scratch / f"dcp_nvcomp-{repeats - 1}" / METADATA_NAME
        reads, read_memory = watch(read_metadata, str(ours), repeats)
    total = {name: Spread(tuple(run.total for run in made)) for name, made in runs.items()}
    peak = {name: Spread(tuple(float(run.memory.peak_nbytes) for run in made)) for name, made in runs.items()}
    if ranks * tensors >= 100_000:
        alone, shards = runs["dcp"][-1], ranks * tensors
        report.notes.append(
            f"what limits {ranks:,} ranks x {tensors:,} tensors: DCP's coordinator alone takes "
            f"{alone.memory.peak_nbytes / shards / 1e3:.1f} KB and {alone.total / shards * 1e6:.0f} us for each shard"
        )
    for name, made in runs.items():
        table.add(
            writer=name,
            ranks=ranks,
            tensors=tensors,
            **{step: Spread(tuple(run.seconds[step] for run in made)) for step in STEPS},
            total=total[name],
            memory=peak[name].scaled(1e-6),
            metadata_nbytes=made[-1].metadata_nbytes,
        )
    added.add(
        ranks=ranks,
        tensors=tensors,
        shards=ranks * tensors,
        time=_less_one(paired(total["dcp_nvcomp"], total["dcp"])),
        memory=_less_one(paired(peak["dcp_nvcomp"], peak["dcp"])),
        metadata=runs["dcp_nvcomp"][-1].metadata_nbytes / runs["dcp"][-1].metadata_nbytes,
        safe_seconds=reads["safe"],
        pickle_seconds=reads["pickle"],
        read_factor=paired(reads["safe"], reads["pickle"]),
        safe_memory=read_memory["safe"].peak_nbytes / 1e6,
        pickle_memory=read_memory["pickle"].peak_nbytes / 1e6,
    )


def _less_one(quotients: Spread) -> Spread:
    return Spread(tuple(value - 1 for value in quotients.values))


def _check_and_plot(report: Report, added: Any) -> None:
    target = next((row for row in added.rows if (row["ranks"], row["tensors"]) == TARGET), added.rows[-1])
    where = f"{target['ranks']:,} ranks x {target['tensors']:,} tensors"
    report.at_most(f"time added to DCP's planning and commit, {where}", target["time"].median, 0.25)
    report.at_most(f"memory added to DCP's planning and commit, {where}", target["memory"].median, 0.25)
    report.at_most(f"safe read of .metadata over pickle.loads, {where}", target["read_factor"].median, 4.0)
    report.at_most(f".metadata over DCP's, {where}", target["metadata"], 1.0)
    bars = [f"{row['ranks']:,} x {row['tensors']:,}" for row in added.rows]
    series = {
        cell: [(bar, row[cell]) for bar, row in zip(bars, added.rows, strict=True)] for cell in ("time", "memory")
    }
    report.plots.append(Plot("Added to DCP's planning and commit", "ranks x tensors", "x DCP", series, level=0.25))
    reads = {
        name: [(bar, row[f"{cell}_seconds"]) for bar, row in zip(bars, added.rows, strict=True)]
        for name, cell in (("safe read", "safe"), ("pickle.loads", "pickle"))
    }
    report.plots.append(Plot("Read of .metadata", "ranks x tensors", "seconds", reads))


# --- in the processes -------------------------------------------------------------------------------------------------

# Tensors are longest in the dimension in which they are sharded. Elsewhere DCP's check for overlaps compares each shard
# with every other, its own time grows with the square of the ranks, and what this project adds would seem like nothing.
ROWS, COLUMNS = 128, 4_096


def plan_of(rank: int, ranks: int, tensors: int) -> SavePlan:
    """Return the plan that a rank sends: its rows of each tensor."""
    items = []
    whole, offsets = torch.Size([ROWS * ranks, COLUMNS]), torch.Size([ROWS * rank, 0])
    for number in range(tensors):
        fqn = f"model.layers.{number // 8}.block.weight_{number % 8}"
        shard = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([ROWS, COLUMNS]))
        data = TensorWriteData(chunk=shard, properties=TensorProperties(dtype=torch.bfloat16), size=whole)
        items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
    names = {item.index.fqn: tuple(item.index.fqn.split(".")) for item in items}
    return SavePlan(items, planner_data=names)


def results_of(writer: str, rank: int, plan: SavePlan) -> list[WriteResult]:
    """Return the write results that a rank reports for its plan."""
    nbytes = ROWS * COLUMNS * 2
    if writer == "dcp":
        return [
            WriteResult(item.index, nbytes, _StorageInfo(f"__{rank}_0.distcp", number * nbytes, nbytes))
            for number, item in enumerate(plan.items)
        ]
    file = (data_file_name(rank, 0, f"{rank:032x}"), len(plan.items) * nbytes, 30_000, 0x12345678)
    written = [WriteResult(item.index, nbytes, (file, i)) for i, item in enumerate(plan.items)]
    results = RankResults(written, RankTotals(files={file[0]: file[1]}))
    totals = Totals(len(plan.items), len(plan.items) * nbytes, nbytes)
    results.totals.add({("layers", "planes-zstd", "bfloat16"): totals})
    return results


def coordinate(job: Job) -> Generator[str, None, dict[str, float]]:
    """Seconds of each step."""
    storage_writer = NvcompWriter(job.directory) if job.writer == "dcp_nvcomp" else dcp.FileSystemWriter(job.directory)
    storage_writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({}, storage_writer.storage_meta(), is_coordinator=True)
    gc.disable()  # while the ranks' plans are made, which is not what is measured
    arrived = []
    for rank in range(job.ranks):
        plan = storage_writer.prepare_local_plan(plan_of(rank, job.ranks, job.tensors))
        arrived.append(pickle.dumps(plan))
    gc.enable()
    seconds: dict[str, float] = {}
    yield "coordinator"
    plans = _timed(seconds, "gather plans", _load_all, arrived)
    plans, metadata = _timed(seconds, "global plan", planner.create_global_plan, plans)
    plans = _timed(seconds, "prepare", storage_writer.prepare_global_plan, plans)
    sent = _timed(seconds, "scatter plans", _dump_all, plans)
    if job.writer == "dcp_nvcomp":
        _pretend_to_write(Path(job.directory), job.ranks, plans)
    reports = [pickle.dumps(results_of(job.writer, rank, plan)) for rank, plan in enumerate(plans)]
    del plans, sent
    results = _timed(seconds, "gather results", _load_all, reports)
    _timed(seconds, "finish", storage_writer.finish, metadata, results)
    return seconds


def _pretend_to_write(directory: Path, ranks: int, plans: list[SavePlan]) -> None:
    """Data files as holes of the right size: a commit looks whether they are there."""
    for rank in range(ranks):
        name, nbytes, *_ = results_of("dcp_nvcomp", rank, plans[rank])[0].storage_data[0]
        with open(directory / name, "wb") as file:
            file.truncate(nbytes)


def _timed(seconds: dict[str, float], step: str, work: Callable[..., Any], *arguments: Any) -> Any:
    start = time.perf_counter()
    result = work(*arguments)
    seconds[step] = time.perf_counter() - start
    return result


def _load_all(messages: Sequence[bytes]) -> list[Any]:
    return [pickle.loads(message) for message in messages]


def _dump_all(values: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(value) for value in values]


def read_metadata(path: str, repeats: int) -> Generator[str, None, dict[str, Spread]]:
    """Seconds to read it safely and with pickle, in turn; memory of each."""
    data = Path(path).read_bytes()
    readers = {"safe": lambda: parse_metadata(data, path=path), "pickle": lambda: pickle.loads(data)}
    for name, read in readers.items():  # warm, and watched
        yield name
        read()
    yield ""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(repeats):
        for name, read in readers.items():
            gc.collect()
            _timed(found := {}, name, read)
            seconds[name].append(found[name])
    return {name: Spread(tuple(values)) for name, values in seconds.items()}

"""`plans`: what planning and commit cost the first save of a state, and those whose plan is kept from the one before.

`ranks`: four ranks on one machine, each with shards of 1,000 DTensors, which are small: what is measured is all of a
save but the writing of its files, with `dcp_nvcomp.save` and with `dcp.save` and an `NvcompWriter`.
`simulated`: what one of hundreds or thousands of ranks does, and their coordinator, each in one process, and what
crosses the group: as DCP does it, with plans that the ranks compute, and with plans that they have kept.
`connections`: sockets of the ranks (connections.py).
"""

from __future__ import annotations

import dataclasses
import gc
import pickle
import shutil
import time
from array import array
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.connections import connections
from benchmarks.measuring import Settings, Spread, available_nbytes, paired
from benchmarks.planning import plan_of, results_of
from benchmarks.processes import Ranks, watch
from benchmarks.results import Report
from dcp_nvcomp import NvcompWriter, save
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.names import METADATA_NAME, data_file_name
from dcp_nvcomp.saving.plans.agreement import Proposal
from dcp_nvcomp.saving.plans.array_plan import ArrayPlan
from dcp_nvcomp.saving.plans.global_plan import PlacedItems
from dcp_nvcomp.saving.plans.shared_plan import plan_all
from dcp_nvcomp.saving.plans.structure import Described, Part, TensorKind
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.saving.rank_save import RankResults
from dcp_nvcomp.saving.stats import RankTotals, Totals

_FIRST_OVER_LATER = 1.5
_FIRST_OVER_DCP = 0.3
_WAYS = ("first save", "later saves", "dcp.save")


def run(settings: Settings) -> Report:
    report = Report("plans", settings)
    if settings.wants("ranks"):
        _ranks(report)
    if settings.wants("simulated"):
        _simulated(report)
    if settings.wants("connections"):
        connections(report)
    return report


# --- ranks -----------------------------------------------------------------------------------------------------------


def _ranks(report: Report) -> None:
    settings = report.settings
    repeats, world_size, tensors = settings.repeats_or(7), 4, 50 if settings.quick else 1_000
    settings.say(f"{world_size} ranks x {tensors} tensors, {repeats} times")
    with settings.scratch() as scratch, Ranks(world_size) as ranks:
        each = ranks.run(world_size, _seconds, tensors, str(scratch), repeats)
    table = report.table(
        "ranks",
        f"Planning and commit of {tensors:,} DTensors on {world_size} ranks: median (lowest-highest) of {repeats}, "
        "of the slowest rank",
        way=("", ""),
        seconds=("planning and commit, s", ".3f"),
        factor=("x first save", ".2f"),
    )
    slowest = {way: Spread(tuple(map(max, zip(*(one[way] for one in each), strict=True)))) for way in _WAYS}
    for way in _WAYS:
        table.add(way=way, seconds=slowest[way], factor=paired(slowest[way], slowest["first save"]))
    report.at_most(
        "first planning and commit over a later save's",
        paired(slowest["first save"], slowest["later saves"]).median,
        _FIRST_OVER_LATER,
    )
    report.at_most(
        "first planning and commit over dcp.save's",
        paired(slowest["first save"], slowest["dcp.save"]).median,
        _FIRST_OVER_DCP,
    )


def _seconds(tensors: int, place: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of a save on this rank, without those in which it writes its files."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 4 * dist.get_world_size()
    state = {
        f"layers.{number}.weight": distribute_tensor(torch.ones(rows, 8), mesh, [Shard(0)], src_data_rank=None)
        for number in range(tensors)
    }
    written, write = [0.0], NvcompWriter.write_data

    def watched(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = write(*arguments)
        dist.barrier()  # the slowest rank's writing is none of the commit's business
        written[0] = time.perf_counter() - start
        return result

    NvcompWriter.write_data = watched  # type: ignore[method-assign]
    found: dict[str, list[float]] = {way: [] for way in _WAYS}

    def measure(way: str, saving: Any) -> None:
        dist.barrier()
        start = time.perf_counter()
        saving()
        found[way].append(time.perf_counter() - start - written[0])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{place}/c")
        dist.barrier()

    for _ in range(1 + repeats):
        forget_all()
        measure("first save", lambda: save(state, f"{place}/c", thread_count=1))
        measure("later saves", lambda: save(state, f"{place}/c", thread_count=1))
        measure("dcp.save", lambda: dcp.save(state, storage_writer=NvcompWriter(f"{place}/c", thread_count=1)))
    return {way: seconds[1:] for way, seconds in found.items()}


# --- simulated -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A job of which one process does what each rank, and what the coordinator does."""

    ranks: int
    tensors: int
    replicas: int = 1
    by_dcp: bool = False  # also as `dcp.save` does it

    def __str__(self) -> str:
        kind = f"HSDP, {self.replicas} replicas" if self.replicas > 1 else "FSDP"
        return f"{self.ranks:,} x {self.tensors:,} {kind}"


CASES = (Case(512, 1_000, by_dcp=True), Case(4_096, 1_000, 64), Case(10_000, 2_000))
QUICK_CASES = (Case(8, 20, by_dcp=True), Case(8, 20, 2))
# What a coordinator takes at its peak for each shard, with room; cases that memory does not hold are left out.
_SHARD_NBYTES = 200
_MOST_READ = 1 << 20  # shards: pickle makes objects of a kilobyte of each


def _simulated(report: Report) -> None:
    settings = report.settings
    table = report.table(
        "simulated",
        "Simulated ranks x tensors: seconds and peak memory of a rank and of the coordinator for one save, and what "
        "crosses the group",
        case=("ranks x tensors", ""),
        way=("", ""),
        rank=("planning on a rank, s", ".2f"),
        rank_nbytes=("MB", ".0f"),
        plan=("planning on the coordinator, s", ".2f"),
        commit=("results and commit, s", ".2f"),
        coordinator_nbytes=("MB", ".0f"),
        to=("to it, MB", ".1f"),
        back=("to each rank, MB", ".2f"),
        metadata=(".metadata, bytes a shard", ".1f"),
        read=("safe read of it, s", ".2f"),
        read_factor=("x pickle.loads", ".2f"),
    )
    rows: dict[Case, dict[str, Any]] = {}
    for case in QUICK_CASES if settings.quick else CASES:
        shards = case.ranks * case.tensors // case.replicas
        if shards * _SHARD_NBYTES > available_nbytes():
            report.notes.append(f"{case} are left out: the coordinator needs {shards * _SHARD_NBYTES / 1e9:.0f} GB")
            continue
        settings.say(f"{case} simulated")
        for way, job in (("dcp.save", _by_dcp), ("first save", _computed), ("later saves", _computed)):
            if way == "dcp.save" and not case.by_dcp:
                continue
            with settings.scratch() as scratch:
                found, memory = watch(job, case, str(scratch / "c"), way)
            for name in ("rank", "coordinator"):
                found[f"{name}_nbytes"] = memory[name].peak_nbytes / 1e6 if name in memory else None
            table.add(case=str(case), way=way, **found)
            if way == "first save":
                rows[case] = found
    for case, found in rows.items():
        report.at_most(f"coordinator's planning and commit, {case}, s", found["plan"] + found["commit"], _MOST[case][0])
        report.at_most(f"coordinator's memory, {case}, MB", found["coordinator_nbytes"], _MOST[case][1])
        report.at_most(f"planning on a rank, {case}, s", found["rank"], _MOST[case][2])
        report.at_most(f"memory of a rank, {case}, MB", found["rank_nbytes"], _MOST[case][3])
        report.at_most(f".metadata, {case}, bytes a shard", found["metadata"], _MOST[case][4])
        if found["read_factor"] is not None:
            report.at_most(f"safe read of .metadata over pickle.loads, {case}", found["read_factor"].median, 1.0)


# coordinator's seconds and MB, a rank's, bytes a shard
_MOST = {
    CASES[0]: (2.0, 200.0, 2.0, 100.0, 45.0),
    CASES[1]: (2.0, 200.0, 1.0, 50.0, 60.0),
    CASES[2]: (30.0, 1_500.0, 2.0, 100.0, 45.0),
    **dict.fromkeys(QUICK_CASES, (10.0, 1_000.0, 10.0, 1_000.0, 1_000.0)),
}


def _by_dcp(case: Case, directory: str, way: str) -> Generator[str, None, dict[str, Any]]:
    """As DCP does it: plans and results of all ranks arrive pickled, the metadata goes to all of them."""
    plans = [plan_of(rank, case.ranks, case.tensors) for rank in range(case.ranks)]
    writer, planner = _begun(Path(directory)), dcp.DefaultSavePlanner()
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    arrived = [pickle.dumps(plan) for plan in plans]
    del plans
    yield "coordinator"
    start = time.perf_counter()
    made, metadata = planner.create_global_plan([pickle.loads(plan) for plan in arrived])
    sent = [pickle.dumps(plan) for plan in writer.prepare_global_plan(made)]
    planned = time.perf_counter()
    yield ""
    reports = [pickle.dumps(_reported(Path(directory), rank, plan)) for rank, plan in enumerate(made)]
    begun = time.perf_counter()
    writer.finish(metadata, [pickle.loads(one) for one in reports])
    committed = time.perf_counter()
    told = pickle.dumps(metadata)
    return {
        "rank": None,
        "plan": planned - start,
        "commit": committed - begun,
        "to": (sum(map(len, arrived)) + sum(map(len, reports))) / 1e6,
        "back": (sum(map(len, sent)) / case.ranks + len(told)) / 1e6,
        "metadata": _metadata_nbytes(directory) / (case.ranks * case.tensors),
        "read": None,
        "read_factor": None,
    }


def _computed(case: Case, directory: str, way: str) -> Generator[str, None, dict[str, Any]]:
    """As `save` does it: each rank plans for all; proposals, and numbers of each rank, cross the group."""
    described = _described(case)
    mesh_shape = described.parts[0].mesh_shapes[0]
    places = [(tuple(map(int, place)),) for place in np.ndindex(*mesh_shape)]
    members = [(0,)] * case.ranks
    said_by_one = dataclasses.replace(described, places=places[-1], members=members[-1])
    proposal = Proposal.of(None, said_by_one, may_keep=True)
    order = [key for part in described.parts for key in part.keys]
    parts, parts_of = described.parts, np.tile(np.arange(3), (case.ranks, 1))

    def plan() -> tuple[ArrayPlan, Any]:
        shared = plan_all(parts, parts_of, places, members=members, lowest_rank=False, derived={})
        return ArrayPlan(shared, order, has_paths=True), shared.save_plan(case.ranks - 1)

    yield "rank"
    start = time.perf_counter()
    made = plan()
    rank_seconds = time.perf_counter() - start
    yield ""
    everyones = made[0]
    writer = _begun(Path(directory))
    reports = [pickle.dumps(_placed_by(everyones, rank, Path(directory))) for rank in range(case.ranks)]
    said = len(pickle.dumps(proposal)) * case.ranks
    empty = len(pickle.dumps(dcp.SavePlan([]))) * case.ranks
    if way == "first save":
        del made, everyones
    yield "coordinator"
    start = time.perf_counter()
    if way == "first save":
        everyones = plan()[0]
    metadata = everyones.metadata()
    writer.prepare_global_plan([dcp.SavePlan([]) for _ in range(case.ranks)])
    planned = time.perf_counter()
    writer.finish(metadata, [pickle.loads(one) for one in reports])
    committed = time.perf_counter()
    yield ""
    told = len(pickle.dumps(metadata))
    shards = everyones.plan.shard_count
    read = _reads(directory) if way == "first save" and shards <= _MOST_READ else {"safe": None, "factor": None}
    return {
        "rank": rank_seconds if way == "first save" else None,
        "plan": planned - start,
        "commit": committed - planned,
        "to": (said + empty + sum(map(len, reports))) / 1e6,
        "back": (said + empty / case.ranks + told) / 1e6,  # the proposals of all
        "metadata": _metadata_nbytes(directory) / shards,
        "read": read["safe"],
        "read_factor": read["factor"],
    }


def write_metadata(case: Case, directory: Path) -> None:
    """Write the `.metadata` of a first save, and data files that hold nothing."""
    described = _described(case)
    places = [(tuple(map(int, place)),) for place in np.ndindex(*described.parts[0].mesh_shapes[0])]
    parts_of, members = np.tile(np.arange(3), (case.ranks, 1)), [(0,)] * case.ranks
    shared = plan_all(described.parts, parts_of, places, members=members, lowest_rank=False, derived={})
    plan = ArrayPlan(shared, [key for part in described.parts for key in part.keys], has_paths=True)
    writer = _begun(directory)
    results = [_placed_by(plan, rank, directory) for rank in range(case.ranks)]
    metadata = plan.metadata()
    writer.prepare_global_plan([dcp.SavePlan([]) for _ in range(case.ranks)])
    writer.finish(metadata, results)


def _described(case: Case) -> Described:
    """What a rank says of a model: matrices of ten shapes, some vectors that all ranks have, and some objects."""
    shards = case.ranks // case.replicas
    mesh_shape = (case.replicas, shards) if case.replicas > 1 else (shards,)
    cuts = (None, (0, 1)) if case.replicas > 1 else ((0, 1),)
    properties = tuple(TensorProperties(torch.bfloat16).__getstate__())  # type: ignore[no-untyped-call]
    matrices = tuple(TensorKind(properties, (128 * shards, 512 * (n + 1)), 0, cuts) for n in range(10))
    keys = tuple(f"model.layers.{n // 10}.block.weight_{n % 10}" for n in range(case.tensors))
    vectors = tuple(f"{key}.step" for key in keys[::20])
    objects = tuple(f"param_groups.{n}" for n in range(10))
    kinds = tuple(n % 10 for n in range(case.tensors))
    paths = [{key: tuple(key.split(".")) for key in some} for some in (keys, vectors, objects)]
    parts = (
        Part(keys, kinds, matrices, (mesh_shape,), paths[0], {}, ()),
        Part(vectors, (0,) * len(vectors), (TensorKind(properties, (512,)),), (), paths[1], {}, ()),
        Part(objects, (), (), (), paths[2], {}, ()),
    )
    return Described(parts, (), ())


def _reads(directory: str) -> dict[str, Spread]:
    """Seconds to read `.metadata` safely, and these over those of pickle, in turn."""
    data = (Path(directory) / METADATA_NAME).read_bytes()
    seconds: dict[str, list[float]] = {"safe": [], "pickle": []}
    for _ in range(3):
        for name, read in (
            ("safe", lambda: parse_metadata(data, path=directory)),
            ("pickle", lambda: pickle.loads(data)),
        ):
            gc.collect()
            start = time.perf_counter()
            read()
            seconds[name].append(time.perf_counter() - start)
    safe, stock = (Spread(tuple(values)) for values in seconds.values())
    return {"safe": safe, "factor": paired(safe, stock)}


def _metadata_nbytes(directory: str) -> int:
    return (Path(directory) / METADATA_NAME).stat().st_size


def _begun(directory: Path) -> NvcompWriter:
    directory.mkdir()
    writer = NvcompWriter(directory)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    return writer


def _reported(directory: Path, rank: int, plan: Any) -> RankResults:
    """The results of a rank, whose data file is a hole: a commit looks whether it is there."""
    results = results_of("dcp_nvcomp", rank, plan)
    assert isinstance(results, RankResults)
    name, nbytes, *_ = results[0].storage_data[0]
    _hole(directory / name, nbytes)
    return results


def _placed_by(plan: ArrayPlan, rank: int, directory: Path) -> RankResults:
    """The results of a rank that has computed its plan."""
    count = int(sum((owners == rank).sum() for owners in plan.plan.owners))
    name, nbytes = data_file_name(rank, 0, f"{rank:032x}"), 1_000_000 + 1_000 * count
    if count:
        _hole(directory / name, nbytes)
    files = (((name, nbytes, 30_000, 0x12345678),), (count,)) if count else ((), ())
    placed = PlacedItems(*files, array("H", range(count)), array("H", range(count)))
    totals = RankTotals(files={name: nbytes})
    totals.add({("layers", "planes-zstd", "bfloat16"): Totals(count, nbytes, nbytes)})
    return RankResults((), totals, placed)


def _hole(path: Path, nbytes: int) -> None:
    with open(path, "wb") as file:
        file.truncate(nbytes)

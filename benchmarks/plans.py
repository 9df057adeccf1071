"""`plans`: what planning and commit cost a save whose plan is kept from the one before.

`ranks`: four ranks on one machine, each with shards of 1,000 DTensors, which are small: what is measured is all of a
save but the writing of its files, with `dcp_nvcomp.save` and with `dcp.save` and an `NvcompWriter`.
`simulated`: what the coordinator of 512 ranks does, on one process, and what crosses the group: once as DCP does it,
and once with a kept plan.
"""

from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.measuring import Settings, Spread, paired
from benchmarks.planning import plan_of, results_of
from benchmarks.processes import Ranks
from benchmarks.results import Plot, Report
from dcp_nvcomp import NvcompWriter, save
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.saving.plans.kept_plans import GlobalPlan, Proposal
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.saving.rank_save import RankResults, WrittenFile, placed_items

_LATER = 0.3  # of the first
_WAYS = ("first save", "later saves", "dcp.save")


def run(settings: Settings) -> Report:
    report = Report("plans", settings)
    if settings.wants("ranks"):
        _ranks(report)
    if settings.wants("simulated"):
        _simulated(report)
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
        "later planning and commit over the first's",
        paired(slowest["later saves"], slowest["first save"]).median,
        _LATER,
    )
    report.at_most(
        "first planning and commit over dcp.save's", paired(slowest["first save"], slowest["dcp.save"]).median, 1.0
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


def _simulated(report: Report) -> None:
    settings = report.settings
    ranks, tensors = (8, 20) if settings.quick else (512, 1_000)
    settings.say(f"{ranks} simulated ranks x {tensors} tensors")
    table = report.table(
        "simulated",
        f"The coordinator of {ranks} simulated ranks x {tensors:,} tensors: seconds and traffic of one save",
        way=("", ""),
        plan=("planning, s", ".2f"),
        commit=("results and commit, s", ".2f"),
        to=("to the coordinator, MB", ".1f"),
        back=("from it, MB", ".1f"),
    )
    with settings.scratch() as scratch:
        plans, rows = [plan_of(rank, ranks, tensors) for rank in range(ranks)], {}
        rows["dcp.save"] = _anew(plans, scratch / "anew")
        rows["kept plan"] = _kept(plans, scratch / "kept")
    for way, row in rows.items():
        table.add(way=way, **row)
    series = {
        what: [(way, Spread((row[cell],))) for way, row in rows.items()]
        for what, cell in (("planning", "plan"), ("results and commit", "commit"))
    }
    report.plots.append(Plot("The coordinator of a large job", "", "seconds", series))


def _anew(plans: list[Any], directory: Path) -> dict[str, float]:
    """As DCP does it: plans and results of all ranks arrive pickled, the metadata goes to all of them."""
    writer, planner = _begun(directory), dcp.DefaultSavePlanner()
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    arrived = [pickle.dumps(plan) for plan in plans]
    start = time.perf_counter()
    made, metadata = planner.create_global_plan([pickle.loads(plan) for plan in arrived])
    sent = [pickle.dumps(plan) for plan in writer.prepare_global_plan(made)]
    planned = time.perf_counter()
    reports = [pickle.dumps(_reported(directory, rank, plan)) for rank, plan in enumerate(made)]
    begun = time.perf_counter()
    writer.finish(metadata, [pickle.loads(one) for one in reports])
    told = pickle.dumps(metadata)
    return {
        "plan": planned - start,
        "commit": time.perf_counter() - begun,
        "to": (sum(map(len, arrived)) + sum(map(len, reports))) / 1e6,
        "back": (sum(map(len, sent)) + len(told) * (len(plans) - 1)) / 1e6,
    }


def _kept(plans: list[Any], directory: Path) -> dict[str, float]:
    """With the plan of the save before: what crosses the group are proposals, and numbers of each rank."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    made, metadata = planner.create_global_plan(plans)
    everyones, writer = GlobalPlan(made, metadata), _begun(directory)
    proposals = [pickle.dumps(Proposal("0" * 32, True)) for _ in plans]
    empty = pickle.dumps(dcp.SavePlan([]))
    start = time.perf_counter()
    metadata = everyones.metadata()
    writer.prepare_global_plan([dcp.SavePlan([]) for _ in plans])
    planned = time.perf_counter()
    reports = [pickle.dumps(_placed(_reported(directory, rank, plan), plan)) for rank, plan in enumerate(made)]
    begun = time.perf_counter()
    writer.finish(metadata, [pickle.loads(one) for one in reports])
    told = pickle.dumps(metadata)
    return {
        "plan": planned - start,
        "commit": time.perf_counter() - begun,
        "to": (sum(map(len, proposals)) + len(empty) * len(plans) + sum(map(len, reports))) / 1e6,
        # each rank is told the proposals of all
        "back": (sum(map(len, proposals)) + len(empty) + len(told)) * (len(plans) - 1) / 1e6,
    }


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
    with open(directory / name, "wb") as file:
        file.truncate(nbytes)
    return results


def _placed(results: RankResults, plan: Any) -> RankResults:
    file = DataFileRef(*results[0].storage_data[0])
    items = [(result.index, result.size_in_bytes, result.storage_data[1]) for result in results]
    return RankResults((), results.totals, placed_items([WrittenFile(file, items)], plan))

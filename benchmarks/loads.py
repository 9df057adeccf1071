"""`loads`: loads of many ranks: reads that replicas share, and what planning costs where a tensor has many shards.

`exchange`: replicas (DDP) load one checkpoint through links, one for each rank or one for all: each reads everything,
or they share the reads and send each other what they read, by `exchange="always"` and by what `"auto"` decides. Bytes
are those that passed the links; seconds are those of the slowest rank.
`planning`: one of hundreds of ranks loads its shards of a checkpoint that as many saved: `.metadata` is parsed, and the
reads are planned. Beside it DCP's planner, and its coordinator, which gets the plans of all ranks and sends them back.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measuring import Settings, Spread, core_count, paired
from benchmarks.plans import CASES, QUICK_CASES, Case, write_metadata
from benchmarks.processes import Ranks, quiet, watch
from benchmarks.results import Plot, Report
from benchmarks.sinks import LimitedFileSystem, link
from benchmarks.states import assert_same, build_state, destination
from dcp_nvcomp import load, save
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.metadata.shards import ShardIndex
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.loading.local_plans import Seen
from dcp_nvcomp.loading.planner import planner_for
from dcp_nvcomp.loading.read_plan import Wanted

assert LimitedFileSystem.protocol == "limited"  # importing it registers it, in each process

_WAYS = ("never", "always", "auto")
# Bytes a second, and whether all ranks share one link.
_LINKS = {
    "50 MB/s each": (50e6, False),
    "50 MB/s for all": (50e6, True),
    "200 MB/s each": (200e6, False),
    "no limit": (None, False),
}
# How much faster, of links that limit.
_GAINS = {2: 1.7, 4: 2.5}
_LEAST_WITH_AUTO = 0.95


def run(settings: Settings) -> Report:
    report = Report("loads", settings)
    if settings.wants("exchange"):
        _exchange(report)
    if settings.wants("planning"):
        _planning(report)
    return report


# --- exchange --------------------------------------------------------------------------------------------------------


def _exchange(report: Report) -> None:
    settings = report.settings
    nbytes, repeats = settings.nbytes_or(503_000_000), settings.repeats_or(5)
    table = report.table(
        "exchange",
        f"Replicas that load {nbytes / 1e6:.0f} MB on {core_count()} cores: median (lowest-highest) of {repeats}, of "
        "the slowest rank",
        replicas=("replicas", ",d"),
        storage=("storage", ""),
        way=("exchange", ""),
        seconds=("load, s", ".3f"),
        factor=("speed over never", ".2f"),
        copies=("bytes read, copies", ".2f"),
    )
    gains: dict[str, list[tuple[Any, Spread]]] = {"always": [], "auto": []}
    with settings.scratch() as scratch, Ranks(max(_GAINS)) as ranks:
        state = build_state(nbytes, settings.state)
        save(state, str(scratch / "c"), no_dist=True)
        stored_nbytes = sum(file.stat().st_size for file in (scratch / "c").iterdir())
        del state
        for replicas, (name, (rate, is_shared)) in itertools.product(
            (2,) if settings.quick else _GAINS, _LINKS.items()
        ):
            settings.say(f"{replicas} replicas, {name}")
            own_rate = rate / replicas if rate is not None and is_shared else rate
            each = ranks.run(
                replicas, _loads, str(scratch / "c"), nbytes, settings.state, own_rate, f"{replicas} {name}", repeats
            )
            seconds = {way: Spread(tuple(map(max, zip(*(one[way][0] for one in each), strict=True)))) for way in _WAYS}
            for way in _WAYS:
                factor = paired(seconds["never"], seconds[way])
                copies = sum(one[way][1] for one in each) / stored_nbytes
                table.add(replicas=replicas, storage=name, way=way, seconds=seconds[way], factor=factor, copies=copies)
                if way != "never":
                    gains[way].append((f"{replicas}, {name}", factor))
                of = f"{replicas} replicas, {name}"
                if way == "always":
                    report.at_most(f"{of}: copies read", copies, 1.02)
                if way == "auto":
                    report.at_least(f"{of}: speed with auto over each for itself", factor.median, _LEAST_WITH_AUTO)
                if way == "always" and rate == 50e6:
                    report.at_least(f"{of}: speed over each for itself", factor.median, _GAINS[replicas])
    report.plots.append(Plot("Loads of replicas that share their reads", "replicas, storage", "x speed", gains))


def _loads(
    path: str, nbytes: int, source: Path | None, rate: float | None, label: str, repeats: int
) -> dict[str, tuple[list[float], int]]:
    """Return the seconds of loads on this rank by way, and the bytes that one of them read."""
    quiet()
    state = build_state(nbytes, source)
    into = destination(state)
    found: dict[str, tuple[list[float], int]] = {}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    reading = link(rate, label).reading
    for number, way in itertools.product(range(1 + repeats), _WAYS):
        for tensor in into.values():
            tensor.zero_()
        gc.collect()
        before = reading.passed_nbytes
        dist.barrier()
        start = time.perf_counter()
        load(into, f"limited://{path}", rate=rate, label=label, thread_count=1, exchange=way)  # type: ignore[arg-type]
        if number:
            seconds[way].append(time.perf_counter() - start)
        found[way] = seconds[way], reading.passed_nbytes - before
        if number == 0:
            assert_same(into, state, way)
    return found


# --- planning --------------------------------------------------------------------------------------------------------


def _planning(report: Report) -> None:
    settings = report.settings
    case = (QUICK_CASES if settings.quick else CASES)[0]
    settings.say(f"loads of {case}")
    table = report.table(
        "planning",
        f"One of {case.ranks:,} ranks plans its loads of {case.tensors:,} tensors: median (lowest-highest) of "
        f"{settings.repeats_or(3)}",
        planner=("planner", ""),
        parse=("`.metadata` parsed, s", ".2f"),
        plan=("reads planned, s", ".2f"),
        coordinator=("on the coordinator beyond that, s", ".2f"),
        nbytes=("to the coordinator from each rank, bytes", ",d"),
    )
    with settings.scratch() as scratch:
        write_metadata(case, scratch / "c")
        rows, _ = watch(_plans, case, str(scratch / "c"), settings.repeats_or(3))
    for name, row in rows.items():
        table.add(planner=name, **row)
    total = rows["load"]["parse"].median + rows["load"]["plan"].median + rows["load"]["coordinator"].median
    report.at_most(f"planning of a load, {case}, s", total, 1.0)
    report.at_most(f"to the coordinator from each rank, {case}, bytes", rows["load"]["nbytes"], 1024)


def _shard(shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    local = torch.empty(shape[0] // mesh.size(), *shape[1:], dtype=torch.bfloat16)  # memory that nobody writes to
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _plans(case: Case, directory: str, repeats: int) -> Generator[str, None, dict[str, dict[str, Any]]]:
    yield "rank"
    from torch.testing._internal.distributed.fake_pg import FakeStore

    quiet()
    dist.init_process_group("fake", rank=case.ranks - 1, world_size=case.ranks, store=FakeStore())
    data = (Path(directory) / METADATA_NAME).read_bytes()
    mesh = init_device_mesh("cpu", (case.ranks,))
    shapes = {
        key: item.size
        for key, item in parse_metadata(data, path=directory).state_dict_metadata.items()
        if hasattr(item, "size") and len(item.chunks) > 1
    }
    state = {key: _shard(shape, mesh) for key, shape in shapes.items()}
    found: dict[str, dict[str, Any]] = {}
    for name in ("load", "dcp.load"):
        parse, plan, coordinator = list[float](), list[float](), list[float]()
        for _ in range(repeats):
            gc.collect()
            start = time.perf_counter()
            metadata = parse_metadata(data, path=directory) if name == "load" else pickle.loads(data)
            parsed = time.perf_counter()
            planner = planner_for(None) if name == "load" else DefaultLoadPlanner()
            planner.set_up_planner(dict(state), metadata, is_coordinator=True)
            made = planner.create_local_plan()
            if name == "load":
                shards = ShardIndex(metadata.state_dict_metadata)
                for item in made.items:
                    Wanted.of(item, metadata.storage_data[item.storage_index], shards)
            planned = time.perf_counter()
            seen = Seen(metadata.storage_meta.save_id, directory)
            sent = pickle.dumps(LoadPlan([], storage_data=seen) if name == "load" else made)
            begun = time.perf_counter()
            back = planner.create_global_plan([pickle.loads(sent) for _ in range(case.ranks)])
            for one in back:
                pickle.dumps(one)
            parse.append(parsed - start)
            plan.append(planned - parsed)
            coordinator.append(time.perf_counter() - begun)
            del metadata, planner, made, back
        found[name] = {
            "parse": Spread(tuple(parse)),
            "plan": Spread(tuple(plan)),
            "coordinator": Spread(tuple(coordinator)),
            "nbytes": len(sent),
        }
    dist.destroy_process_group()
    return found

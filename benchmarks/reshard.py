"""`reshard`: a checkpoint of N ranks loaded on M, several placements: bytes fetched and seconds, compared with DCP.

Each rank holds its shards as DTensors. Bytes are counted by a filesystem that both readers go through (sinks.py), in a
load of its own; metadata and footers count. "needed" are the encoded bytes of what a rank asks for: of each shard in
the files, the part that its region covers. Seconds are those of loads from plain files, from the first rank's start to
the last one's end.

The part "reshard" loads the real state, whose matrices are narrow; the part "squares" square fp32 matrices of 64, 16
and 4 MiB, which are stored in boxes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.measuring import Settings, Spread, paired
from benchmarks.peers import Peer, ours, stock, stock_fsspec
from benchmarks.processes import Ranks
from benchmarks.results import Plot, Report, Table
from benchmarks.sinks import link
from benchmarks.states import build_state, squares
from dcp_nvcomp import NvcompReader
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.data_file import read_footers
from dcp_nvcomp.storage.open import open_filesystem

TENSOR_NBYTES = 64 << 20
# Sizes of square tensors, and the most that a rank may fetch over its need.
SQUARES = {64 << 20: 1.15, 16 << 20: 1.3, 4 << 20: 1.5}


@dataclass(frozen=True)
class Layout:
    """A distribution of tensors over ranks: a mesh, and the placement along each of its dimensions."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


def rows(ranks: int) -> Layout:
    return Layout(f"{ranks} rows", (ranks,), ("rows",))


def columns(ranks: int) -> Layout:
    return Layout(f"{ranks} columns", (ranks,), ("columns",))


GRID = Layout("2 rows x 2 columns", (2, 2), ("rows", "columns"))
COPIES = Layout("2 copies of 2 rows", (2, 2), ("replicated", "rows"))
WHOLE = Layout("1 whole", (1,), ("replicated",))

CASES = (
    (rows(4), rows(3)),
    (rows(4), rows(2)),
    (rows(2), rows(4)),
    (rows(4), columns(4)),
    (columns(4), rows(3)),
    (GRID, rows(3)),
    (rows(4), COPIES),
    (rows(4), WHOLE),
)
SQUARE_CASES = ((rows(4), columns(4)), (columns(4), rows(3)), (GRID, rows(3)), (rows(4), rows(3)))
QUICK_CASES = ((rows(2), columns(2)), (rows(2), WHOLE))


@dataclass(frozen=True)
class Job:
    """Parameters of the rank processes."""

    nbytes: int
    tensor_nbytes: int
    are_squares: bool
    state: Path | None
    directory: Path
    repeats: int


def run(settings: Settings) -> Report:
    report = Report("reshard", settings)
    with settings.scratch() as scratch, Ranks(2 if settings.quick else 4) as ranks:
        if settings.wants("reshard"):
            _real(report, scratch / "real", ranks)
        if settings.wants("squares"):
            _squares(report, scratch / "squares", ranks)
    return report


def _real(report: Report, scratch: Path, ranks: Ranks) -> None:
    settings = report.settings
    cases = QUICK_CASES if settings.quick else CASES
    work = [(saved, loaded, TENSOR_NBYTES) for saved, loaded in cases]
    if not settings.quick:  # what small tensors cost: a block at each edge weighs more
        work += [(rows(4), rows(3), 16 << 20), (rows(4), rows(3), 4 << 20)]
    nbytes = settings.nbytes_or(512 << 20)
    table = _measure(report, "reshard", f"{nbytes / 1e6:.0f} MB of real state", work, nbytes, scratch, ranks)
    if not settings.quick:
        report.at_most("4 rows -> 3 rows, fetched over needed", table.rows[0]["factor"], 1.15)
    labels = [f"{row['saved']} -> {row['loaded']}" for row in table.rows[: len(cases)]]
    _plot(report, table, labels, "")


def _squares(report: Report, scratch: Path, ranks: Ranks) -> None:
    settings = report.settings
    cases = QUICK_CASES[:1] if settings.quick else SQUARE_CASES
    work = [(saved, loaded, nbytes) for nbytes in SQUARES for saved, loaded in cases]
    if settings.quick:
        work = [(saved, loaded, 4 << 20) for saved, loaded in cases]
    nbytes = settings.nbytes_or(256 << 20, quick=8 << 20)
    table = _measure(report, "squares", f"{nbytes / 1e6:.0f} MB of square matrices", work, nbytes, scratch, ranks)
    for row in table.rows:
        what = f"{row['saved']} -> {row['loaded']}, square tensors of {row['tensor_mib']} MiB: fetched over needed"
        report.at_most(what, row["factor"], SQUARES[row["tensor_mib"] << 20])
    labels = [f"{row['saved']} -> {row['loaded']}, {row['tensor_mib']} MiB" for row in table.rows]
    _plot(report, table, labels, " of squares")


def _measure(
    report: Report,
    name: str,
    title: str,
    work: Sequence[tuple[Layout, Layout, int]],
    nbytes: int,
    scratch: Path,
    ranks: Ranks,
) -> Table:
    settings = report.settings
    repeats = settings.repeats_or(5)
    table = report.table(
        name,
        f"{title}: the rank that fetches most over its need, median (lowest-highest) seconds of {repeats}",
        saved=("saved", ""),
        loaded=("loaded", ""),
        tensor_mib=("tensors, MiB", "d"),
        needed=("a rank needs, MB", ".1f"),
        fetched=("fetches, MB", ".1f"),
        factor=("factor", ".3f"),
        stock_fetched=("DCP fetches, MB", ".1f"),
        stock_factor=("DCP's factor", ".3f"),
        seconds=("load, s", ".3f"),
        stock_seconds=("DCP's, s", ".3f"),
        speedup=("x DCP", ".2f"),
    )
    written: dict[tuple[Layout, int], Path] = {}
    for saved, loaded, tensor_nbytes in work:
        settings.say(f"{name}: {saved.name} -> {loaded.name}")
        place = written.setdefault((saved, tensor_nbytes), scratch / f"{len(written)}")
        job = Job(nbytes, tensor_nbytes, name == "squares", settings.state, place, repeats)
        if not place.exists():
            ranks.run(saved.ranks, save_all, job, saved)
        results = ranks.run(loaded.ranks, load_all, job, loaded)
        _add_row(table, saved, loaded, job, results)
    return table


def _plot(report: Report, table: Table, labels: Sequence[str], what: str) -> None:
    for title, mine, theirs, unit in (
        ("Bytes fetched over needed", "factor", "stock_factor", "factor"),
        ("Load", "seconds", "stock_seconds", "seconds"),
    ):
        series = {
            name: [(label, row[cell]) for label, row in zip(labels, table.rows, strict=False)]
            for name, cell in (("dcp_nvcomp", mine), ("dcp", theirs))
        }
        report.plots.append(Plot(f"{title}{what}", "", unit, series))


def _add_row(table: Table, saved: Layout, loaded: Layout, job: Job, results: Sequence[dict[str, Any]]) -> None:
    needed = _needed_nbytes(job.directory / "dcp_nvcomp", [result["regions"] for result in results])
    worst = max(range(len(results)), key=lambda rank: results[rank]["fetched"]["dcp_nvcomp"] / needed[rank])
    stock_factors = [result["fetched"]["dcp"] / result["nbytes"] for result in results]
    seconds = {
        name: Spread(tuple(map(max, *(result["seconds"][name] for result in results))))
        if len(results) > 1
        else Spread(tuple(results[0]["seconds"][name]))
        for name in ("dcp_nvcomp", "dcp")
    }
    table.add(
        saved=saved.name,
        loaded=loaded.name,
        tensor_mib=job.tensor_nbytes >> 20,
        needed=needed[worst] / 1e6,
        fetched=results[worst]["fetched"]["dcp_nvcomp"] / 1e6,
        factor=results[worst]["fetched"]["dcp_nvcomp"] / needed[worst],
        stock_fetched=results[worst]["fetched"]["dcp"] / 1e6,
        stock_factor=max(stock_factors),
        seconds=seconds["dcp_nvcomp"],
        stock_seconds=seconds["dcp"],
        speedup=paired(seconds["dcp"], seconds["dcp_nvcomp"]),
    )


def _needed_nbytes(checkpoint: Path, regions: Sequence[dict[str, Box]]) -> list[float]:
    """Encoded bytes of what each rank asks for."""
    files = {stored.file for stored in NvcompReader(checkpoint).read_metadata().storage_data.values()}
    needed = [0.0] * len(regions)
    for footer in read_footers(open_filesystem(checkpoint), files):
        for record in footer.records:
            holder = footer.records[record.pack[0]] if record.pack is not None else record
            share = record.elements / holder.elements if holder.elements else 0.0
            nbytes = footer.record_encoded_nbytes(holder) * share
            for rank, wanted in enumerate(regions):
                if record.fqn in wanted:
                    common = wanted[record.fqn].intersect(Box(record.offsets, record.shape))
                    needed[rank] += nbytes * common.elements / record.elements if common is not None else 0.0
    return needed


# --- on the ranks -----------------------------------------------------------------------------------------------------


def _peers() -> tuple[Peer, Peer]:
    return ours(1), stock(1)


def _counted(peer: Peer) -> Peer:
    options = {"label": "counted"}
    return ours(1, **options) if peer.name == "dcp_nvcomp" else stock_fsspec(1, **options)


def _distributed(job: Job, layout: Layout) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", layout.mesh)
    kinds = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    if job.are_squares:
        state = squares(job.nbytes, job.tensor_nbytes, job.state)
    else:
        state = build_state(job.nbytes, job.state, tensor_nbytes=job.tensor_nbytes)
    placed = {}
    for name, tensor in state.items():
        placements = [kinds["replicated" if tensor.dim() < 2 else kind] for kind in layout.placements]
        placed[name] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # all have the whole already
    return placed


def save_all(job: Job, layout: Layout) -> None:
    """Save with each writer."""
    state = _distributed(job, layout)
    job.directory.mkdir(parents=True, exist_ok=True)
    for peer in _peers():
        dcp.save(state, storage_writer=peer.writer(str(job.directory / peer.name)))


def load_all(job: Job, layout: Layout) -> dict[str, Any]:
    """Load with each reader, in turn; what this rank asked for, fetched and spent."""
    expected = _distributed(job, layout)
    into = {
        name: DTensor.from_local(
            torch.empty_like(tensor.to_local()).fill_(0),
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in expected.items()
    }
    seconds: dict[str, list[float]] = {peer.name: [] for peer in _peers()}
    fetched: dict[str, int] = {}
    for peer in _peers():
        counted = _counted(peer)
        before = link(label="counted").reading.passed_nbytes
        dcp.load(into, storage_reader=counted.reader(f"limited://{job.directory / peer.name}"))
        fetched[peer.name] = link(label="counted").reading.passed_nbytes - before
        for name, tensor in into.items():
            local = tensor.to_local()
            assert torch.equal(local.view(torch.uint8), expected[name].to_local().contiguous().view(torch.uint8)), name
            local.zero_()
    for repeat in range(-1, job.repeats):
        for peer in _peers():
            reader = peer.reader(str(job.directory / peer.name))
            dist.barrier()
            start = time.perf_counter()
            dcp.load(into, storage_reader=reader)
            dist.barrier()
            if repeat >= 0:
                seconds[peer.name].append(time.perf_counter() - start)
    return {
        "regions": {name: _region(tensor) for name, tensor in into.items()},
        "nbytes": sum(tensor.to_local().nbytes for tensor in into.values()),
        "fetched": fetched,
        "seconds": seconds,
    }


def _region(tensor: DTensor) -> Box:
    """Return the part of a tensor that this rank holds."""
    (held,) = tensor.__create_chunk_list__()
    return Box(tuple(held.offsets), tuple(held.sizes))

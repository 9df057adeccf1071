"""Parts of `scale`: the number of tensors, the size, the number of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measuring import Case, Spread, alternate, available_nbytes, core_count, paired
from benchmarks.peers import Peer, data_nbytes, load, ours, remove, save, stock
from benchmarks.processes import Ranks
from benchmarks.results import Plot, Report
from benchmarks.states import State, assert_same, build_state, destination, nbytes_of, small_tensors
from dcp_nvcomp.format.names import METADATA_NAME

TENSOR_COUNTS = (100, 1_000, 10_000, 100_000)
SIZES = tuple(1 << power for power in range(28, 34))  # 256 MiB to 8 GiB
BASE_NBYTES = 256 << 20  # growth is told from here to 8 times as much; more than that some machines only just hold
RANK_COUNTS = (1, 2, 4, 8)


def save_and_load(
    peers: list[Peer], state: State, scratch: Path, repeats: int
) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Seconds to save and to load, by peer; the last checkpoints are left in `scratch`."""
    paths = {peer.name: scratch / peer.name for peer in peers}
    saves = {
        peer.name: Case(
            run=lambda peer=peer: save(peer, paths[peer.name], state),
            before=lambda peer=peer: remove(paths[peer.name]),
        )
        for peer in peers
    }
    saved = alternate(saves, repeats=repeats)
    into = destination(state)  # only now, as memory is scarce
    for peer in peers:
        load(peer, paths[peer.name], into)
        assert_same(into, state, peer.name)
    loads = {peer.name: Case(lambda peer=peer: load(peer, paths[peer.name], into)) for peer in peers}
    return saved, alternate(loads, repeats=repeats, warmups=0)


def tensors(report: Report) -> None:
    """Many small tensors."""
    settings = report.settings
    counts = (10, 100) if settings.quick else TENSOR_COUNTS
    peers = [ours(core_count()), stock(core_count())]
    table = report.table(
        "tensors",
        "Tensors of 1 KB each: median (lowest-highest)",
        tensors=("tensors", ",d"),
        save_seconds=("save, s", ".3f"),
        stock_save_seconds=("DCP's, s", ".3f"),
        save_speedup=("x DCP", ".2f"),
        load_seconds=("load, s", ".3f"),
        stock_load_seconds=("DCP's, s", ".3f"),
        load_speedup=("x DCP", ".2f"),
        data_nbytes=("data, bytes", ",d"),
        stock_data_nbytes=("DCP's, bytes", ",d"),
        metadata_nbytes=(".metadata, bytes", ",d"),
        stock_metadata_nbytes=("DCP's, bytes", ",d"),
    )
    for count in counts:
        settings.say(f"{count:,} tensors")
        with settings.scratch() as scratch:
            repeats = settings.repeats_or(5 if count < 100_000 else 3)
            saved, loaded = save_and_load(peers, small_tensors(count, settings.state), scratch, repeats)
            table.add(
                tensors=count,
                save_seconds=saved["dcp_nvcomp"],
                stock_save_seconds=saved["dcp"],
                save_speedup=paired(saved["dcp"], saved["dcp_nvcomp"]),
                load_seconds=loaded["dcp_nvcomp"],
                stock_load_seconds=loaded["dcp"],
                load_speedup=paired(loaded["dcp"], loaded["dcp_nvcomp"]),
                data_nbytes=data_nbytes(scratch / "dcp_nvcomp"),
                stock_data_nbytes=data_nbytes(scratch / "dcp"),
                metadata_nbytes=(scratch / "dcp_nvcomp" / METADATA_NAME).stat().st_size,
                stock_metadata_nbytes=(scratch / "dcp" / METADATA_NAME).stat().st_size,
            )
        if count in (10_000, counts[-1]) and count <= 10_000:
            for action in ("save", "load"):
                speedup = table.rows[-1][f"{action}_speedup"].median
                report.at_least(f"{action} of {count:,} tensors of 1 KB, speed over DCP", speedup, 2.0)
    _plot(report, table.rows, "tensors", "Tensors of 1 KB", "tensors", log=True)


def size(report: Report) -> None:
    """The same state, more of it."""
    settings = report.settings
    sizes = (4 << 20, 32 << 20) if settings.quick else SIZES
    # the state, what is loaded into, and two checkpoints in memory
    fitting = [nbytes for nbytes in sizes if 4 * nbytes < available_nbytes()]
    if len(fitting) < len(sizes):
        report.notes.append(f"sizes above {fitting[-1] / 1e9:.1f} GB are left out: memory holds no more")
    peers = [ours(core_count()), stock(core_count())]
    table = report.table(
        "size",
        f"Growing state: median (lowest-highest) of {settings.repeats_or(5)}",
        nbytes=("state, bytes", ",d"),
        save_seconds=("save, s", ".3f"),
        save_per_gb=("save, s/GB", ".3f"),
        stock_save_seconds=("DCP's save, s", ".3f"),
        load_seconds=("load, s", ".3f"),
        load_per_gb=("load, s/GB", ".3f"),
        stock_load_seconds=("DCP's load, s", ".3f"),
    )
    for nbytes in fitting:
        settings.say(f"{nbytes >> 20} MiB")
        state = build_state(nbytes, settings.state)
        with settings.scratch() as scratch:
            saved, loaded = save_and_load(peers, state, scratch, settings.repeats_or(5))
        gigabytes = nbytes_of(state) / 1e9
        table.add(
            nbytes=nbytes_of(state),
            save_seconds=saved["dcp_nvcomp"],
            save_per_gb=saved["dcp_nvcomp"].scaled(1 / gigabytes),
            stock_save_seconds=saved["dcp"],
            load_seconds=loaded["dcp_nvcomp"],
            load_per_gb=loaded["dcp_nvcomp"].scaled(1 / gigabytes),
            stock_load_seconds=loaded["dcp"],
        )
    base = table.rows[fitting.index(BASE_NBYTES) if BASE_NBYTES in fitting else 0]
    wanted = 8 * base["nbytes"]
    large = min(table.rows, key=lambda row: abs(row["nbytes"] - wanted))
    times = large["nbytes"] / base["nbytes"]
    growth = large["save_per_gb"].median / base["save_per_gb"].median
    report.at_most(f"save time per byte at {times:.1f} x the size over that at 1 x", growth, 1.10)
    per_byte = [row["stock_save_seconds"].median / row["nbytes"] for row in (table.rows[-1], base)]
    own = table.rows[-1]["save_per_gb"].median / base["save_per_gb"].median
    report.notes.append(
        f"at the largest size a save takes {own:.2f} x as long per byte as at 1 x, "
        f"DCP's {per_byte[0] / per_byte[1]:.2f} x"
    )
    _plot(report, table.rows, "nbytes", "Growing state", "bytes", log=True)


def _plot(report: Report, found: list[dict[str, Any]], x: str, title: str, label: str, *, log: bool) -> None:
    for action in ("save", "load"):
        series = {
            name: [(row[x], row[f"{prefix}{action}_seconds"]) for row in found]
            for name, prefix in (("dcp_nvcomp", ""), ("dcp", "stock_"))
        }
        report.plots.append(Plot(f"{title}: {action}", label, "seconds", series, log_x=True, log_y=log))


def ranks(report: Report) -> None:
    """One state on more and more processes of this machine."""
    settings = report.settings
    counts = (1, 2) if settings.quick else RANK_COUNTS
    nbytes = settings.nbytes_or(512 << 20)
    repeats = settings.repeats_or(5)
    table = report.table(
        "ranks",
        f"{nbytes / 1e6:.0f} MB on processes that share the machine's cores: median (lowest-highest) of {repeats}",
        ranks=("ranks", "d"),
        save_seconds=("save, s", ".3f"),
        stock_save_seconds=("DCP's save, s", ".3f"),
        save_speedup=("x DCP", ".2f"),
        load_seconds=("load, s", ".3f"),
        stock_load_seconds=("DCP's load, s", ".3f"),
        load_speedup=("x DCP", ".2f"),
    )
    with Ranks(max(counts)) as pool, settings.scratch() as scratch:
        for count in counts:
            settings.say(f"{count} ranks")
            results = pool.run(
                count, _save_and_load_sharded, nbytes, settings.state, str(scratch / f"{count}"), repeats
            )
            saved, loaded = results[0]  # between barriers: the same on all ranks
            table.add(
                ranks=count,
                save_seconds=saved["dcp_nvcomp"],
                stock_save_seconds=saved["dcp"],
                save_speedup=paired(saved["dcp"], saved["dcp_nvcomp"]),
                load_seconds=loaded["dcp_nvcomp"],
                stock_load_seconds=loaded["dcp"],
                load_speedup=paired(loaded["dcp"], loaded["dcp_nvcomp"]),
            )
    _plot(report, table.rows, "ranks", "More ranks", "ranks", log=False)


def _save_and_load_sharded(
    nbytes: int, state_file: Path | None, directory: str, repeats: int
) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """On each rank: the state in rows, saved and loaded with each peer in turn."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    # each rank's rows are a state of their own: no process needs the whole
    own = build_state(nbytes // world_size, state_file)
    state = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in own.items()}
    into = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in destination(own).items()}
    threads = max(1, core_count() // world_size)
    peers = [ours(threads), stock(threads)]
    seconds: dict[str, dict[str, list[float]]] = {peer.name: {"save": [], "load": []} for peer in peers}
    for repeat in range(-1, repeats):
        for peer in peers:
            path = f"{directory}-{peer.name}"
            if dist.get_rank() == 0:
                remove(Path(path))
            for action in ("save", "load"):
                dist.barrier()
                start = time.perf_counter()
                if action == "save":
                    dcp.save(state, storage_writer=peer.writer(path))
                else:
                    dcp.load(into, storage_reader=peer.reader(path))
                dist.barrier()
                if repeat >= 0:
                    seconds[peer.name][action].append(time.perf_counter() - start)
            for name, tensor in into.items():
                local = tensor.to_local()
                assert repeat >= 0 or torch.equal(local.view(torch.uint8), own[name].view(torch.uint8)), name
    saved, loaded = (
        {name: Spread(tuple(times[action])) for name, times in seconds.items()} for action in ("save", "load")
    )
    return saved, loaded

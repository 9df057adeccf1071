"""`tensors`: what each tensor costs: the same values in many tensors and in few, very small ones, and `auto`'s choices.

fp32 weights with both Adam moments as 432 tensors of 0.4 MB and as 12 large ones, large bf16 tensors alone, 10,000
tensors of 1 KB. All with two threads, in memory; the part "link" is the same over 500 MB/s. No save replaces a
checkpoint, as no step of a training does. `dcp_nvcomp` is `dcp_nvcomp.save` and `load`, with a new writer for each
save, as a training job calls them: plans and choices of codecs are kept from the save before. The first save of a
process, and `dcp.save` and `dcp.load` with an `NvcompWriter` and `NvcompReader`, are apart.

The part "auto" compares what `auto` makes of unusual states with each of the codecs that it chooses from.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.auto_states import FIXED_CODECS, auto_states
from benchmarks.measuring import Case, Settings, Spread, alternate, paired
from benchmarks.peers import Peer, data_nbytes, load, ours, plain_calls, remove, save, stock, stock_fsspec
from benchmarks.results import Plot, Report
from benchmarks.sinks import link
from benchmarks.states import State, assert_same, build_state, component, destination, nbytes_of, small_tensors
from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.saving.process_state import forget_all

THREADS = 2
LINK_RATE = 500e6
_SMALL_ELEMENTS = 320 * 320
_MOST_SLOWER = 1.05
_MOST_LARGER = 1.003

# State: least speed over DCP+zstd and over plain DCP, of a save and of a load.
_TARGETS = {
    "432 of 0.4 MB, fp32": ((2.3, 1.05), (4.5, 2.0)),
    "12 large, fp32": ((2.5, 1.0), (6.0, 1.6)),
    "large bf16": ((None, 1.0), (None, 1.0)),
    "10,000 of 1 KB": ((None, 3.0), (None, 3.0)),
}
_LINK_TARGET = 1.25


def run(settings: Settings) -> Report:
    report = Report("tensors", settings)
    if settings.wants("checkpoints") or settings.wants("link"):
        states = _states(settings)
        with settings.scratch() as scratch:
            if settings.wants("checkpoints"):
                _checkpoints(report, states, scratch)
            if settings.wants("link"):
                _over_link(report, states, scratch)
    if settings.wants("auto"):
        with settings.scratch() as scratch:
            _auto(report, scratch)
    return report


def _states(settings: Settings) -> dict[str, State]:
    nbytes = settings.nbytes_or(177 << 20, quick=12 << 20)
    count = max(1, nbytes // 3 // (_SMALL_ELEMENTS * 4))
    real = build_state(nbytes * 2, settings.state)
    fp32 = {kind: flat[: count * _SMALL_ELEMENTS] for kind, flat in _fp32(real).items()}
    return {
        "432 of 0.4 MB, fp32": _cut(fp32, count),
        "12 large, fp32": _cut(fp32, min(4, count)),
        "large bf16": {name: tensor for name, tensor in real.items() if tensor.dtype == torch.bfloat16},
        "10,000 of 1 KB": small_tensors(200 if settings.quick else 10_000, settings.state),
    }


def _fp32(real: State) -> dict[str, torch.Tensor]:
    """Weights and moments, each in one tensor. The weights get low halves as master weights have: noise."""
    flat: dict[str, torch.Tensor] = {}
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        flat[kind] = torch.cat([tensor.reshape(-1) for name, tensor in real.items() if component(name) == kind])
    weights = flat["model"].view(torch.int16).int() << 16
    noise = torch.randint(0, 1 << 16, weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    flat["model"] = (weights | noise).view(torch.float32)
    return flat


def _cut(flat: dict[str, torch.Tensor], count: int) -> State:
    """The values of each kind as `count` matrices."""
    return {
        f"{kind}.layers.{number}.weight": part.clone().view(-1, 320)
        for kind, values in flat.items()
        for number, part in enumerate(values[: values.numel() // (320 * count) * 320 * count].chunk(count))
    }


def _first(peer: Peer, name: str) -> Peer:
    """The same peer in a process that has not saved before."""

    def save_first(state: State, writer: Any) -> None:
        forget_all()
        peer.save_with(state, writer)

    return dataclasses.replace(peer, name=name, save_with=save_first)


def _checkpoints(report: Report, states: dict[str, State], scratch: Path) -> None:
    mine = plain_calls(ours(THREADS))
    peers = [
        mine,
        dataclasses.replace(ours(THREADS), name="dcp_nvcomp by dcp.save"),
        _first(mine, "dcp_nvcomp, first save"),
        stock(THREADS),
        stock(THREADS, zstd=True),
    ]
    _compare(report, "checkpoints", "in memory", states, peers, scratch, "")
    _plot(report, "in memory")
    for row in report.tables[-1].rows:
        if row["writer"] == "dcp_nvcomp":
            for action, bounds in zip(("save", "load"), _TARGETS[row["state"]], strict=True):
                for other, bound in zip(("zstd", "dcp"), bounds, strict=True):
                    if bound is not None:
                        what = f"{row['state']}: {action} speed over {'DCP+zstd' if other == 'zstd' else 'plain DCP'}"
                        report.at_least(what, row[f"{action}_over_{other}"].median, bound)


def _over_link(report: Report, states: dict[str, State], scratch: Path) -> None:
    options = {"rate": LINK_RATE}
    assert link(**options).writing.rate == LINK_RATE  # it is made here, as importing it registers `limited://`
    peers = [
        plain_calls(ours(THREADS, **options)),
        stock_fsspec(THREADS, **options),
        stock_fsspec(THREADS, zstd=True, **options),
    ]
    _compare(report, "link", f"over {LINK_RATE / 1e6:.0f} MB/s", states, peers, scratch, "limited://")
    _plot(report, f"over {LINK_RATE / 1e6:.0f} MB/s")
    for row in report.tables[-1].rows:
        if row["writer"] == "dcp_nvcomp":
            for action in ("save", "load"):
                what = f"{row['state']}: {action} speed over plain DCP, over a link"
                report.at_least(what, row[f"{action}_over_dcp"].median, _LINK_TARGET)


def _plot(report: Report, where: str) -> None:
    """Draw how much faster than plain DCP the last table's writers are."""
    for action in ("save", "load"):
        series: dict[str, list[tuple[str, Spread]]] = {}
        for row in report.tables[-1].rows:
            if row["writer"] != "dcp":
                series.setdefault(row["writer"], []).append((row["state"], row[f"{action}_over_dcp"]))
        report.plots.append(Plot(f"{action} {where}", "", "speed over plain DCP", series, level=1.0))


def _compare(
    report: Report, table_name: str, where: str, states: dict[str, State], peers: list[Peer], scratch: Path, scheme: str
) -> None:
    repeats = report.settings.repeats_or(9)
    table = report.table(
        table_name,
        f"Save and load {where}, {THREADS} threads: median (lowest-highest) of {repeats}",
        state=("tensors", ""),
        writer=("writer", ""),
        ratio=("ratio", ".3f"),
        save_seconds=("save, s", ".3f"),
        load_seconds=("load, s", ".3f"),
        save_over_zstd=("save, x DCP+zstd", ".2f"),
        save_over_dcp=("save, x DCP", ".2f"),
        load_over_zstd=("load, x DCP+zstd", ".2f"),
        load_over_dcp=("load, x DCP", ".2f"),
    )
    for name, state in states.items():
        report.settings.say(f"{name} {where}, {len(peers)} ways, {repeats} times each")
        saved, loaded, ratios = _measure(state, peers, scratch, scheme, repeats)
        for peer in peers:
            table.add(
                state=name,
                writer=peer.name,
                ratio=ratios[peer.name],
                save_seconds=saved[peer.name],
                load_seconds=loaded[peer.name],
                save_over_zstd=paired(saved["dcp+zstd"], saved[peer.name]),
                save_over_dcp=paired(saved["dcp"], saved[peer.name]),
                load_over_zstd=paired(loaded["dcp+zstd"], loaded[peer.name]),
                load_over_dcp=paired(loaded["dcp"], loaded[peer.name]),
            )


def _measure(
    state: State, peers: list[Peer], scratch: Path, scheme: str, repeats: int
) -> tuple[dict[str, Spread], dict[str, Spread], dict[str, float]]:
    """Seconds of saves and of loads, and ratios, by peer."""
    into, places = destination(state), {peer.name: scratch / peer.name for peer in peers}
    saves = {
        peer.name: Case(
            lambda peer=peer: save(peer, f"{scheme}{places[peer.name]}", state),
            before=lambda peer=peer: remove(places[peer.name]),
        )
        for peer in peers
    }
    saved = alternate(saves, repeats=repeats)
    ratios = {}
    for peer in peers:
        ratios[peer.name] = nbytes_of(state) / data_nbytes(places[peer.name])
        load(peer, f"{scheme}{places[peer.name]}", into)
        assert_same(into, state, peer.name)
    loads = {peer.name: Case(lambda peer=peer: load(peer, f"{scheme}{places[peer.name]}", into)) for peer in peers}
    loaded = alternate(loads, repeats=repeats)
    for place in places.values():
        remove(place)
    return saved, loaded, ratios


def _auto(report: Report, scratch: Path) -> None:
    """Size and time of `auto` beside the smallest of the codecs that it chooses from, state by state."""
    settings = report.settings
    repeats = settings.repeats_or(9)
    table = report.table(
        "auto",
        f"`auto` and the smallest of the codecs that it chooses from, {THREADS} threads: "
        f"median (lowest-highest) of {repeats}",
        state=("state", ""),
        best=("smallest of the others", ""),
        ratio=("ratio of auto", ".3f"),
        size=("size, x the smallest", ".4f"),
        save_seconds=("save, s", ".3f"),
        time=("time, x the smallest's", ".3f"),
    )
    nbytes = settings.nbytes_or(96 << 20, quick=3 << 20)
    for name, state in auto_states(nbytes, min(nbytes, 12 << 20)).items():
        settings.say(f"auto: {name}")
        row = _auto_row(state, scratch, repeats)
        table.add(state=name, **row)
        report.at_most(f"auto, {name}: size over the smallest", row["size"], _MOST_LARGER)
        report.at_most(f"auto, {name}: time over the smallest's", row["time"].median, _MOST_SLOWER)
    series = {"dcp_nvcomp": [(row["state"], row["time"]) for row in table.rows]}
    report.plots.append(Plot("`auto`", "", "time over the smallest codec's", series, level=_MOST_SLOWER))


def _auto_row(state: State, scratch: Path, repeats: int) -> dict[str, Any]:
    """Save one state with every codec, and with `auto` and the smallest again and again."""
    forget_all()  # each state stands for a run: choices that were kept for the one before belong to another
    codecs: dict[str, Any] = {**FIXED_CODECS, "auto": "auto"}
    writers = {name: NvcompWriter(scratch / name, codec=codec, thread_count=THREADS) for name, codec in codecs.items()}

    def saved_nbytes(name: str) -> int:
        dcp.save(state, storage_writer=writers[name], no_dist=True)
        return data_nbytes(scratch / name)

    sizes = {name: saved_nbytes(name) for name in writers}
    mine = sizes.pop("auto")
    best = min(sizes, key=sizes.__getitem__)
    seconds = alternate({name: Case(functools.partial(saved_nbytes, name)) for name in ("auto", best)}, repeats=repeats)
    for name in writers:
        remove(scratch / name)
    return {
        "best": best,
        "ratio": nbytes_of(state) / mine,
        "size": mine / sizes[best],
        "save_seconds": seconds["auto"],
        "time": paired(seconds["auto"], seconds[best]),
    }

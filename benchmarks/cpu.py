"""`cpu`: save and load of real state in memory, compared with DCP, DCP+zstd and ZipNN, with 1 and 2 threads.

Everything has its default options but the number of threads. Checkpoints go to /dev/shm, new each time; a load reads
what the same writer has just saved with as many threads, into tensors whose pages were touched before. Files in
memory: what is measured is the work, not a disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.in_memory import EngineCoder, ZipNNCoder, have_zipnn
from benchmarks.measuring import Case, Settings, Spread, alternate, paired
from benchmarks.peers import Peer, data_nbytes, load, ours, remove, save, stock
from benchmarks.results import Plot, Report
from benchmarks.states import State, assert_same, build_state, component, destination, nbytes_of

THREADS = (1, 2)


def run(settings: Settings) -> Report:
    report = Report("cpu", settings)
    state = build_state(settings.nbytes_or(512 << 20), settings.state)
    with settings.scratch() as scratch:
        if settings.wants("checkpoints"):
            _checkpoints(report, state, scratch)
    if settings.wants("coders"):
        _coders(report, state)
    return report


def _checkpoints(report: Report, state: State, scratch: Path) -> None:
    settings, nbytes = report.settings, nbytes_of(state)
    repeats = settings.repeats_or(7)
    peers = [peer for threads in THREADS for peer in (ours(threads), stock(threads), stock(threads, zstd=True))]
    settings.say(f"save and load of {nbytes / 1e6:.0f} MB, {len(peers)} ways, {repeats} times each")
    into = destination(state)
    ratios: dict[str, float] = {}
    saves = {peer.label: _save_case(peer, scratch, state) for peer in peers}
    saved = alternate(saves, repeats=repeats, warmups=0 if settings.quick else 1)
    for peer in peers:  # the last checkpoint of each is there
        ratios[peer.label] = nbytes / data_nbytes(scratch / peer.label)
        load(peer, scratch / peer.label, into)
        assert_same(into, state, peer.label)
    loads = {peer.label: _load_case(peer, scratch, into) for peer in peers}
    loaded = alternate(loads, repeats=repeats, warmups=0 if settings.quick else 1)

    table = report.table(
        "checkpoints",
        f"Save and load of {nbytes / 1e6:.0f} MB of real state in memory: median (lowest-highest) of {repeats}",
        writer=("writer", ""),
        threads=("threads", "d"),
        ratio=("ratio", ".3f"),
        save_seconds=("save, s", ".3f"),
        save_rate=("save, MB/s", ".0f"),
        load_seconds=("load, s", ".3f"),
        load_rate=("load, MB/s", ".0f"),
        save_speedup=("save, x DCP+zstd", ".2f"),
        load_speedup=("load, x DCP+zstd", ".2f"),
    )
    for peer in peers:
        zstd = f"dcp+zstd, {peer.threads} thread{'s' if peer.threads > 1 else ''}"
        table.add(
            writer=peer.name,
            threads=peer.threads,
            ratio=ratios[peer.label],
            save_seconds=saved[peer.label],
            save_rate=saved[peer.label].rate(nbytes / 1e6),
            load_seconds=loaded[peer.label],
            load_rate=loaded[peer.label].rate(nbytes / 1e6),
            save_speedup=paired(saved[zstd], saved[peer.label]),
            load_speedup=paired(loaded[zstd], loaded[peer.label]),
        )
    mine, zstd = "dcp_nvcomp, 2 threads", "dcp+zstd, 2 threads"
    report.at_least("save speed over DCP+zstd, 2 threads", paired(saved[zstd], saved[mine]).median, 1.9)
    report.at_least("load speed over DCP+zstd, 2 threads", paired(loaded[zstd], loaded[mine]).median, 3.5)
    report.at_least("ratio over that of DCP+zstd", ratios[mine] / ratios[zstd], 1.11)
    for action, times in (("Save", saved), ("Load", loaded)):
        series: dict[str, list[tuple[str, Spread]]] = {}
        for peer in peers:
            words = "1 thread" if peer.threads == 1 else f"{peer.threads} threads"
            series.setdefault(peer.name, []).append((words, times[peer.label].rate(nbytes / 1e6)))
        report.plots.append(Plot(f"{action}, {nbytes / 1e6:.0f} MB in memory", "", "MB/s", series))


def _save_case(peer: Peer, scratch: Path, state: State) -> Case:
    path = scratch / peer.label
    return Case(run=lambda: save(peer, path, state), before=lambda: remove(path))


def _load_case(peer: Peer, scratch: Path, into: State) -> Case:
    return Case(run=lambda: load(peer, scratch / peer.label, into))


def _coders(report: Report, state: State) -> None:
    """The coders alone; bf16 and fp32 apart, as they fare differently."""
    settings = report.settings
    if not have_zipnn():
        report.notes.append("zipnn is left out: it is not installed (the bench extra has it)")
    repeats = settings.repeats_or(7)
    table = report.table(
        "coders",
        f"Coders alone, from memory to memory: median (lowest-highest) of {repeats}",
        coder=("coder", ""),
        threads=("threads", "d"),
        state=("state", ""),
        ratio=("ratio", ".3f"),
        encode_rate=("compress, MB/s", ".0f"),
        decode_rate=("decompress, MB/s", ".0f"),
    )
    kinds = {
        "bf16": {name: tensor for name, tensor in state.items() if component(name) in ("model", "grad")},
        "fp32": {name: tensor for name, tensor in state.items() if component(name) in ("exp_avg", "exp_avg_sq")},
    }
    for threads in THREADS:
        settings.say(f"coders alone, {threads} threads")
        coders = [EngineCoder(threads), *([ZipNNCoder(threads)] if have_zipnn() else [])]
        measured = {kind: _measure_coders(coders, part, repeats) for kind, part in kinds.items()}
        both = {
            coder.name: tuple(a + b for a, b in zip(*(measured[kind][coder.name] for kind in kinds), strict=True))
            for coder in coders
        }
        nbytes = {kind: nbytes_of(part) for kind, part in kinds.items()} | {"together": nbytes_of(state)}
        for kind, found in (measured | {"together": both}).items():
            for name, (encode, decode, encoded_nbytes) in found.items():
                table.add(
                    coder=name,
                    threads=threads,
                    state=kind,
                    ratio=nbytes[kind] / encoded_nbytes,
                    encode_rate=encode.rate(nbytes[kind] / 1e6),
                    decode_rate=decode.rate(nbytes[kind] / 1e6),
                )
        if have_zipnn():
            words = f"over ZipNN, {threads} thread{'s' if threads > 1 else ''}"
            mine, theirs = both["dcp_nvcomp"], both["zipnn"]
            report.at_least(f"compress speed {words}", paired(theirs[0], mine[0]).median, 1.2)
            report.at_least(f"decompress speed {words}", paired(theirs[1], mine[1]).median, 1.0)
        for coder in coders:
            coder.close()
    for action, cell in (("Compress", "encode_rate"), ("Decompress", "decode_rate")):
        series: dict[str, list[tuple[str, Spread]]] = {}
        for row in table.rows:
            if row["threads"] == THREADS[-1]:
                series.setdefault(row["coder"], []).append((row["state"], row[cell]))
        report.plots.append(Plot(f"{action}, {THREADS[-1]} threads", "", "MB/s", series))


def _measure_coders(
    coders: list[EngineCoder | ZipNNCoder], state: State, repeats: int
) -> dict[str, tuple[Spread, Spread, int]]:
    """Seconds to encode, seconds to decode, encoded bytes; by coder."""
    inputs: dict[str, State] = {}
    encoded: dict[str, Any] = {}
    decoded: dict[str, State] = {}

    def encode_case(coder: EngineCoder | ZipNNCoder) -> Case:
        def before() -> None:
            encoded.pop(coder.name, None)
            inputs[coder.name] = coder.prepare(state)

        def encode() -> None:
            encoded[coder.name] = coder.encode(inputs[coder.name])

        return Case(encode, before, after=inputs.clear)

    def decode_case(coder: EngineCoder | ZipNNCoder) -> Case:
        def decode() -> None:
            decoded[coder.name] = coder.decode(encoded[coder.name])

        def after() -> None:
            assert_same(decoded[coder.name], state, coder.name)
            decoded.clear()

        return Case(decode, after=after)

    encode_seconds = alternate({coder.name: encode_case(coder) for coder in coders}, repeats=repeats)
    decode_seconds = alternate({coder.name: decode_case(coder) for coder in coders}, repeats=repeats)
    return {
        coder.name: (encode_seconds[coder.name], decode_seconds[coder.name], coder.nbytes(encoded[coder.name]))
        for coder in coders
    }

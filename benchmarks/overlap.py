"""`overlap`: does a save hide encoding behind the storage, or the storage behind encoding?

`sinks`: the storage takes bytes at a limited rate and keeps none, so it costs no CPU time. For rates from 0.2 to 5
times that at which the engine makes encoded bytes: the time of a save over the longer of encoding alone (a save to a
sink without a limit) and writing alone (the same bytes through the same sink).

`target`: a directory in memory behind a link of 500 MB/s each way. Compared with DCP's writer and reader for
URLs, which use the same link: how much of the ratio becomes speed?
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measuring import Case, Settings, Spread, alternate, core_count, paired
from benchmarks.peers import Peer, data_nbytes, load, ours, remove, save, stock_fsspec
from benchmarks.results import Plot, Report
from benchmarks.sinks import LimitedFileSystem, link
from benchmarks.states import State, assert_same, build_state, destination, nbytes_of

FACTORS = (0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0)
TARGET_RATE = 500e6
_PIECE_NBYTES = 2 << 20


def run(settings: Settings) -> Report:
    report = Report("overlap", settings)
    state = build_state(settings.nbytes_or(512 << 20), settings.state)
    with settings.scratch() as scratch:
        if settings.wants("sinks"):
            _sinks(report, state, scratch)
        if settings.wants("target"):
            _target(report, state, scratch)
    return report


def _sinks(report: Report, state: State, scratch: Path) -> None:
    settings, threads = report.settings, core_count()
    repeats = settings.repeats_or(5)
    free = _discarding(threads, None)
    alone = alternate({"": Case(lambda: save(free, f"limited://{scratch}", state))}, repeats=settings.repeats_or(3))[""]
    before = link().writing.passed_nbytes
    save(free, f"limited://{scratch}", state)
    encoded_nbytes = link().writing.passed_nbytes - before
    own_rate = encoded_nbytes / alone.median
    factors = FACTORS[::3] if settings.quick else FACTORS
    rates = {factor: factor * own_rate for factor in factors}
    settings.say(f"sinks of {', '.join(f'{rate / 1e6:.0f}' for rate in rates.values())} MB/s, {repeats} times each")

    cases = {"encode": Case(lambda: save(free, f"limited://{scratch}", state))}
    for factor, rate in rates.items():
        cases[f"write {factor}"] = _write_case(scratch, rate, encoded_nbytes)
        cases[f"save {factor}"] = _save_case(scratch, threads, rate, state)
    seconds = alternate(cases, repeats=repeats, warmups=0)  # warm already
    encode = seconds["encode"]
    table = report.table(
        "sinks",
        f"Save of {nbytes_of(state) / 1e6:.0f} MB ({encoded_nbytes / 1e6:.0f} MB encoded) with {threads} threads to "
        f"sinks of limited rate: median (lowest-highest) of {repeats}",
        factor=("rate, x that of encoding", ".2f"),
        rate=("rate, MB/s", ".0f"),
        encode_seconds=("encode alone, s", ".3f"),
        write_seconds=("write alone, s", ".3f"),
        save_seconds=("save, s", ".3f"),
        overlap=("save / the longer of both", ".3f"),
    )
    for factor, rate in rates.items():
        write, together = seconds[f"write {factor}"], seconds[f"save {factor}"]
        longer = Spread(tuple(map(max, encode.values, write.values)))
        row = table.add(
            factor=factor,
            rate=rate / 1e6,
            encode_seconds=encode,
            write_seconds=write,
            save_seconds=together,
            overlap=paired(together, longer),
        )
        report.at_most(f"save over the longer of encode and write, sink of {factor} x", row["overlap"].median, 1.10)
    report.plots.append(
        Plot(
            "Save to a sink of limited rate",
            "sink's rate over that of encoding",
            "time over the longer of encode and write",
            {"dcp_nvcomp": [(row["factor"], row["overlap"]) for row in table.rows]},
            log_x=True,
            level=1.1,
        )
    )


def _discarding(threads: int, rate: float | None) -> Peer:
    return ours(threads, rate=rate, discard=True)


def _save_case(scratch: Path, threads: int, rate: float, state: State) -> Case:
    peer = _discarding(threads, rate)
    return Case(lambda: save(peer, f"limited://{scratch}", state))


def _write_case(scratch: Path, rate: float, nbytes: int) -> Case:
    piece = bytes(_PIECE_NBYTES)

    def write() -> None:
        with LimitedFileSystem(rate, discard=True).open(f"{scratch}/plain.distcp", "wb") as file:
            for start in range(0, nbytes, len(piece)):
                file.write(piece[: nbytes - start])

    return Case(write)


def _target(report: Report, state: State, scratch: Path) -> None:
    settings, threads, nbytes = report.settings, core_count(), nbytes_of(state)
    repeats = settings.repeats_or(5)
    options = {"rate": TARGET_RATE}
    peers = [ours(threads, **options), stock_fsspec(threads, **options), stock_fsspec(threads, zstd=True, **options)]
    settings.say(f"a target of {TARGET_RATE / 1e6:.0f} MB/s, {repeats} times each")
    into = destination(state)
    saved = alternate({peer.name: _target_save(peer, scratch, state) for peer in peers}, repeats=repeats)
    ratios = {}
    for peer in peers:
        ratios[peer.name] = nbytes / data_nbytes(scratch / peer.name)
        load(peer, _url(scratch, peer), into)
        assert_same(into, state, peer.name)
    loads = {peer.name: Case(lambda peer=peer: load(peer, _url(scratch, peer), into)) for peer in peers}
    loaded = alternate(loads, repeats=repeats, warmups=0)
    table = report.table(
        "target",
        f"{nbytes / 1e6:.0f} MB over a link of {TARGET_RATE / 1e6:.0f} MB/s, {threads} threads: "
        f"median (lowest-highest) of {repeats}",
        writer=("writer", ""),
        ratio=("ratio", ".3f"),
        save_seconds=("save, s", ".3f"),
        load_seconds=("load, s", ".3f"),
        save_speedup=("save, x DCP", ".3f"),
        load_speedup=("load, x DCP", ".3f"),
    )
    for peer in peers:
        table.add(
            writer=peer.name,
            ratio=ratios[peer.name],
            save_seconds=saved[peer.name],
            load_seconds=loaded[peer.name],
            save_speedup=paired(saved["dcp"], saved[peer.name]),
            load_speedup=paired(loaded["dcp"], loaded[peer.name]),
        )
    bound = 0.9 * ratios["dcp_nvcomp"]
    for action, row in (("save", "save_speedup"), ("load", "load_speedup")):
        mine = table.rows[0][row].median
        report.at_least(f"{action} speed over DCP at {TARGET_RATE / 1e6:.0f} MB/s, 0.9 x ratio", mine, bound)
    series = {row["writer"]: [("save", row["save_seconds"]), ("load", row["load_seconds"])] for row in table.rows}
    report.plots.append(Plot(f"{nbytes / 1e6:.0f} MB over {TARGET_RATE / 1e6:.0f} MB/s", "", "seconds", series))


def _url(scratch: Path, peer: Peer) -> str:
    return f"limited://{scratch / peer.name}"


def _target_save(peer: Peer, scratch: Path, state: State) -> Case:
    return Case(lambda: save(peer, _url(scratch, peer), state), before=lambda: remove(scratch / peer.name))

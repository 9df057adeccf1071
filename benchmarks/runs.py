"""`runs`: what do the saves and restores of a training run cost, with a fast tier and copies on peers, and without?

Two ranks stand for two nodes: each has a directory in memory of its own as its fast tier, and a link of 200 MB/s of its
own to the durable tier. In each repeat every contender makes one save of the same state in the same processes, one
after the other, beside steps of about 30 ms; the next begins once nothing is left to do of the one before. Ours all
encode while the caller waits. Training that is lost is the stall, and by how much steps are slower behind it, as in the
suite `asynchronous`.

`memory`: saves that stay in memory: `async_save` alone, the fast tier, and the fast tier with copies.
`saves`: saves of all contenders that go to the durable tier.
`restore`: from the node's own memory, from a peer, and from the durable tier.
`ettr`: what that comes to in training that counts, see ettr.py; measures the others too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.ettr import Costs, best_interval, ettr
from benchmarks.measuring import Settings, Spread, core_count, paired
from benchmarks.processes import Ranks
from benchmarks.results import Plot, Report
from benchmarks.run_contenders import (
    ASYNC,
    COPIES,
    DIRECT,
    DURABLE,
    FAST,
    IN_MEMORY,
    KEPT,
    LOAD,
    MEMORY,
    NODES,
    OWN,
    PEER,
    RATE,
    RESTORES,
    SAVES,
    SYNC,
    Saved,
    restore_from_each,
    save_with_each,
    seconds_of_asking,
)

FAILURE_MINUTES = (10, 30, 60, 180, 360, 720, 1440)
LARGE_NBYTES = 10e9
UPLOAD_ONE_IN = 10
_NEVER = 10**9

# The saves of each contender, by rank.
Measured = list[dict[str, list[Saved]]]


def run(settings: Settings) -> Report:
    report = Report("runs", settings)
    nbytes = settings.nbytes_or(250_000_000)
    everything = settings.wants("ettr")
    if everything or settings.wants("memory"):
        with settings.scratch() as scratch, Ranks(NODES) as ranks:
            in_memory = _in_memory(report, ranks, nbytes, scratch)
    if everything or settings.wants("saves") or settings.wants("restore"):
        with settings.scratch() as scratch:
            with Ranks(NODES) as ranks:
                saves = _saves(report, ranks, nbytes, scratch)
            with Ranks(NODES) as ranks:  # a restart
                restores = _restores(report, ranks, nbytes, scratch)
    if everything:
        _ettr(report, _costs(in_memory, saves, restores), nbytes)
    return report


# --- saves -----------------------------------------------------------------------------------------------------------


def _in_memory(report: Report, ranks: Ranks, nbytes: int, scratch: Path) -> Measured:
    settings = report.settings
    repeats = settings.repeats_or(30)
    settings.say(f"saves into memory, {NODES} ranks of {nbytes / 1e6:.0f} MB, {repeats} times")
    each = ranks.run(NODES, save_with_each, IN_MEMORY, nbytes, settings.state, str(scratch), repeats, _NEVER)
    stalls = {name: _slowest(each, name, lambda saved: saved.stall_seconds) for name in IN_MEMORY}
    table = report.table(
        "memory",
        f"One save of {nbytes / 1e6:.0f} MB a rank into memory, {NODES} ranks on {core_count()} cores: median "
        f"(lowest-highest) of {repeats}, of the slowest rank",
        peer=("saved with", ""),
        stall=("stall, ms", ".1f"),
        over=("x async_save", "~.3f"),
        lost=("lost training, ms", ".1f"),
        fast=("complete, s", ".2f"),
        copies=("copied, s", ".2f"),
    )
    for name, stall in stalls.items():
        table.add(
            peer=name,
            stall=stall.scaled(1e3),
            over=paired(stall, stalls[MEMORY]),
            lost=_slowest(each, name, lambda saved: saved.lost_seconds).scaled(1e3),
            **{tier: _tier(each, name, tier) for tier in ("fast", "copies")},
        )
    report.at_most("stall of the fast tier over async_save's", paired(stalls[FAST], stalls[MEMORY]).median, 1.1)
    report.at_most("stall with copies=1 over without", paired(stalls[COPIES], stalls[FAST]).median, 1.05)
    asking = ranks.run(NODES, seconds_of_asking, str(scratch), 5 if settings.quick else 100)
    table = report.table(
        "asking",
        f"What each step pays, {NODES} ranks: median (lowest-highest) of {len(asking[0])} calls, of the slowest rank",
        asking=("should_save, ms", ".2f"),
    )
    table.add(asking=Spread(tuple(max(calls) for calls in zip(*asking, strict=True))).scaled(1e3))
    return each


def _saves(report: Report, ranks: Ranks, nbytes: int, scratch: Path) -> Measured:
    settings = report.settings
    repeats = settings.repeats_or(8)
    settings.say(f"{NODES} ranks of {nbytes / 1e6:.0f} MB, a link of {RATE / 1e6:.0f} MB/s each, {repeats} times")
    each = ranks.run(NODES, save_with_each, SAVES, nbytes, settings.state, str(scratch), repeats, 1)
    table = report.table(
        "saves",
        f"One save of {nbytes / 1e6:.0f} MB a rank, {NODES} ranks on {core_count()} cores, link of "
        f"{RATE / 1e6:.0f} MB/s each: median (lowest-highest) of {repeats}, of the slowest rank",
        peer=("saved with", ""),
        stall=("stall, s", ".3f"),
        lost=("lost training, s", ".3f"),
        fast=("in fast tier, s", ".2f"),
        copies=("copied, s", ".2f"),
        durable=("durable, s", ".2f"),
        stored=("stored, MB", ".1f"),
        sent=("sent, MB", ".1f"),
    )
    rows = {}
    for name in SAVES:
        rows[name] = table.add(
            peer=name,
            stall=_slowest(each, name, lambda saved: saved.stall_seconds),
            lost=_slowest(each, name, lambda saved: saved.lost_seconds),
            **{tier: _tier(each, name, tier) for tier in ("fast", "copies", "durable")},
            stored=_total(each, name, lambda saved: saved.stored_nbytes) / 1e6,
            sent=_total(each, name, lambda saved: saved.sent_nbytes) / 1e6,
        )
    where = f"{nbytes / 1e6:.0f} MB a rank, link of {RATE / 1e6:.0f} MB/s each"
    training = {
        what: [(name, row[column]) for name, row in rows.items()]
        for what, column in (("stall", "stall"), ("lost, with slower steps", "lost"))
    }
    survives = {
        what: [(name, row[tier]) for name, row in rows.items() if row[tier] is not None]
        for what, tier in (("all nodes", "durable"), ("a node", "copies"), ("a process", "fast"))
    }
    report.plots += [
        Plot("Training that a save costs", where, "seconds", training),
        Plot("A save survives the loss of ...", where, "seconds after the call", survives),
    ]
    for name in (FAST, COPIES):
        uploaded = _total(each, name, lambda saved: saved.uploaded_nbytes)
        stored = _total(each, name, lambda saved: saved.stored_nbytes)
        report.at_least(f"{name}: uploaded over stored", uploaded / stored, 1.0)
        sent = _total(each, name, lambda saved: saved.sent_nbytes)
        report.at_most(f"{name}: all bytes through the links over stored", sent / stored, 1.001)
    return each


def _slowest(each: Measured, name: str, value: Callable[[Saved], float]) -> Spread:
    """Return a value of each save, of the rank where it is highest."""
    return Spread(tuple(max(map(value, saves)) for saves in zip(*(of[name] for of in each), strict=True)))


def _tier(each: Measured, name: str, tier: str) -> Spread | None:
    """Return when the saves were complete in a tier; None if that is none of theirs."""
    if tier not in each[0][name][0].tier_seconds:
        return None
    return _slowest(each, name, lambda saved: saved.tier_seconds[tier])


def _total(each: Measured, name: str, value: Callable[[Saved], int]) -> float:
    """Return a value of one save of all ranks together, on average."""
    return sum(value(saved) for of in each for saved in of[name]) / len(each[0][name])


# --- restore ---------------------------------------------------------------------------------------------------------


def _restores(report: Report, ranks: Ranks, nbytes: int, scratch: Path) -> dict[str, Spread]:
    settings = report.settings
    repeats = settings.repeats_or(5)
    settings.say(f"restores, {repeats} times")
    each = ranks.run(NODES, restore_from_each, nbytes, settings.state, str(scratch), repeats)
    table = report.table(
        "restore",
        f"Restore of {nbytes / 1e6:.0f} MB a rank, {NODES} ranks on {core_count()} cores, link of "
        f"{RATE / 1e6:.0f} MB/s each: median (lowest-highest) of {repeats}, of the slowest rank",
        source=("from", ""),
        opened=("manager made, s", ".3f"),
        restored=("restored, s", ".3f"),
        received=("received through the links, MB", ".1f"),
    )
    found = {}
    for name in RESTORES:
        opened, restored = (
            Spread(tuple(max(one[at] for one in ones) for ones in zip(*(of[name] for of in each), strict=True)))
            for at in range(2)
        )
        received = sum(one[2] for of in each for one in of[name]) / len(each[0][name]) / 1e6
        table.add(source=name, opened=opened if name != LOAD else None, restored=restored, received=received)
        found[name] = opened + restored
    series = {"restore, the manager made before": list(found.items())}
    report.plots.append(Plot("Restore", f"{nbytes / 1e6:.0f} MB a rank", "seconds", series))
    return found


# --- ettr ------------------------------------------------------------------------------------------------------------


def _costs(in_memory: Measured, saves: Measured, restores: Mapping[str, Spread]) -> dict[str, Costs]:
    """Return what each way of saving costs; of the fast tier, by what fails."""

    def lost(each: Measured, name: str) -> float:
        return _slowest(each, name, lambda saved: saved.lost_seconds).median

    def durable(name: str, source: str) -> Costs:
        safe = _slowest(saves, name, lambda saved: saved.tier_seconds["durable"])
        return Costs(lost(saves, name), safe.median, restores[source].median)

    def fast(name: str, tier: str, source: str) -> Costs:
        share = 1 / UPLOAD_ONE_IN
        average = share * lost(saves, name) + (1 - share) * lost(in_memory, name)
        safe = _slowest(in_memory, name, lambda saved: saved.tier_seconds[tier])
        return Costs(average, safe.median, restores[source].median)

    return {
        **{name: durable(name, LOAD) for name in (SYNC, ASYNC, KEPT)},
        DIRECT: durable(DIRECT, DURABLE),
        f"{COPIES}: nodes fail": fast(COPIES, "copies", PEER),
        f"{FAST}: processes fail": fast(FAST, "fast", OWN),
    }


def _ettr(report: Report, costs: Mapping[str, Costs], nbytes: int) -> None:
    for name, size_nbytes in (("ettr", float(nbytes)), ("ettr-large", LARGE_NBYTES)):
        how = "" if size_nbytes == nbytes else f", {size_nbytes / nbytes:.0f} times the seconds measured"
        title = f"{size_nbytes / 1e6:,.0f} MB a rank{how}"
        table = report.table(
            name,
            f"ETTR by the mean time between failures, modelled: {title}",
            peer=("saved with", ""),
            interval=("a save every ... s at a failure an hour", ".1f"),
            **{f"minutes-{minutes}": (_span(minutes), ".4f") for minutes in FAILURE_MINUTES},
        )
        series: dict[str, list[tuple[float, float]]] = {}
        for peer, measured in costs.items():
            cost = measured.scaled(size_nbytes / nbytes)
            ratios = {
                minutes: ettr(cost, best_interval(cost, 60.0 * minutes), 60.0 * minutes) for minutes in FAILURE_MINUTES
            }
            table.add(
                peer=peer,
                interval=best_interval(cost, 3600.0) + cost.lost_seconds,
                **{f"minutes-{minutes}": ratio for minutes, ratio in ratios.items()},
            )
            series[peer] = [(minutes, 100 * (1 - ratio)) for minutes, ratio in ratios.items()]
        report.plots.append(
            Plot(
                f"Training lost to saves and failures: {size_nbytes / 1e6:,.0f} MB a rank{' (scaled)' * bool(how)}",
                "minutes between failures, on average",
                "1 - ETTR, %",
                series,
                log_x=True,
                log_y=True,
            )
        )


def _span(minutes: int) -> str:
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h"

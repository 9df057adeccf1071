"""`predictions`: does `dcp-nvcomp bench` foretell how long a save takes?

For each storage: `bench` with its default options, then saves and loads of the real state, which `bench` never sees,
with default options, and how far apart both are. Memory (`memory://`), a link of 200 MB/s into memory, and an S3 server
if one is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.measuring import Case, NotHere, Settings, alternate, core_count
from benchmarks.peers import load, ours, save
from benchmarks.results import Plot, Report, Table
from benchmarks.s3 import new_bucket, remove_bucket, storage_options
from benchmarks.sinks import LimitedFileSystem
from benchmarks.states import State, assert_same, build_state, destination, nbytes_of
from dcp_nvcomp.advising.bench import bench
from dcp_nvcomp.storage.open import open_filesystem

LINK_RATE = 200e6
CODECS = ("auto", "none")
TOLERANCE = 0.25

Place = tuple[str, Mapping[str, Any]]


@contextmanager
def _memory(settings: Settings) -> Iterator[Place]:
    yield "memory://predictions", {}


@contextmanager
def _link(settings: Settings) -> Iterator[Place]:
    with settings.scratch() as scratch:
        yield f"{LimitedFileSystem.protocol}://{scratch}", {"rate": LINK_RATE, "label": "predictions"}


@contextmanager
def _s3(settings: Settings) -> Iterator[Place]:
    assert settings.s3 is not None
    url = new_bucket(settings.s3)
    try:
        yield url, storage_options(settings.s3)
    finally:
        remove_bucket(settings.s3, url)


_PLACES = {"memory": _memory, f"link of {LINK_RATE / 1e6:.0f} MB/s": _link, "S3": _s3}


def run(settings: Settings) -> Report:
    report = Report("predictions", settings)
    state = build_state(settings.nbytes_or(500_000_000), settings.state)
    table = report.table(
        "predictions",
        f"Predicted and measured times of {nbytes_of(state) / 1e6:.0f} MB, {core_count()} threads: median "
        f"(lowest-highest) of {settings.repeats_or(5)}",
        storage=("storage", ""),
        codec=("codec", ""),
        predicted_save=("save, predicted, s", ".3f"),
        save_seconds=("measured, s", ".3f"),
        save_error=("off by", "+.0%"),
        predicted_load=("load, predicted, s", ".3f"),
        load_seconds=("measured, s", ".3f"),
        load_error=("off by", "+.0%"),
    )
    for name, opened in _PLACES.items():
        if not settings.wants(name.split()[0].lower()):
            continue
        if opened is _s3 and settings.s3 is None:
            if settings.parts:
                raise NotHere("no S3 server was named: --s3 http://127.0.0.1:7480 (.ci/ceph_up.sh starts one)")
            report.notes.append("S3 is left out: no server was named")
            continue
        with opened(settings) as (url, options):
            _compare(report, table, name, url, options, state)
    series = {
        kind: [(row["storage"], row[cell]) for row in table.rows if row["codec"] == "auto"]
        for kind, cell in (("predicted", "predicted_save"), ("measured", "save_seconds"))
    }
    report.plots.append(Plot(f"Save of {nbytes_of(state) / 1e6:.0f} MB", "", "seconds", series))
    return report


def _compare(report: Report, table: Table, name: str, url: str, options: Mapping[str, Any], state: State) -> None:
    settings, nbytes = report.settings, nbytes_of(state)
    settings.say(f"{name}: bench")
    found = bench(url, storage_options=options, **({"seconds": 1.0} if settings.quick else {}))
    repeats = settings.repeats_or(5)
    settings.say(f"{name}: saves and loads, {repeats} times each")
    peers = {codec: ours(core_count(), codec=codec, **options) for codec in CODECS}
    places = {codec: f"{url}/{codec}" for codec in CODECS}

    def clear(codec: str) -> None:
        filesystem = open_filesystem(places[codec], storage_options=options)
        filesystem.remove(filesystem.list_names())

    saved = alternate(
        {
            codec: Case(
                lambda codec=codec: save(peers[codec], places[codec], state), before=lambda codec=codec: clear(codec)
            )
            for codec in CODECS
        },
        repeats=repeats,
    )
    into = destination(state)
    for codec in CODECS:
        load(peers[codec], places[codec], into)
        assert_same(into, state, codec)
    loaded = alternate(
        {codec: Case(lambda codec=codec: load(peers[codec], places[codec], into)) for codec in CODECS},
        repeats=repeats,
        warmups=0,
    )
    for codec in CODECS:
        clear(codec)
        one = found.predict(nbytes, codec)
        row = table.add(
            storage=name,
            codec=codec,
            predicted_save=one.save_seconds,
            save_seconds=saved[codec],
            save_error=one.save_seconds / saved[codec].median - 1,
            predicted_load=one.load_seconds,
            load_seconds=loaded[codec],
            load_error=one.load_seconds / loaded[codec].median - 1,
        )
        report.at_most(f"{name}, {codec}: save, off by", abs(row["save_error"]), TOLERANCE)

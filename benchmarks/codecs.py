"""`codecs`: what each codec does with real state on this machine: ratio, and how fast it encodes and decodes.

As `dcp-nvcomp bench` measures it: whole save and load jobs, without planning, commit and storage, with all threads.
"""

from __future__ import annotations

from benchmarks.measuring import Settings, Spread, core_count
from benchmarks.results import Plot, Report
from benchmarks.states import build_state, nbytes_of
from dcp_nvcomp.advising.bench import CODECS
from dcp_nvcomp.advising.measuring import CodecRates, measure_codec


def run(settings: Settings) -> Report:
    report = Report("codecs", settings)
    state = build_state(settings.nbytes_or(256 << 20), settings.state)
    repeats, threads = settings.repeats_or(5), core_count()
    settings.say(f"{len(CODECS)} codecs, {repeats} times each")
    found: dict[str, list[CodecRates]] = {codec: [] for codec in CODECS}
    for _ in range(repeats):  # in turn, so that whatever else the machine does falls on all of them alike
        for codec in CODECS:
            seconds = 0.01 if settings.quick else 1.0
            found[codec].append(measure_codec(state, codec, threads=threads, seconds=seconds))
    table = report.table(
        "codecs",
        f"{nbytes_of(state) / 1e6:.0f} MB of real state in memory, {threads} threads: median (lowest-highest) of "
        f"{repeats}",
        codec=("codec", ""),
        ratio=("ratio", ".3f"),
        encode_rate=("encode, MB/s", ".0f"),
        decode_rate=("decode, MB/s", ".0f"),
    )
    for codec, rates in found.items():
        table.add(
            codec=codec,
            ratio=rates[0].ratio,
            encode_rate=Spread(tuple(one.encode_rate / 1e6 for one in rates)),
            decode_rate=Spread(tuple(one.decode_rate / 1e6 for one in rates)),
        )
    report.notes.append("ans is left out: it needs an NVIDIA GPU")
    series = {row["codec"]: [("encode", row["encode_rate"]), ("decode", row["decode_rate"])] for row in table.rows}
    report.plots.append(Plot("Codecs on real state", "", "MB/s", series))
    return report

"""`rowcol`: what prediction from rows and columns gains on states of models trained here, and on real state.

"without" is the same code whose `auto` has no chain that predicts; "everywhere" is one that predicts whatever a sample
says gets smaller by it, at any speed. Sizes are those of whole data files. Speeds are of whole save and load jobs in
memory, as `dcp-nvcomp bench` measures them, both in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from benchmarks.ideal_code import entropy_bits, least_nbytes, prefix_bits
from benchmarks.measuring import Settings, Spread, core_count
from benchmarks.results import Report
from benchmarks.states import COMPONENTS, State, component, load_state, nbytes_of
from benchmarks.trained_models import trained_states
from dcp_nvcomp.advising.measuring import CodecRates, measure_codec
from dcp_nvcomp.codecs import choose


@contextmanager
def _without() -> Iterator[None]:
    with patch.object(choose, "predicted_exponents", lambda element, columns: None):
        yield


@contextmanager
def _everywhere() -> Iterator[None]:
    with patch.object(choose, "_PREDICTED_TOLERANCE", 1.0):
        yield


def run(settings: Settings) -> Report:
    report = Report("rowcol", settings)
    states = trained_states(settings)
    _add_sizes(report, states, load_state(settings.state))
    _add_limits(report, states)
    mix = {f"{name}.{key}": tensor for name, state in states.items() for key, tensor in state.items()}
    _add_speeds(report, settings, {"fp32": mix, "bf16": {key: tensor.bfloat16() for key, tensor in mix.items()}})
    return report


def _ratio(state: State) -> float:
    return measure_codec(state, "auto", threads=core_count(), seconds=0.01).ratio  # which remembers nothing


def _add_sizes(report: Report, states: dict[str, State], real: State) -> None:
    table = report.table(
        "sizes",
        "Uncompressed over stored size, after training on the CPU with AdamW in fp32; bf16: the same, rounded",
        state=("state", ""),
        part=("part", ""),
        without=("without", ".3f"),
        ratio=("with", ".3f"),
        gain=("gain", ".3f"),
    )
    gains: dict[str, list[float]] = {}

    def add(name: str, part: str, state: State) -> None:
        with _without():
            without = _ratio(state)
        ratio = _ratio(state)
        table.add(state=name, part=part, without=without, ratio=ratio, gain=ratio / without)
        gains.setdefault(part, []).append(ratio / without)

    for name, state in states.items():
        for kind in ("w", "m", "v"):
            add(name, kind, {key: tensor for key, tensor in state.items() if key.startswith(f"{kind}.")})
        add(name, "w + m + v", state)
        for kind in ("w", "m", "v"):
            part = {key: tensor.bfloat16() for key, tensor in state.items() if key.startswith(f"{kind}.")}
            add(name, f"{kind}, bf16", part)
    trained_gains = {part: min(found) for part, found in gains.items()}
    for kind, words in COMPONENTS.items():
        add("real state", words, {key: tensor for key, tensor in real.items() if component(key) == kind})
    add("real state", "together", real)
    report.at_least("w + m + v, the least gain of all models", trained_gains["w + m + v"], 1.025)
    report.at_least("v, the least gain", trained_gains["v"], 1.05)
    report.at_least("v in bf16, the least gain", trained_gains["v, bf16"], 1.14)
    report.at_least("all states, the least gain", min(min(found) for found in gains.values()), 1 / 1.001)
    report.at_least("real state together, ratio", table.rows[-1]["ratio"], 1.325)


def _add_limits(report: Report, states: dict[str, State]) -> None:
    table = report.table(
        "limits",
        "What is gained, and what no code of symbols gains more than, in these blocks and slices",
        state=("state", ""),
        part=("part", ""),
        gain=("with", ".4f"),
        everywhere=("predicted everywhere", ".4f"),
        prefix=("prefix code", ".4f"),
        ideal=("ideal code", ".4f"),
    )
    for name, state in states.items():
        seconds = {key: tensor for key, tensor in state.items() if key.startswith("v.")}
        for part, tensors in (("v", seconds), ("w + m + v", state)):
            with _without():
                without = nbytes_of(tensors) / _ratio(tensors)
            with _everywhere():
                everywhere = _ratio(tensors)
            found = {
                "gain": without * _ratio(tensors) / nbytes_of(tensors),
                "everywhere": without * everywhere / nbytes_of(tensors),
                "prefix": without / sum(least_nbytes(tensor, prefix_bits) for tensor in tensors.values()),
                "ideal": without / sum(least_nbytes(tensor, entropy_bits) for tensor in tensors.values()),
            }
            table.add(state=name, part=part, **found)
    least = min(row["prefix"] / max(row["gain"], row["everywhere"]) for row in table.rows)
    report.at_least("the prefix code over what is gained, least", least, 1.0)


def _add_speeds(report: Report, settings: Settings, mixes: dict[str, State]) -> None:
    threads, repeats = core_count(), settings.repeats_or(5)
    table = report.table(
        "speeds",
        f"All of these states, {threads} threads: median (lowest-highest) of {repeats}",
        state=("w + m + v", ""),
        chooser=("auto", ""),
        encode_rate=("encode, MB/s", ".0f"),
        decode_rate=("decode, MB/s", ".0f"),
    )
    for name, mix in mixes.items():
        settings.say(f"speeds of {nbytes_of(mix) / 1e6:.0f} MB, {name}")
        found: dict[str, list[CodecRates]] = {"without": [], "with": []}
        for _ in range(repeats):  # in turn, so that whatever else the machine does falls on both alike
            for chooser, rates in found.items():
                seconds = 0.01 if settings.quick else 2.0
                with _without() if chooser == "without" else nullcontext():
                    rates.append(measure_codec(mix, "auto", threads=threads, seconds=seconds))
        for chooser, rates in found.items():
            encode, decode = (tuple(getattr(one, f"{way}_rate") / 1e6 for one in rates) for way in ("encode", "decode"))
            table.add(state=name, chooser=chooser, encode_rate=Spread(encode), decode_rate=Spread(decode))
        for way in ("encode", "decode"):
            ratios = [
                getattr(after, f"{way}_rate") / getattr(before, f"{way}_rate")
                for before, after in zip(found["without"], found["with"], strict=True)
            ]
            report.at_least(f"{way} beside without, {name}", statistics.median(ratios), 1.0)

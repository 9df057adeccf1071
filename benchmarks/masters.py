"""`masters`: states of mixed precision, 14 bytes a parameter, saved with masters derived from weights and without.

Models are trained here with bfloat16 weights that are rounded from float32 masters after each step. A state has both,
and both moments. Seconds are of `dcp_nvcomp.save` and `load` of all states together, both ways in turn; what was loaded
is compared. "Weights" and "masters" are loads of these alone.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable

from benchmarks.measuring import Settings, Spread, core_count, paired
from benchmarks.results import Report
from benchmarks.states import State, assert_same, destination, nbytes_of
from benchmarks.trained_models import trained_states
from dcp_nvcomp import load, save

_WAYS: dict[str, dict[str, str] | None] = {"as usual": None, "derived": {"master.*": "w.*"}}
_WANTED = {"all": "", "weights": "w.", "masters": "master."}


def run(settings: Settings) -> Report:
    report = Report("masters", settings)
    states = trained_states(settings, mixed=True)
    _add_sizes(report, settings, states)
    # by kind first, as keys of masters and weights are
    mix = {
        f"{kind}.{name}.{fqn}": tensor
        for name, state in states.items()
        for kind, fqn, tensor in ((*key.split(".", 1), tensor) for key, tensor in state.items())
    }
    _add_speeds(report, settings, mix)
    return report


def _add_sizes(report: Report, settings: Settings, states: dict[str, State]) -> None:
    table = report.table(
        "sizes",
        "Uncompressed over stored size of bf16 weights, fp32 masters and both fp32 moments",
        state=("state", ""),
        parameters=("parameters", ",d"),
        usual=("as usual", ".3f"),
        derived=("derived", ".3f"),
    )
    with settings.scratch() as scratch:
        for name, state in states.items():
            ratios = {}
            for way, derived in _WAYS.items():
                stats = save(state, scratch / name / way, no_dist=True, derived=derived)
                ratios[way] = stats.uncompressed_nbytes / stats.stored_nbytes
            parameters = sum(tensor.numel() for key, tensor in state.items() if key.startswith("w."))
            table.add(state=name, parameters=parameters, usual=ratios["as usual"], derived=ratios["derived"])
    report.at_least("14 bytes a parameter, the least ratio", min(row["derived"] for row in table.rows), 1.38)


def _add_speeds(report: Report, settings: Settings, state: State) -> None:
    repeats = settings.repeats_or(9)
    seconds: dict[tuple[str, str], list[float]] = {}

    def timed(work: str, way: str, do: Callable[[], object]) -> None:
        gc.collect()
        start = time.perf_counter()
        do()
        seconds.setdefault((work, way), []).append(time.perf_counter() - start)

    with settings.scratch() as scratch:
        for number in range(repeats + 1):
            for way, derived in _WAYS.items() if number % 2 else reversed(_WAYS.items()):
                path = scratch / way
                shutil.rmtree(path, ignore_errors=True)
                timed("save", way, lambda path=path, derived=derived: save(state, path, no_dist=True, derived=derived))
                for wanted, prefix in _WANTED.items():
                    part = {key: tensor for key, tensor in state.items() if key.startswith(prefix)}
                    into = destination(part)
                    timed(f"load {wanted}", way, lambda path=path, into=into: load(into, path, no_dist=True))
                    assert_same(into, part, way)
    table = report.table(
        "speeds",
        f"All of these states, {nbytes_of(state) / 1e6:.0f} MB in memory, on {core_count()} cores: median "
        f"(lowest-highest) of {repeats}",
        work=("work", ""),
        usual=("as usual, s", ".3f"),
        derived=("derived, s", ".3f"),
        factor=("derived over usual", ".3f"),
    )
    for work in ["save", *(f"load {wanted}" for wanted in _WANTED)]:
        usual, derived = (Spread(tuple(seconds[work, way][1:])) for way in _WAYS)
        table.add(work=work, usual=usual, derived=derived, factor=paired(derived, usual))

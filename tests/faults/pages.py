"""Puts what the fault matrix measured into docs/reliability.md and docs/reliability/: `python -m tests.faults.pages`.

A place is `<!-- name -->` ... `<!-- end -->`; the table of promises is tests/stores/promises.py, and the others have a
file of results in the repository, and how to make it anew:

    kill matrix   python -m tests.faults.kill_matrix; of runs: python -m tests.runs.kills.kill_matrix
    damage        python -m tests.faults.damage --json tests/faults/damage.json
    fuzz          python -m tests.faults.fuzz ... --output tests/faults/fuzz/results.json
    soak          python -m tests.soak ... --json tests/soak/results/....json
    operator soak the last lines of three runs of python -m tests.soak --operator, in tests/soak/results/operator.json
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs.kills import kill_matrix as run_kills
from tests.stores import promises

from . import damage, kill_matrix

TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"
PICTURE = DOCS / "images" / "killed.png"


def _read(name: str) -> Any:
    return json.loads((TESTS / name).read_text())


def _fuzz() -> str:
    found = _read("faults/fuzz/results.json")
    lines = [
        f"`{found['command']}` ({found['machine']}): {found['executions']:,} executions in {found['seconds']:,.0f} s.",
        "",
        "| target | executions | edges | findings |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in found["targets"]:
        lines.append(f"| {row['target']} | {row['executions']:,} | {row['coverage']} | {row['findings']} |")
    return "\n".join(lines)


def _soak() -> str:
    lines = [
        "| place | seed | minutes | steps | saves | ranks killed | files damaged | loads beside saves | lies |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in ("disk", "s3"):
        found = _read(f"soak/results/{name}.json")
        done = found["counts"]
        saves = sum(done.get(name, 0) for name in SAVING) + done.get("two_writers", 0)  # which are two
        cells = [found["place"], found["seed"], round(found["seconds"] / 60)]
        cells += [found["steps"], saves, done.get("killed", 0), done.get("damage", 0)]
        cells += [done.get("reader_during_save", 0), int("lie" in found)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _operator_soak() -> str:
    lines = [
        "| seed | minutes | jobs | ranks killed, stopped or told to end | disks full, read-only, lost or obstructed | "
        "files and steps harmed | commands and other jobs beside | findings |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for found in _read("soak/results/operator.json"):
        cells = [found["seed"], round(found["seconds"] / 60), found["incarnations"]]
        for words in _OPERATOR_KINDS:
            cells.append(sum(count for kind, count in found["counts"].items() if kind.startswith(words)))
        lines.append(f"| {' | '.join(map(str, [*cells, found['findings']]))} |")
    return "\n".join(lines)


def _tried() -> str:
    """What all of it came to."""
    saves, runs = _read("faults/kill_matrix.json")["cases"], _read("runs/kills/kill_matrix.json")["cases"]
    bits, fuzz = _read("faults/damage.json")["counts"], _read("faults/fuzz/results.json")
    soaks = [_read(f"soak/results/{name}.json") for name in ("disk", "s3")]
    jobs = _read("soak/results/operator.json")
    killed = {writer: Counter(row["left"] for row in saves if row["writer"] == writer) for writer in ("ours", "stock")}
    bad = {writer: sum(counts[word] for word in _BAD) for writer, counts in killed.items()}
    silent = sum(count for key, count in bits.items() if not key.endswith(("Error", f"|{damage.EXACT}")))
    rows = [
        ("a rank killed in a save, at each stage", f"{killed['ours'].total()} kills", bad["ours"]),
        ("the same with stock DCP", f"{killed['stock'].total()} kills", bad["stock"]),
        ("a rank or a node killed in a training run", f"{len(runs)} kills", sum(bool(row["wrong"]) for row in runs)),
        ("a bit flipped, each bit of each file", f"{sum(bits.values()):,} loads", silent),
        ("inputs made by a fuzzer", f"{fuzz['executions']:,} inputs", fuzz["findings"]),
        (
            "random saves, loads, kills and damage",
            f"{sum(one['steps'] for one in soaks):,} steps",
            sum("lie" in one for one in soaks),
        ),
        (
            "operators, full disks and wrong clocks",
            f"{sum(one['incarnations'] for one in jobs)} jobs",
            sum(one["findings"] for one in jobs),
        ),
    ]
    lines = ["| what was done | how often | wrong, mixed or lost |", "| --- | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {what} | {often} | {found} |" for what, often, found in rows)])


_BAD = ("mixed", "lost", "wrong")
_OPERATOR_KINDS = (
    ("killed", "stopped", "struck", "told"),
    ("durable full", "durable read-only", "fast ", "node lost"),
    ("byte", "durable harmed", "file ", "foreign", "garbage", "metadata", "step "),
    ("another", "ls", "pin", "prune", "verify"),
)
SAVING = ("save", "killed_save", "failing_save", "two_writers", "reader_during_save", "clean_during_save")
PLACES: dict[str, dict[str, Callable[[], str]]] = {
    "reliability.md": {"promises": promises.table, "tried": _tried},
    "reliability/faults.md": {
        "kill matrix": lambda: kill_matrix.table(_read("faults/kill_matrix.json")),
        "run kill matrix": lambda: run_kills.table(_read("runs/kills/kill_matrix.json")),
        "damage": lambda: damage.table(_read("faults/damage.json")["counts"]),
        "fuzz": _fuzz,
        "soak": _soak,
        "operator soak": _operator_soak,
    },
}


def filled(page: str) -> str:
    """A page with all its places filled."""
    text = (DOCS / page).read_text()
    for name, make in PLACES[page].items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert place.search(text), name
        content = make()
        text = place.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
    return text


def draw_killed(path: Path) -> None:
    """Draw what is left when a rank is killed in a save that overwrites, of ours and of stock DCP's."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = [row for row in _read("faults/kill_matrix.json")["cases"] if row["path"] == "overwrite"]
    picture, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
    for writer, name in (("stock", "stock DCP"), ("ours", "dcp_nvcomp")):
        counts = Counter(row["left"] for row in cases if row["writer"] == writer)
        start = 0.0
        for left, color in _COLORS.items():
            percent = 100 * counts[left] / counts.total()
            bar = axes.barh(name, percent, left=start, color=color, label=left if writer == "stock" else None)
            if percent:
                axes.bar_label(bar, [f"{counts[left]}"], label_type="center", fontsize=14)
            start += percent
    axes.set_xlabel("percent of kills, each at another stage of a save", fontsize=13)
    axes.tick_params(axis="x", labelsize=12)
    axes.tick_params(axis="y", labelsize=14, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(
        ["the old checkpoint", "the new one", "a mixture", "none"], loc="outside upper center", ncols=4, fontsize=12
    )
    picture.savefig(path, dpi=120, metadata={"Description": _tried()})
    plt.close(picture)


_COLORS = {"old": "#b8bec6", "new": "#2e9e5b", "mixed": "#e0b23c", "lost": "#c2514e"}

if __name__ == "__main__":
    for page in PLACES:
        (DOCS / page).write_text(filled(page))
    draw_killed(PICTURE)

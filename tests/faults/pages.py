"""Puts what the fault matrix measured into docs/reliability.md: `python -m tests.faults.pages`.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs.kills import kill_matrix as run_kills
from tests.stores import promises

from . import damage, kill_matrix

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


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


_OPERATOR_KINDS = (
    ("killed", "stopped", "struck", "told"),
    ("durable full", "durable read-only", "fast ", "node lost"),
    ("byte", "durable harmed", "file ", "foreign", "garbage", "metadata", "step "),
    ("another", "ls", "pin", "prune", "verify"),
)
SAVING = ("save", "killed_save", "failing_save", "two_writers", "reader_during_save", "clean_during_save")
PLACES: dict[str, Callable[[], str]] = {
    "promises": promises.table,
    "kill matrix": lambda: kill_matrix.table(_read("faults/kill_matrix.json")),
    "run kill matrix": lambda: run_kills.table(_read("runs/kills/kill_matrix.json")),
    "damage": lambda: damage.table(_read("faults/damage.json")["counts"]),
    "fuzz": _fuzz,
    "soak": _soak,
    "operator soak": _operator_soak,
}


def filled(text: str) -> str:
    """The page with all places filled."""
    for name, make in PLACES.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert place.search(text), name
        content = make()
        text = place.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

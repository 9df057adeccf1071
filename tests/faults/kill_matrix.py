"""What a save that is killed leaves behind, with this plugin and with stock DCP.

`python -m tests.faults.kill_matrix` runs all cases, writes kill_matrix.json, and prints the table that
`python -m tests.faults.pages` puts into docs/reliability.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from .failpoints import STAGES
from .killing import Case, cases, expected_outcome, outcome, run_case, save_earlier
from .saves import loaded, save_next

RESULTS = Path(__file__).with_suffix(".json")
PATHS = ("fresh", "overwrite")
RUNS = (("ours", "sync"), ("ours", "thread"), ("ours", "process"), ("ours", "staged"), ("stock", "sync"))
COLUMNS = (
    ("this plugin", "ours", "sync"),
    ("async_save", "ours", "staged"),
    ("DCP's, thread", "ours", "thread"),
    ("DCP's, process", "ours", "process"),
    ("stock DCP", "stock", "sync"),
)

Results = dict[str, Any]


def run() -> Results:
    """Run all cases."""
    found: Results = {"torch": torch.__version__, "seconds": {}, "cases": []}
    with tempfile.TemporaryDirectory() as directory:
        for writer, how in RUNS:
            earlier = save_earlier(writer, Path(directory) / f"earlier-{how}")
            start = time.monotonic()
            for case in cases(writer, how):
                place = Path(directory) / str(case)
                killed = run_case(case, earlier, place)
                left = outcome(case, killed)
                save_next(writer, killed.checkpoint)
                after = loaded(writer, killed.checkpoint)
                found["cases"].append({**asdict(case), "left": left, "next_save": after})
            found["seconds"][f"{writer} {how}"] = round(time.monotonic() - start)
            print(f"{writer} {how}: {found['seconds'][f'{writer} {how}']} s", flush=True)
    return found


def _case(row: Results) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case)})


def _as_json(found: Results) -> str:
    """With a line for each case, so that changes can be read."""
    head = json.dumps({key: value for key, value in found.items() if key != "cases"})
    rows = ",\n".join(json.dumps(row) for row in found["cases"])
    return f'{head[:-1]}, "cases": [\n{rows}\n]}}\n'


def table(found: Results) -> str:
    """The results as a table in Markdown, "fresh path / overwriting" in each cell, and a line that counts them."""
    left = {_case(row): row["left"] for row in found["cases"]}
    lines = ["| killed at | rank | " + " | ".join(name for name, _, _ in COLUMNS) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(COLUMNS))
    for stage in STAGES:
        for victim in (0, 1):
            cells = [
                " / ".join(_cell(left.get(Case(writer, how, path, stage.name, victim))) for path in PATHS)
                for _, writer, how in COLUMNS
            ]
            lines.append(f"| {stage.name} | {victim} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _summary(left, found["torch"])])


def _cell(left: str | None) -> str:
    return "-" if left is None else left if left in ("old", "new") else f"**{left}**"


def _summary(left: dict[Case, str], version: str) -> str:
    parts = []
    for name, writer in (("this plugin", "ours"), ("stock DCP", "stock")):
        counts = Counter(word for case, word in left.items() if case.writer == writer)
        words = ", ".join(f"{counts[word]} {word}" for word in ("old", "new", "mixed", "lost", "wrong"))
        parts.append(f"{name}: {sum(counts.values())} cases, {words}")
    return f"Fresh path / overwriting; torch {version}. " + "; ".join(parts) + "."


def main() -> None:
    """Run all cases; exit status 1 where one of ours left what it must not."""
    found = run()
    RESULTS.write_text(_as_json(found))
    print(table(found))
    ours = [(_case(row), row["left"], row["next_save"]) for row in found["cases"] if row["writer"] == "ours"]
    bad = [case for case, *ends in ours if ends != [expected_outcome(case), "next"]]
    sys.exit(f"not as it must be: {', '.join(map(str, bad))}" if bad else 0)


if __name__ == "__main__":
    main()

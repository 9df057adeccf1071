"""What jobs restore after another one was killed: `python -m tests.runs.kills.kill_matrix` runs all cases.

It writes kill_matrix.json and prints the table; with `--table` it prints the table of the results that are there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .driver import KILLED_STEP, RANKS_OF, Case, Copies, cases, check_left, earlier_run, kill, restarts, resume
from .stages import STAGES

RESULTS = Path(__file__).with_suffix(".json")

Results = dict[str, Any]
_WORDS: dict[Copies, str] = {1: "", 0: ", no copies", "replicas": ", replicas"}


def run() -> Results:
    """Run all cases."""
    found: Results = {"torch": torch.__version__, "cases": []}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        kinds: tuple[Copies, ...] = (0, 1, "replicas")
        earlier = {copies: earlier_run(Path(directory, f"earlier-{copies}"), copies) for copies in kinds}
        for case in cases():
            place = Path(directory, str(case).replace("`", ""))
            place.mkdir()
            found["cases"].append(_row(case, earlier[case.copies], place))
    found["seconds"] = round(time.monotonic() - start)
    return found


def _row(case: Case, earlier: Path, directory: Path) -> dict[str, Any]:
    row: dict[str, Any] = {**asdict(case), "restored": [], "wrong": []}
    left = kill(case, earlier, directory)
    _tried(row, lambda: check_left(case, left))
    for number, node_of in enumerate(restarts(case)):
        place = directory / f"restart-{number}"
        place.mkdir()
        restored = _tried(row, lambda node_of=node_of, place=place: resume(left, node_of, place))
        row["restored"] += [] if restored is None else [restored]
    return row


def _tried(row: dict[str, Any], check: Callable[[], Any]) -> Any:
    try:
        return check()
    except AssertionError as error:
        row["wrong"].append(str(error))
        print(f"{row}: {error}", flush=True)
        return None


def as_json(found: Results) -> str:
    """With a line for each case, so that changes can be read."""
    head = json.dumps({key: value for key, value in found.items() if key != "cases"})
    rows = ",\n".join(json.dumps(row) for row in found["cases"])
    return f'{head[:-1]}, "cases": [\n{rows}\n]}}\n'


def table(found: Results) -> str:
    """The results as a table in Markdown: which step each job restored, and a line that counts them."""
    rows = {(row["stage"], row["victim"], row["copies"]): row for row in found["cases"]}
    columns = [
        (victim, copies) for copies in _WORDS for victim in RANKS_OF if any(key[1:] == (victim, copies) for key in rows)
    ]
    names = [f"{victim}{_WORDS[copies]}" for victim, copies in columns]
    lines = [f"| killed at | {' | '.join(names)} |", "| --- |" + " --- |" * len(columns)]
    for stage in STAGES:
        cells = [_cell(rows.get((stage.name, victim, copies))) for victim, copies in columns]
        lines.append(f"| {stage.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _summary(found)])


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return "**wrong**" if row["wrong"] else " / ".join(map(str, row["restored"]))


def _summary(found: Results) -> str:
    jobs = [step for row in found["cases"] for step in row["restored"]]
    steps = Counter("new" if step == KILLED_STEP else "old" for step in jobs)
    wrong = sum(bool(row["wrong"]) for row in found["cases"])
    return (
        f"The step that was restored by four ranks on two nodes / by two ranks; step {KILLED_STEP} was being saved, or "
        f"50 restored. torch {found['torch']}: {len(found['cases'])} cases, {len(jobs)} jobs that went on, "
        f"{steps['new']} from step {KILLED_STEP}, {steps['old']} from an earlier one; {wrong} wrong; "
        f"{found['seconds']} s."
    )


def main() -> None:
    """Run what the command line asks for; exit status 1 where something was wrong."""
    if "--table" not in sys.argv:
        RESULTS.write_text(as_json(run()))
    found = json.loads(RESULTS.read_text())
    print(table(found))
    sys.exit(1 if any(row["wrong"] for row in found["cases"]) else 0)


if __name__ == "__main__":
    main()

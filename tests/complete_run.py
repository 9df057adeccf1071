"""Everything there is to run, in parts of at most an hour: `make test-all`, before a release.

    python -m tests.complete_run                  runs all parts, one after the other
    python -m tests.complete_run kills soak       runs these alone
    python -m tests.complete_run --list           prints the parts and what they run

Each part that ran is a row of complete_run.md, with its date, commit, result, counts and minutes; it takes the place of
that part's earlier row. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).with_name("complete_run.md")
ROOT: Final = Path(__file__).parents[1]
_HEAD: Final = "| part | date | commit | result | what it says | minutes |\n| --- | --- | --- | --- | --- | ---: |\n"
PARTS: Final = {
    "usual": """make test ARGS="-m 'not slow and not tools and not oracle and not frameworks'\"""",
    "oracle": 'make test ARGS="-m oracle"',
    "kills": 'make test ARGS="-m slow -k kill tests/runs/kills tests/faults"',
    "faults": """make test ARGS="-m slow -k 'not kill' tests/faults\"""",
    "slow": 'make test ARGS="-m slow --ignore=tests/faults --ignore=tests/runs/kills"',
    "tools": 'make test ARGS="-m tools"',
    "frameworks": "make test-frameworks",
    "lowest": "make test-lowest",
    "fuzz": "make fuzz",
    "soak": "make soak MINUTES=15",
    "mutations": f"{sys.executable} -m tests.faults.mutations",
}


def run(part: str) -> tuple[bool, str, float]:
    """Run a part; return whether it passed, what counts something at its end, and how many minutes it took."""
    began = time.monotonic()
    environment = {**os.environ, "DCP_NVCOMP_TEST_PROFILE": "all"}
    process = subprocess.Popen(
        PARTS[part], shell=True, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    ended, said = list[str](), ""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.match(r"=+ .*\d+ (passed|failed|error).* in ", line):  # of pytest, which a part may run several times
            ended.append(line.strip(" =\n"))
        elif re.search(r"\d+ (passed|failed|missed|findings|executions)|\"findings\"", line):
            said = line.strip(" =\n")
    return process.wait() == 0, "; ".join(ended) or said, (time.monotonic() - began) / 60


def note(part: str, passed: bool, said: str, minutes: float) -> None:
    """Put the row of a part into the table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    result = "passed" if passed else "FAILED"
    cells = (part, date, commit.strip(), result, said[:200].replace("|", "/"), f"{minutes:.0f}")
    rows = {one.split("|")[1].strip(): one for one in TABLE.read_text().splitlines()[2:]} if TABLE.exists() else {}
    rows[part] = f"| {' | '.join(cells)} |"
    TABLE.write_text(_HEAD + "".join(f"{rows[one]}\n" for one in PARTS if one in rows))


def main() -> None:
    """Run the parts that the command line names, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.complete_run")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="print the parts and what they run")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.list:
        print("\n".join(f"{part:12} {command}" for part, command in PARTS.items()))
        return
    failed = []
    for part in arguments.parts or PARTS:
        passed, said, minutes = run(part)
        note(part, passed, said, minutes)
        failed += [] if passed else [part]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

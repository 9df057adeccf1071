"""Runs the fuzzer; see the package. Exit status 1 at the first finding."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .corpus import corpus_inputs, keep_finding, keep_new_lines
from .seeds import SEEDS
from .targets import TARGETS

MAX_INPUT_NBYTES = 4096
# Of waiting, not of work: limits.py counts processor time, this ends what would never come back.
HANG_SECONDS = 30
_LINE = re.compile(r"^#(\d+)\s.*?cov: (\d+) ft: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """The result of one target."""

    target: str
    executions: int
    seconds: float
    coverage: int
    findings: int


def fuzz(target: str, executions: int, seed: int, *, keep: bool) -> Run:
    """Run one target in a process of its own; a finding's input goes into the corpus."""
    with tempfile.TemporaryDirectory() as directory:
        found, findings = Path(directory) / "inputs", Path(directory) / "findings"
        found.mkdir()
        findings.mkdir()
        inputs = [*SEEDS[target], *corpus_inputs(target).values()]
        for number, data in enumerate(inputs):
            (found / f"seed-{number}").write_bytes(data)
        command = [sys.executable, "-m", "tests.faults.fuzz.child", target, f"-runs={executions}", f"-seed={seed}"]
        command += [f"-max_len={MAX_INPUT_NBYTES}", f"-timeout={HANG_SECONDS}", "-rss_limit_mb=0", "-len_control=0"]
        command += [f"-artifact_prefix={findings}/", "-print_final_stats=1", str(found)]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        seconds = time.monotonic() - begin
        log = done.stdout + done.stderr
        failed = sorted(findings.iterdir())
        for path in failed:
            print(f"{target}: {path.name} saved as {keep_finding(target, path.read_bytes())}")
        if done.returncode or failed:
            print(log[-6000:])
        if done.returncode and not failed:
            raise SystemExit(f"{target}: the fuzzer itself failed (status {done.returncode}).")
        if keep and not failed:
            kept = keep_new_lines(target, TARGETS[target], [path.read_bytes() for path in found.iterdir()])
            print(f"{target}: {kept} inputs kept")
    count = re.search(r"stat::number_of_executed_units:\s*(\d+)", log)
    lines = _LINE.findall(log)
    coverage = int(lines[-1][1]) if lines else 0
    return Run(target, int(count[1]) if count else 0, round(seconds, 1), coverage, len(failed))


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz")
    parser.add_argument("--executions", type=int, default=10_000, help="of each target")
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach new lines in the corpus")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    runs = []
    for target in options.target or TARGETS:
        run = fuzz(target, options.executions, options.seed, keep=options.keep)
        runs.append(run)
        rate = run.executions / max(run.seconds, 0.1)
        print(
            f"{run.target}: {run.executions} executions in {run.seconds} s ({rate:.0f}/s), {run.coverage} edges, "
            f"{run.findings} findings",
            flush=True,
        )
        if run.findings:
            break
    if options.output:
        figures = {
            "command": "python -m tests.faults.fuzz " + shlex.join(sys.argv[1:]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "executions": sum(run.executions for run in runs),
            "seconds": round(sum(run.seconds for run in runs), 1),
            "findings": sum(run.findings for run in runs),
            "targets": [asdict(run) for run in runs],
        }
        options.output.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(1 if any(run.findings for run in runs) else 0)


if __name__ == "__main__":
    main()

"""Runs the mutations; see the package. Exit status 1 where one was not caught, or does not fit the sources any more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.faults.mutations import Mutation, kernels, read

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("dcp_nvcomp", "tests", "benchmarks", "docs", "examples", "setup.cfg", "README.md", "Makefile")


def mutations() -> Iterator[Mutation]:
    """Yield those of all lists."""
    for path in sorted(set(Path(__file__).parent.glob("*.diff")) - {kernels.ORDERS}):
        yield from read(path)
    yield from kernels.MUTATIONS


def fits(mutation: Mutation) -> bool:
    """True if the text is there once, what takes its place can be imported, and the tests are there."""
    text = (ROOT / mutation.file).read_text() if (ROOT / mutation.file).is_file() else ""
    if text.count(mutation.old) != 1 or mutation.new == mutation.old:
        return False
    if mutation.file.endswith(".py"):
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    return all((ROOT / word.partition("::")[0]).exists() for word in mutation.tests.split() if ".py" in word)


def failures(mutation: Mutation, directory: Path) -> list[str]:
    """Names of the tests that fail without the protection."""
    copy = directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    path = copy / mutation.file
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    options = "-q -x --show-capture=no --tb=no"
    command = [sys.executable, "-m", "pytest", *options.split(), "-m", "", *mutation.tests.split()]
    every = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "DCP_NVCOMP_TEST_PROFILE": "all"}
    environment = {**os.environ, **every}
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run:\n{run.stdout}\n{run.stderr}")
    # a name without "::" is a file that could not be imported: that proves nothing
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", run.stdout, re.MULTILINE) if run.returncode else []


def main() -> None:
    """Run all, or those that a word on the command line selects."""
    words, missed, count = sys.argv[1:], 0, 0
    with tempfile.TemporaryDirectory() as directory:
        for mutation in mutations():
            if words and not any(word in f"{mutation.row} {mutation.file}" for word in words):
                continue
            caught = failures(mutation, Path(directory)) if fits(mutation) else []
            count, missed = count + 1, missed + (not caught)
            line = textwrap.shorten(mutation.old, 100, placeholder=" ...")
            verdict = "caught" if caught else "MISSED" if fits(mutation) else "DOES NOT FIT"
            print(" | ".join([verdict, mutation.row, mutation.file, line, ", ".join(caught)]), flush=True)
    print(f"{count} mutations, {missed} missed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

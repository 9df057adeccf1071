"""Runs the mutations; see the package. Exit status 1 where one was not caught, or does not fit the sources any more."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


class Copy:
    """A copy of the project in which one protection at a time is replaced. Its bytecode stays: half the time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seconds = itertools.count(1_000_000_000)  # bytecode goes by these: no two texts of a file have the same
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, directory / name)

    def _write(self, file: str, text: str) -> None:
        path = self.directory / file
        path.write_text(text)
        second = next(self.seconds)
        os.utime(path, (second, second))

    def failures(self, mutation: Mutation) -> list[str] | None:
        """Return the names of the tests that fail without the protection; None if no test could run."""
        text = (ROOT / mutation.file).read_text()
        self._write(mutation.file, text.replace(mutation.old, mutation.new))
        options = "-q -x --show-capture=no --tb=no -p no:cacheprovider -o timeout=200"
        command = [sys.executable, "-m", "pytest", *options.split(), "-m", "", *mutation.tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(self.directory), "DCP_NVCOMP_TEST_PROFILE": "all"}
        said = self.directory / "said"
        with said.open("w") as output:  # not a pipe: what a broken test leaves running would keep it open
            run = subprocess.Popen(
                command,
                cwd=self.directory,
                env=environment,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            status = run.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        self._write(mutation.file, text)
        # a name without "::" is a file that could not be imported: that proves nothing
        named = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", said.read_text(), re.MULTILINE)
        return [] if status == 0 else named or None


def main() -> None:
    """Run all, or those that a word on the command line selects: as many at a time as there are processors."""
    words = sys.argv[1:]
    chosen = [one for one in mutations() if not words or any(word in f"{one.row} {one.file}" for word in words)]
    at_once = min(len(os.sched_getaffinity(0)), len(chosen))
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def verdict(mutation: Mutation) -> tuple[str, list[str]]:
        if not fits(mutation):
            return "DOES NOT FIT", []
        copy = copies.get()
        try:
            caught = copy.failures(mutation)
        finally:
            copies.put(copy)
        if caught is None:
            return "CANNOT RUN", []
        return "caught" if caught else "MISSED", caught

    missed = 0
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(max(1, at_once)) as pool:
        for number in range(at_once):
            copies.put(Copy(Path(directory, str(number))))
        for mutation, (word, caught) in zip(chosen, pool.map(verdict, chosen), strict=True):
            missed += not caught
            line = textwrap.shorten(mutation.old, 100, placeholder=" ...")
            print(" | ".join([word, mutation.row, mutation.file, line, ", ".join(caught)]), flush=True)
    print(f"{len(chosen)} mutations, {missed} missed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

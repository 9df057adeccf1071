"""What the fuzzer once found, or needs to reach every line, replayed under its limits; and some fuzzing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import forked

from .fuzz.corpus import CORPUS, corpus_inputs
from .fuzz.targets import TARGETS


def test_corpus_is_harmless() -> None:
    assert all(corpus_inputs(target) for target in TARGETS)
    done = forked.execute_module("tests.faults.fuzz.replay")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) inputs, 0 findings", done.stdout)
    assert found and int(found[1]) > sum(len(corpus_inputs(target)) for target in TARGETS)
    assert CORPUS.stat().st_size < 500_000


LIMITS = """
import time
from dcp_nvcomp.errors import CorruptDataError
from tests.faults.fuzz.limits import FindingError, Limits

limits = Limits(refresh=1)  # a thread of a library that ends meanwhile gives its stack back

def spin(data):
    until = time.process_time() + 1.1
    while time.process_time() < until:
        pass

def hide(data):
    try:
        bytes(100 << 20)
    except MemoryError as error:
        raise CorruptDataError("damaged") from error

def refuse(data):
    raise CorruptDataError("damaged")

def outcome(target):
    try:
        limits.run(target, b"")
    except Exception as error:
        return type(error).__name__
    return "passes"

for target in (spin, hide, refuse, lambda data: bytes(65 << 20), lambda data: bytes(60 << 20), lambda data: data[5]):
    print(outcome(target))
"""


def test_the_limits_bite() -> None:
    done = forked.execute(LIMITS)
    assert done.stdout.split() == ["FindingError", "FindingError", "passes", "FindingError", "passes", "IndexError"]


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_some_fuzzing(target: str) -> None:
    pytest.importorskip("atheris", reason="it has no wheel for this Python")
    command = [sys.executable, "-m", "tests.faults.fuzz", "--executions", "4000", "--target", target, "--seed", "4"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"{target}: 4\d\d\d executions .* 0 findings", done.stdout), done.stdout

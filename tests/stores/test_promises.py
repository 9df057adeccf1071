"""The table of promises names tests that are there, and docs/reliability.md has it as it is."""

from __future__ import annotations

import subprocess
import sys

from tests.faults.pages import TESTS

from . import promises


def test_each_cell_has_its_test() -> None:
    named = promises.tests()
    assert len(named) > 60
    files = sorted({test.partition("::")[0] for test in named})
    options = ["--collect-only", "-q", "-m", "not gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    collected = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
    missing = set(named) - set(collected.splitlines())
    assert not missing


def test_no_kind_is_without_words() -> None:
    for promise in promises.PROMISES:
        for kind in promises.COLUMNS.values():
            assert promise.cell(kind).words, (promise.words, kind)

"""A share of the large matrices: together the shares are all, and nothing else is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("case", range(40))
def test_many(case): pass
@pytest.mark.slow
@pytest.mark.parametrize("case", range(20))
def test_few(case): pass
@pytest.mark.parametrize("case", range(40))
def test_quick(case): pass
"""


def run(directory: Path, *options: str) -> set[str]:
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: is slow\n  oracle: is stock\n")
    (directory / "test_cases.py").write_text(SOURCE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.shares", "-p", "no:cacheprovider", "-v"]
    done = subprocess.run([*command, *options], cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.replace("[gw0] ", "").replace("[gw1] ", "") for line in done.stdout.splitlines() if "PASSED" in line]
    return {line[line.index("test_cases.py") :].split()[0] for line in lines}


def test_the_shares_are_all(tmp_path: Path) -> None:
    everything = run(tmp_path)
    assert len(everything) == 100
    shares = [run(tmp_path, "--share", f"{number}/3") for number in range(3)]
    assert set().union(*shares) == everything
    assert [len(share) for share in shares] == [14 + 60, 13 + 60, 13 + 60]
    assert run(tmp_path, "--share", "4/3", "-n", "2") == shares[1]

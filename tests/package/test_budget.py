"""A run fails if one of its files takes longer than it may, with workers and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = "import pytest\n@pytest.mark.parametrize('case', range(5))\ndef test_quick(case): pass\n"
SLOW = "import time\ndef test_first(): time.sleep(0.6)\ndef test_second(): time.sleep(0.7)\n"


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_a_file_that_takes_too_long_fails_the_run(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_quick.py").write_text(QUICK)
    (tmp_path / "test_slow.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.budget", "-p", "no:cacheprovider", *options]
    for budget, status in (("1", 1), ("60", 0)):
        done = subprocess.run(
            [*command, "--file-budget", budget], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert ("files that take more than 1 s" in done.stdout) == bool(status)
        assert ("test_second" in done.stdout) == bool(status) and "test_quick[" not in done.stdout

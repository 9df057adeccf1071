"""A run fails if it skipped what it should not: CI's, in one process and with workers, and one that requires a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "test_skipped": "import pytest\ndef test(): pytest.skip('no disk')",
    "test_module": "import pytest\npytest.skip('no network', allow_module_level=True)",
}
ALLOWED = {
    "test_marked": "import pytest\n@pytest.mark.gpu\ndef test(): pytest.skip('no GPU')",
    "test_expected": "import pytest\n@pytest.mark.xfail\ndef test(): assert False",
    "test_passes": "def test(): pass",
}


def run(
    directory: Path, sources: dict[str, str], worker_count: int, options: tuple[str, ...] = ("--no-skips-but=gpu",)
) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs a GPU\n  ci: in CI only\n")
    for name, source in sources.items():
        (directory / f"{name}.py").write_text(source)
    plugins = ["-p", "xdist", "-p", "tests.skips", "-p", "tests.budget", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *plugins, "-n", str(worker_count), "--dist", "loadgroup", str(directory)]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("worker_count", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_a_forbidden_skip_fails_the_run(tmp_path: Path, worker_count: int) -> None:
    tmp_path /= "gpu"  # the name of a folder is no marker
    done = run(tmp_path, ALLOWED, worker_count)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "though not marked" not in done.stdout
    done = run(tmp_path, {**FORBIDDEN, **ALLOWED}, worker_count)
    assert done.returncode == 1, done.stdout + done.stderr
    listed = done.stdout.partition("skipped, though not marked gpu")[2]
    assert listed.count("no disk") == 1 and listed.count("no network") == 1 and "no GPU" not in listed


SLOW = {
    "test_slow": "import time\ndef test_first(): time.sleep(0.4)\ndef test_second(): time.sleep(0.4)",
    "test_marked": "import time, pytest\n@pytest.mark.ci\ndef test(): time.sleep(0.8)",
}


@pytest.mark.parametrize("worker_count", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_a_file_that_takes_too_long_fails_the_run(tmp_path: Path, worker_count: int) -> None:
    done = run(tmp_path / "ci", SLOW, worker_count, ("--file-budget=0.7",))
    assert done.returncode == 1, done.stdout + done.stderr
    listed = done.stdout.partition("files that take more than 0.7 s")[2]
    assert "test_slow.py" in listed and "test_marked" not in listed
    assert run(tmp_path / "ci", SLOW, worker_count, ("--file-budget=60",)).returncode == 0


SKIPPED = """
import pytest
pytestmark = pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_by_mark(): pass
def test_by_call(): pytest.skip("needs a CUDA device")
@pytest.mark.xfail
def test_expected(): assert False
def test_runs(): pass
"""


@pytest.mark.tools
@pytest.mark.parametrize("plugins", ["", "timeout"])
def test_a_required_gpu_that_is_not_there_fails_its_tests(tmp_path: Path, plugins: str) -> None:
    """Also where pytest-timeout is not installed, though tests are marked for it and setup.cfg sets it."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_configure")
    (tmp_path / "test_gpu.py").write_text(SKIPPED + "@pytest.mark.timeout(600)\ndef test_limited(): pass\n")
    (tmp_path / "test_else.py").write_text("import pytest\ndef test(): pytest.skip('no disk')")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\ntimeout = 60\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-config", "--strict-markers"]
    command += ["-rA", *(["-p", "pytest_timeout"] if plugins else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for required in (False, True):
        more = ["--require-gpu"] * required
        done = subprocess.run([*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == required, done.stdout + done.stderr
        assert ("--require-gpu was given" in done.stdout) == required
        last = done.stdout.splitlines()[-1]
        assert all(count in last for count in ("2 passed", "1 xfailed", "1 skipped" if required else "3 skipped")), last

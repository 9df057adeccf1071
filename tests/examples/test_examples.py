"""Every example runs and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str | Path, **environment: str) -> str:
    """Runs a Python program to its end, without a warning that points at our code; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not re.search(r"dcp_nvcomp/\S+\.py:\d+: \w*Warning", done.stderr), done.stderr
    return done.stdout


def test_save_load(tmp_path: Path) -> None:
    assert "equal to what was saved" in run(EXAMPLES / "save_load.py", tmp_path / "checkpoint")


def test_a_demo_is_published(tmp_path: Path) -> None:
    output, page = tmp_path / "demo-out", tmp_path / "docs" / "performance" / "demo.md"
    output.mkdir()
    page.parent.mkdir(parents=True)
    (output / "table.md").write_text("| a |\n")
    (output / "demo.png").write_bytes(b"drawn")
    page.write_text((EXAMPLES.parent / "docs" / "performance" / "demo.md").read_text())
    sys.path.insert(0, str(EXAMPLES))
    try:
        from demo_report import publish
    finally:
        sys.path.remove(str(EXAMPLES))
    publish(output, tmp_path)
    assert "<!-- measured by make demo -->\n| a |\n<!-- end -->\n\nMB are" in page.read_text()
    assert (tmp_path / "docs" / "images" / "demo.png").read_bytes() == b"drawn"


@pytest.mark.tools
def test_reshard(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "reshard.py", tmp_path / "checkpoint")
    assert "rows loaded as (1000, 150)" in printed
    assert "tiles loaded as (500, 300)" in printed
    assert "whole loaded as (1000, 300)" in printed


@pytest.mark.tools
def test_train_async(tmp_path: Path) -> None:
    """With collectives of training beside those of the saves."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    size = ["--width", "32", "--depth", "2", "--steps", "7", "--save-every", "2"]
    printed = run(*ranks, EXAMPLES / "train_async.py", "--checkpoints", tmp_path, *size)
    assert printed.count("saving in the background") == printed.count("saved ") == 3
    assert "loaded step 6" in printed


@pytest.mark.slow
def test_train_async_saves_200_times(tmp_path: Path) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    size = ["--width", "16", "--depth", "1", "--steps", "400", "--save-every", "2"]
    printed = run(*ranks, EXAMPLES / "train_async.py", "--checkpoints", tmp_path, *size)
    assert printed.count("saving in the background") == printed.count("saved ") == 200
    assert "loaded step 400" in printed


def _run_twice(run_url: str | Path, fast: Path, *options: str, **environment: str) -> tuple[str, str]:
    def ranks(count: int) -> list[str]:
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]

    common = [EXAMPLES / "run.py", run_url, "--fast", fast, *options]
    first = run(*ranks(4), *common, "--steps", "41", **environment)
    return first, run(*ranks(2), *common, "--steps", "71", **environment)


@pytest.mark.tools
def test_run(tmp_path: Path) -> None:
    first, second = _run_twice(tmp_path / "run", tmp_path / "fast")
    assert "steps [20, 40], 656 samples" in first
    assert "goes on after step 40, 656 samples" in second
    assert "steps [40, 60, 70], 896 samples" in second


@pytest.mark.tools
@pytest.mark.s3
def test_run_on_s3(any_s3_store: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, options = any_s3_store
    keys = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    endpoint = ["--endpoint-url", options["endpoint_url"]]
    first, second = _run_twice(f"{url}/run", tmp_path / "fast", *endpoint, **keys)
    assert "steps [20, 40], 656 samples" in first
    assert "goes on after step 40, 656 samples" in second
    assert "steps [40, 60, 70], 896 samples" in second


@pytest.mark.tools
@pytest.mark.s3
def test_s3(s3_store: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_store
    keys = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    printed = run(EXAMPLES / "s3.py", f"{url}/step-1", "--endpoint-url", options["endpoint_url"], **keys)
    assert "loaded 1.weight alone" in printed


@pytest.mark.tools
@pytest.mark.timeout(1200)
def test_demo_and_train_fsdp(tmp_path: Path) -> None:
    quick = ["--every", "6", "--fast-every", "2", "--width", "32", "--repeats", "1"]
    printed = run(EXAMPLES / "demo.py", "--output", tmp_path, *quick)
    assert re.search(r"Step 10 was restored bit for bit: .* MB from own, .* MB from peer\.\n", printed)
    assert re.search(r"Step 12 was restored bit for bit: .*; [0-9.]+ MB from durable\.\n", printed)
    assert printed.count("The loss goes on from there") == 2
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "| exp_avg_sq |" in (tmp_path / "table.md").read_text()

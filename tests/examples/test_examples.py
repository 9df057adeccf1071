"""Every example runs and says what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str | Path, **environment: str) -> str:
    """Runs a Python program to its end, with warnings of ours as errors; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error:::dcp_nvcomp", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def torchrun(ranks: int, script: str, *arguments: str | Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run(*launcher, EXAMPLES / script, *arguments)


def test_save_load(tmp_path: Path) -> None:
    assert "equal to what was saved" in run(EXAMPLES / "save_load.py", tmp_path / "checkpoint")


def test_reshard(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "reshard.py", tmp_path / "checkpoint")
    assert "rows loaded as (1000, 150)" in printed
    assert "tiles loaded as (500, 300)" in printed
    assert "whole loaded as (1000, 300)" in printed


@pytest.mark.s3
def test_s3(s3_store: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_store
    keys = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    printed = run(EXAMPLES / "s3.py", f"{url}/step-1", "--endpoint-url", options["endpoint_url"], **keys)
    assert "loaded 1.weight alone" in printed


def test_train_fsdp_saves_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    small = ["--checkpoints", tmp_path / "run", "--width", "32", "--depth", "1"]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    torchrun(2, "train_fsdp.py", *small, "--steps", "4", "--save-every", "2", "--record", first)
    printed = torchrun(1, "train_fsdp.py", *small, "--steps", "4", "--resume", "2", "--record", second)
    assert "resumed after step 2" in printed
    saved = [line["saved"] for line in read_lines(first) if "saved" in line]
    (loaded,) = [line["loaded"] for line in read_lines(second) if "loaded" in line]
    assert loaded == saved[0] != saved[1]


def test_demo(tmp_path: Path) -> None:
    quick = ["--save-at", "3", "--steps", "6", "--width", "32", "--repeats", "1"]
    printed = run(EXAMPLES / "demo.py", "--output", tmp_path, *quick)
    assert "is bit-identical to the one saved on 4" in printed
    assert "The loss goes on from there" in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "| exp_avg_sq |" in (tmp_path / "table.md").read_text()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

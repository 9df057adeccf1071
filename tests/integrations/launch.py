"""Starts a job on two ranks or another number, and compares what its starts have noted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
TIMEOUT_S = 300


def needs(package: str, requirement: str) -> None:
    """Skip the test if a framework is not installed."""
    if importlib.util.find_spec(package.split(".")[0]) is None or importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {requirement}")


def printed(*arguments: str) -> str:
    """Return what Python prints that is started with these arguments."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(job: str, directory: Path, how: str, *options: str, killed: bool = False, ranks: int = RANKS) -> str:
    """Run a job to its end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", f"tests.integrations.jobs.{job}", str(directory), how, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode != 0) == killed, done.stdout[-8000:]
    assert not killed or "SIGKILL" in done.stdout or "exitcode  : -9" in done.stdout, done.stdout[-8000:]
    return done.stdout


def notes(directory: Path, ranks: int = RANKS) -> dict[tuple[int, str, str, int], str]:
    """Return the digests by rank, start, what and step."""
    found = {}
    for rank in range(ranks):
        for line in (directory / f"notes-{rank}.jsonl").read_text().splitlines():
            how, what, step, value = json.loads(line)
            found[rank, how, what, step] = value
    return found


def check_resumed(directory: Path, saved: int, last: int, ranks: int = RANKS) -> None:
    """Check that the job went on as if it had not been killed."""
    found = notes(directory, ranks)
    for rank in range(ranks):
        assert found[rank, "resume", "loaded", saved] == found[rank, "train", "saved", saved]
        assert found[rank, "resume", "trained", last] == found[rank, "train", "trained", last]
        assert found[rank, "train", "trained", last] != found[rank, "train", "saved", saved]


def check_ours(checkpoint: Path) -> None:
    """Check that this package wrote a checkpoint, and that it is whole."""
    from dcp_nvcomp import tools

    assert list(checkpoint.glob("__*.metadata")), sorted(path.name for path in checkpoint.iterdir())
    assert tools.verify(checkpoint, full=True).is_sound


def check_cleaned(run: Path, checkpoint: Path) -> None:
    """Check that `clean` removes what a dead save left in a checkpoint, and nothing else below a run."""
    from dcp_nvcomp.runs import clean_run

    before = sorted(run.rglob("*"))
    orphan = checkpoint / f"__0_0_{'0' * 32}.distcp"
    orphan.write_bytes(b"of a save that was killed")
    long_ago = time.time() - 7200
    for path in run.rglob("*"):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    cleaned = clean_run(run, older_than_seconds=3600.0)
    assert not cleaned.refused
    removed = [one.name for found in cleaned.checkpoints for one in found.orphans]
    assert removed == [orphan.name]
    assert sorted(run.rglob("*")) == before

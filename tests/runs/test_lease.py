"""One manager writes to a run: who may take it over, and who is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dcp_nvcomp import CheckpointManager, RunInUseError
from dcp_nvcomp.runs.lease import Lease
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem


def _own(path: Path) -> Callable[[], Filesystem]:
    return lambda: open_filesystem(path / ".run")


def _take(path: Path, *, run_id: str | None = None, seconds: float = 60.0, take_over: bool = False) -> Lease:
    return Lease.take(_own(path), run_id=run_id, lease_seconds=seconds, take_over=take_over)


def test_a_second_manager_is_told_who_holds_the_run(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path, run_id="first"),
        pytest.raises(RunInUseError, match=rf"job 'first', process {os.getpid()} on .*take_over=True"),
    ):
        CheckpointManager(tmp_path, run_id="second")
    CheckpointManager(tmp_path, run_id="second").close()
    assert len(list((tmp_path / ".run").glob("lease-*"))) == 2, "of the last one, given back, and the one before"


def test_the_same_job_takes_over_at_once_and_the_first_one_learns_of_it(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path, run_id="job", lease_seconds=0.2)
    second = CheckpointManager(tmp_path, run_id="job")
    with pytest.raises(RunInUseError, match=r"taken this run over \(job 'job'"):
        _until(lambda: [first.should_save(step) for step in range(3)])
    first.close()
    assert list((tmp_path / ".run").glob("lease-*")), "the second one's"
    second.close()


def test_take_over(tmp_path: Path) -> None:
    first = _take(tmp_path)
    second = _take(tmp_path, take_over=True)
    assert not first.is_lost
    second.release()
    first.release()


def test_a_dead_job_does_not_hold_it_for_ever(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom dcp_nvcomp import CheckpointManager\n"
        "CheckpointManager(sys.argv[1], run_id='dead', lease_seconds=20.0)\nos._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120).returncode == 7
    with pytest.raises(RunInUseError, match=r"job 'dead'.* renewed .* s ago"):
        _take(tmp_path, run_id="other")
    (lease,) = (tmp_path / ".run").glob("lease-*")
    long_ago = time.time() - 30
    os.utime(lease, (long_ago, long_ago))
    _take(tmp_path, run_id="other").release()


def _until(call: Callable[[], object]) -> None:
    for _ in range(2000):
        call()
        time.sleep(0.01)


def test_a_lease_is_renewed(tmp_path: Path) -> None:
    lease = _take(tmp_path, seconds=0.3)
    time.sleep(1.0)
    with pytest.raises(RunInUseError):
        _take(tmp_path)
    lease.release()


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    def attempt(number: int) -> Lease | None:
        try:
            return _take(tmp_path, run_id=str(number))
        except RunInUseError:
            return None

    for _ in range(40):
        with ThreadPoolExecutor(8) as pool:
            leases = [lease for lease in pool.map(attempt, range(8)) if lease is not None]
        assert len(leases) == 1
        leases[0].release()


def test_a_damaged_lease_runs_out_at_once(tmp_path: Path) -> None:
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "lease-000001").write_bytes(b"\0" * 100)
    time.sleep(0.05)
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, state)


def test_a_manager_that_lost_the_run_leaves_the_lease_alone(tmp_path: Path) -> None:
    first = _take(tmp_path, seconds=0.1, run_id="a")
    second = _take(tmp_path, run_id="a")
    for _ in range(200):
        if first.is_lost:
            break
        time.sleep(0.05)
    first.release()
    with pytest.raises(RunInUseError):
        _take(tmp_path, run_id="b")
    second.release()

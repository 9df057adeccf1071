"""SIGKILL of the background process of `async_save`, and of the rank that it works for, while it encodes and writes.

The checkpoint that was there before is there afterwards; the other rank is told; the next save works.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.staging import staged_by
from dcp_nvcomp import NvcompWriter, async_save
from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import parse_codec
from dcp_nvcomp.saving.process_state import process_state
from tests.checkpoints import file_names

from . import forked
from .failpoints import BY_NAME
from .killing import save_earlier
from .saves import loaded, save_next, sharded

STAGES = ("encode, item 3", "file 2 opened", "half of a block written", "before the fsync of file 2", "after file 3")
FAST = {("half of a block written", 0, "process"), ("after file 3", 1, "rank")}
ATTEMPTS = 3


class KillingChooser:
    """A codec that arms a stage where it is unpickled, which is in the background process."""

    def __init__(self, stage: str, whom: str, directory: Path) -> None:
        self._stage, self._whom, self._directory = stage, whom, directory

    def choose(self, element: Any, sample: Any, nbytes: int) -> CodecChain:
        return parse_codec("planes-zstd").choose(element, sample, nbytes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        seam = BY_NAME[self._stage].ours
        assert seam is not None
        seam.arm(self._strike)

    def _strike(self) -> None:
        victim = os.getpid() if self._whom == "process" else os.getppid()
        (self._directory / "fired").write_text(str(victim))
        os.kill(victim, signal.SIGKILL)


def _save_killed(stage: str, victim: int, whom: str, directory: Path, checkpoint: Path) -> None:
    rank = dist.get_rank()
    codec = KillingChooser(stage, whom, directory) if rank == victim else "planes-zstd"
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    writer = NvcompWriter(checkpoint, single_file_per_rank=False, thread_count=2, codec=codec)
    state = sharded("new")
    with staged_by("copy"):
        saving = async_save(state, storage_writer=writer)
    for value in state.values():  # training goes on
        if isinstance(value, DTensor):
            value.to_local().fill_(-1)
    (directory / f"background-{rank}").write_text(str(process_state().background().pid))
    saving.upload_completion.result(2 * forked.GROUP_SECONDS)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_earlier("ours", tmp_path_factory.mktemp("earlier"))


def _cases() -> list[Any]:
    return [
        pytest.param(stage, victim, whom, marks=[] if (stage, victim, whom) in FAST else [pytest.mark.slow])
        for stage in STAGES
        for victim in (0, 1)
        for whom in ("process", "rank")
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("stage", "victim", "whom"), _cases())
def test_killed(stage: str, victim: int, whom: str, earlier: Path, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):  # gloo sometimes fails to connect local ranks: then no save has begun
        place = tmp_path / str(attempt)
        checkpoint = place / "c"
        shutil.copytree(earlier, checkpoint)
        before = file_names(checkpoint)
        ends = forked.run(_save_killed, stage, victim, whom, place, checkpoint, directory=place)
        if (place / "pid-0").exists() and (place / "pid-1").exists():
            break
    assert (place / "fired").exists(), f"the stage was never reached: {ends}"
    killed = int((place / "fired").read_text())
    other = ends[1 - victim]
    if whom == "rank":
        assert killed == int((place / f"pid-{victim}").read_text())
        assert ends[victim].exit_code == -signal.SIGKILL
    else:
        assert killed == int((place / f"background-{victim}").read_text())
        assert "background process" in str(ends[victim].error) and "died (exit status -9)" in str(ends[victim].error)
    assert other.exit_code == 0 and other.error, "the other rank heard of nothing"
    assert loaded("ours", checkpoint) == "old"
    _assert_ends([int((place / f"background-{rank}").read_text()) for rank in (0, 1) if _is_there(place, rank)])
    if whom == "process":
        left = {name for name in file_names(checkpoint) - before if name.startswith(f"__{victim}_")}
        assert not left, "what the killed process left is removed; the other rank's files at its next save"
    save_next("ours", checkpoint)
    assert loaded("ours", checkpoint) == "next"


def _is_there(place: Path, rank: int) -> bool:
    return (place / f"background-{rank}").exists()


def _assert_ends(pids: list[int]) -> None:
    """No background process outlives its rank, and goes on writing."""
    patience = time.monotonic() + 60
    for pid in pids:
        while _is_running(pid):
            assert time.monotonic() < patience
            time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

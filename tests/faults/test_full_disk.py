"""A real file system that is full at each stage of a save: of bytes, and of inodes."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch

from dcp_nvcomp import errors
from tests.checkpoints import file_names
from tests.small_disk import SmallDisk, small_disk
from tests.states import State, small_state

from .small import failure_of, nothing_leaks, save_in_order, what_loads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PAGE_KIB = 4


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk() as disk:
        yield disk


def large(seed: int) -> State:
    """Several pages of data, in two files."""
    generator = torch.Generator().manual_seed(seed)
    return {**small_state(seed), "large": torch.randn(9000, generator=generator)}


@pytest.mark.parametrize("what", ["size", "inodes"])
@pytest.mark.parametrize("old", [True, False], ids=["overwriting", "fresh"])
def test_full_at_every_stage(disk: SmallDisk, what: str, old: bool) -> None:
    """One page, or one inode, more each time, until the save fits: at first not even a file can be made."""
    states = large(1), large(2)
    path = disk.path / "runs" / "c"
    if old:
        save_in_order(path, states[0])
    before = file_names(path)
    step, failures = PAGE_KIB if what == "size" else 1, 0
    for limit in range(disk.used(what), disk.used(what) + 60 * step, step):
        disk.resize(f"size={max(limit, 4)}k" if what == "size" else f"nr_inodes={max(limit, 1)}")
        with nothing_leaks():
            failure = failure_of(lambda: save_in_order(path, states[1], single_file_per_rank=False))
        if failure is None:
            break
        failures += 1
        assert failure.kind is errors.StorageError and failure.number == errno.ENOSPC, failure
        assert "free space" in failure.text and failure.path is not None and str(disk.path) in failure.path
        assert what_loads(path, *states) == (0 if old else None)
        assert file_names(path) == before, "left behind on a full disk"
    assert failure is None and what_loads(path, *states) == 1
    assert failures >= (8 if what == "size" else 3)

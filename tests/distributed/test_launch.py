"""The pool itself: results in rank order, warnings as errors, failures of one rank that others wait for."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .launch import RankFailure, RankPool, end_of_child


def _sum_of_ranks() -> tuple[int, int, int, int]:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), os.getpid()


def _warn_on(rank: int) -> None:
    if dist.get_rank() == rank:
        warnings.warn("nobody expects this", stacklevel=1)


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def test_results_come_in_rank_order_from_the_same_processes(ranks: RankPool) -> None:
    of_four = ranks.run(_sum_of_ranks)
    of_three = ranks.run(_sum_of_ranks, world_size=3)
    assert [result[:3] for result in of_four] == [(rank, 4, 10) for rank in range(4)]
    assert [result[:3] for result in of_three] == [(rank, 3, 6) for rank in range(3)]
    assert [result[3] for result in of_three] == [result[3] for result in of_four[:3]]


def test_warning_on_a_rank_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 2: (.|\n)*nobody expects this"):
        ranks.run(_warn_on, 2)


@pytest.mark.ci
def test_failure_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    pool = RankPool(2, tmp_path, grace_s=0.5)
    try:
        with pytest.raises(RankFailure, match="rank one has had enough"):
            pool.run(_raise_on_rank_one, timeout_s=120.0)
    finally:
        pool.close()


class _Held:
    """Holds a process group in a cycle."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.itself = group, self


_kept: list[_Held] = []


def _fail_with_a_group() -> None:
    raise ValueError("on purpose", _Held(dist.new_group()))


def _keep_a_group() -> int:
    """Let go of the group that an earlier call kept, keep another, and return how many files are open."""
    _kept[:] = [_Held(dist.new_group())]
    return len(os.listdir("/proc/self/fd"))


def _let_go() -> None:
    _kept.clear()


def _let_go_and_fork() -> int | None:
    _let_go()
    return end_of_child(gc.collect)  # as any child does in time


def test_what_calls_leave_does_not_hang_children_of_later_ones(ranks: RankPool) -> None:
    """Groups of calls that failed, and groups that a later call lets go of before it forks."""
    with pytest.raises(RankFailure, match="on purpose"):
        ranks.run(_fail_with_a_group, world_size=2)
    assert ranks.run(_let_go_and_fork, world_size=2) == [7, 7]
    ranks.run(_keep_a_group, world_size=2)
    assert ranks.run(_let_go_and_fork, world_size=2) == [7, 7]


def test_groups_that_calls_leave_are_gone_after_the_next(ranks: RankPool) -> None:
    counts = [ranks.run(_keep_a_group, world_size=2)[0] for _ in range(6)]
    ranks.run(_let_go, world_size=2)
    assert counts[5] < counts[1] + 8, counts  # four groups have 16 or more; one file more or less is another thread's

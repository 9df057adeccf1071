"""Long messages between ranks, and connections that end in the middle of one."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import errors
from dcp_nvcomp.calls.peers import Peers, close_connections

from .launch import RankFailure, RankPool

LONG = 512 << 20  # more than a connection buffers, so it is under way for a while
MOMENT_SECONDS = 0.03


def _peers() -> Peers:
    group = dist.group.WORLD
    assert group is not None
    return Peers(group, range(dist.get_world_size()), 0)


def _exchange() -> list[int]:
    peers, found = _peers(), []
    for size in (0, 1, 1 << 20, 3):
        sent = [peers.send(torch.full((size,), peers.own, dtype=torch.uint8), to, 7) for to in peers.others]
        into = torch.empty(size, dtype=torch.uint8)
        for source in peers.others:
            peers.wait(peers.receive(into, source, 7))
            found += into.unique().tolist()
        for one in sent:
            peers.wait(one)
    told = peers.all_tell(torch.tensor([peers.own]))
    peers.settle()
    return [*found, *(int(one) for one in told)]


def test_messages_arrive_in_order(ranks: RankPool) -> None:
    assert ranks.run(_exchange, world_size=3, timeout_s=60) == [
        [1, 2] * 3 + [0, 1, 2],
        [0, 2] * 3 + [0, 1, 2],
        [0, 1] * 3 + [0, 1, 2],
    ]


def _breaks(outcome: Path, direction: str, how: str) -> None:
    peers, data = _peers(), torch.ones(LONG, dtype=torch.uint8)
    is_sender = (peers.own == 1) == (direction == "send")
    begin = peers.send if is_sender else peers.receive

    def wait() -> None:
        one = begin(data, 1 - peers.own, 0)
        if peers.own == 1:
            time.sleep(MOMENT_SECONDS)
            if how == "exit":
                os._exit(9)
            close_connections(dist.group.WORLD)  # type: ignore[arg-type]
        peers.wait(one)

    dist.barrier()
    began = time.monotonic()
    with pytest.raises(errors.RankFailedError, match="Another rank is gone"):
        wait()
    (outcome / str(peers.own)).write_text(f"{time.monotonic() - began:.1f}")


@pytest.mark.parametrize("how", [pytest.param("exit", marks=pytest.mark.ci), "close"])
@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_connection_that_ends_in_the_middle_of_a_message(
    ranks: RankPool, tmp_path: Path, direction: str, how: str
) -> None:
    """Gloo alone leaves the other rank waiting for as long as its group may wait."""
    if how == "exit":
        with pytest.raises(RankFailure, match=re.compile("^--- rank 1: died$")):
            ranks.run(_breaks, tmp_path, direction, how, world_size=2, timeout_s=60)
    else:
        ranks.run(_breaks, tmp_path, direction, how, world_size=2, timeout_s=60)
    found = {file.name: float(file.read_text()) for file in tmp_path.iterdir()}
    assert found.keys() == ({"0"} if how == "exit" else {"0", "1"})
    assert max(found.values()) < 20


def _closes_late() -> None:
    group = dist.group.WORLD
    assert group is not None
    dist.destroy_process_group()
    close_connections(group)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool ends what there is


def test_closing_after_torch_distributed_has_ended_raises_nothing(ranks: RankPool) -> None:
    ranks.run(_closes_late, world_size=1, timeout_s=60)

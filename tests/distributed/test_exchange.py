"""Loads in which replicas share their reads, so that each byte is read once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_nvcomp import CheckpointManager, load, save
from dcp_nvcomp.calls.peers import Peers
from dcp_nvcomp.loading.sharing import exchange, worth
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.states import State, assert_same, blank

from .launch import RankPool
from .replicas import SMALL_READS, Reads, full_state, loaded, local, nbytes, placed, reader_at


def _loads(path: Path, kind: str, policy: str) -> tuple[int, int, int]:
    save(placed(full_state(), kind), path)
    return *loaded(path, kind, policy), threading.active_count()


@pytest.mark.parametrize(("kind", "world", "copies"), [("ddp", 2, 2), ("ddp", 4, 4), ("hsdp", 4, 2)])
def test_each_byte_is_read_once(ranks: RankPool, tmp_path: Path, kind: str, world: int, copies: int) -> None:
    found = ranks.run(_loads, tmp_path / "c", kind, "always", world_size=world)
    stored = nbytes(tmp_path / "c")
    fetched = [one for one, _, _ in found]
    assert stored * 0.98 < sum(fetched) <= stored
    assert max(fetched) - min(fetched) <= 3 << 20
    assert sum(received for _, received, _ in found) == pytest.approx((copies - 1) * stored, rel=0.02)


def test_what_is_not_sharded_is_read_once_by_ranks_with_shards_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_loads, tmp_path / "c", "mixed", "always", world_size=4)
    stored = nbytes(tmp_path / "c")
    assert stored * 0.98 < sum(fetched for fetched, _, _ in found) <= stored * 1.02
    assert min(received for _, received, _ in found) > 6 << 20


def test_each_rank_reads_all_where_that_is_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    for fetched, received, _ in ranks.run(_loads, tmp_path / "c", "ddp", "never", world_size=2):
        assert received == 0 and fetched > nbytes(tmp_path / "c") * 0.98


def _differ(path: Path) -> tuple[int, int]:
    save(full_state(), path)
    return loaded(path, "ddp", "always" if dist.get_rank() else "never")


def test_ranks_that_differ_read_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert [received for _, received in ranks.run(_differ, tmp_path, world_size=2)] == [0, 0]


def _in_a_part_of_the_world(path: Path) -> tuple[int, int] | None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    place = path / str(dist.get_rank() % 2)
    save(full_state(), place, process_group=own)
    return loaded(place, "ddp", process_group=own)


def test_groups_of_some_ranks_exchange_among_themselves(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_in_a_part_of_the_world, tmp_path, world_size=4)
    for first, second in ((0, 2), (1, 3)):
        stored = nbytes(tmp_path / str(first))
        assert stored * 0.98 < found[first][0] + found[second][0] <= stored


def _in_another_order(path: Path) -> tuple[int, int]:
    full = full_state()
    own = f"loader.{dist.get_rank()}"
    save({"model": full, own: "of this rank alone"}, path)
    keys = sorted(full, reverse=dist.get_rank() == 1)
    into, reader = {"model": {key: blank(full)[key] for key in keys}, own: ""}, reader_at(path)
    load(into, storage_reader=reader, exchange="always")
    assert_same(into, {"model": {key: full[key] for key in keys}, own: "of this rank alone"})
    assert reader.last_load is not None
    return reader.last_load.fetched_nbytes, reader.last_load.received_nbytes


def test_states_in_another_order_and_with_objects_of_their_own_share(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_in_another_order, tmp_path, world_size=2)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert sum(fetched for fetched, _ in found) <= nbytes(tmp_path) and min(found)[1] > 6 << 20


# --- auto ------------------------------------------------------------------------------------------------------------


def _slowly(path: Path, rate: float | None, policy: str) -> tuple[float, int]:
    """Load while each rank reads at a rate; return how long it took, and what came from others."""
    if dist.get_rank() == 0:
        save(full_state(), path, no_dist=True)
    dist.barrier()
    read, lock = PosixFilesystem.read_into, threading.Lock()

    def slow(filesystem: Any, name: str, start: int, buffer: memoryview) -> None:
        if rate is not None:
            with lock:
                time.sleep(len(buffer) / rate)
        read(filesystem, name, start, buffer)

    with patch.object(PosixFilesystem, "read_into", slow):
        began = time.perf_counter()
        _, received = loaded(path, "ddp", policy)
        return time.perf_counter() - began, received


def test_slow_storage_is_shared_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_slowly, tmp_path, 20e6, "auto", world_size=2)
    assert all(received > 6 << 20 for _, received in found), found


def _with_slow_messages(path: Path) -> int:
    tell = Peers.all_tell

    def slow(peers: Peers, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.nbytes >= 1 << 20:
            time.sleep(1)
        return tell(peers, tensor)

    with patch.object(Peers, "all_tell", slow):
        return _slowly(path, None, "auto")[1]


def test_storage_that_is_faster_than_messages_is_not(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_with_slow_messages, tmp_path, world_size=2) == [0, 0]


def test_few_reads_are_not_worth_it() -> None:
    assert worth.first_reads(15, 2) is None
    assert worth.first_reads(16, 2) == 2
    assert worth.first_reads(1000, 16) == 16


# --- two lists of reads ----------------------------------------------------------------------------------------------


def _wants_more_on_one(path: Path, policy: str) -> tuple[int, int]:
    """HSDP, where the first rank alone has a tensor that is not sharded."""
    own = {"own": torch.ones(512, 512)}
    save({**placed(full_state(), "hsdp"), **own}, path)
    mine = own if dist.get_rank() == 0 else {}
    into, reader = {**placed(blank(full_state()), "hsdp"), **blank(mine)}, reader_at(path)
    load(into, storage_reader=reader, exchange=policy)  # type: ignore[arg-type]
    assert_same(local(into), local({**placed(full_state(), "hsdp"), **mine}))
    assert reader.last_load is not None
    return reader.last_load.fetched_nbytes, reader.last_load.received_nbytes


@pytest.mark.parametrize("policy", ["always", "auto"])
def test_a_rank_that_wants_more_than_its_replica(ranks: RankPool, tmp_path: Path, policy: str) -> None:
    found = ranks.run(_wants_more_on_one, tmp_path, policy, world_size=4, timeout_s=60)
    assert policy == "auto" or min(received for _, received in found) > 2 << 20


def _small(ranks: int) -> State:
    mesh = init_device_mesh("cpu", (ranks,))
    full = {f"s{number}": torch.full((8, 4), float(number)) for number in range(20)}
    shards = {key: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for key, value in full.items()}
    return {**shards, **{f"step{number}": torch.tensor(float(number)) for number in range(20)}}


def _small_ones_together(path: Path, policy: str) -> bool:
    """Small shards and whole tensors lie in one block, which is then read for both."""
    world = dist.get_world_size()
    save(_small(world), path)
    names = [*_small(world)] if dist.get_rank() < world - 1 else [f"step{number}" for number in range(20)]
    into: State = {
        name: torch.zeros(8, 4) if name.startswith("s") and not name.startswith("step") else torch.tensor(-1.0)
        for name in names
    }
    load(into, storage_reader=reader_at(path), exchange=policy)  # type: ignore[arg-type]
    return all(bool((value == float(name.strip("step"))).all()) for name, value in into.items())


@pytest.mark.parametrize("policy", ["always", "auto"])
def test_blocks_that_two_lists_want(ranks: RankPool, tmp_path: Path, policy: str) -> None:
    assert ranks.run(_small_ones_together, tmp_path, policy, world_size=4, timeout_s=60) == [True] * 4


def _longer_than_the_limit(path: Path) -> bool:
    group = dist.new_group(timeout=timedelta(seconds=3))
    save(placed(full_state(), "mixed"), path)
    read = PosixFilesystem.read_into

    def slow(filesystem: Any, name: str, start: int, buffer: memoryview) -> None:
        time.sleep(len(buffer) / 1e6 if len(buffer) > 1 << 19 else 0)
        read(filesystem, name, start, buffer)

    with patch.object(PosixFilesystem, "read_into", slow):
        loaded(path, "mixed", process_group=group)
    return True


def test_a_load_may_take_longer_than_ranks_wait(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_longer_than_the_limit, tmp_path, world_size=3, timeout_s=120) == [True] * 3


# --- runs ------------------------------------------------------------------------------------------------------------


def _run_restores(path: Path) -> int:
    with CheckpointManager(str(path), every=1, **SMALL_READS) as manager:  # type: ignore[arg-type]
        manager.save(1, full_state())
        manager.wait()
    into, reads = blank(full_state()), Reads(lambda at: False)
    again = CheckpointManager(str(path), every=1, **SMALL_READS)  # type: ignore[arg-type]
    with patch.object(worth, "_GAIN", 1e9), reads.patched, again as manager:  # whatever it takes
        manager.restore(into)
    assert_same(into, full_state())
    return reads.count


def test_restores_of_runs_share_their_reads(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(_run_restores, tmp_path / "one", world_size=1)[0]
    both = ranks.run(_run_restores, tmp_path / "two", world_size=2)
    assert max(both) < 0.8 * alone, (alone, both)


def test_shares_are_even() -> None:
    class _Read:
        def __init__(self, nbytes: int) -> None:
            self.start, self.stop = 0, nbytes

    makers = exchange.shares([_Read(nbytes) for nbytes in (5, 1, 1, 1, 2, 4)], 2)  # type: ignore[misc]
    assert makers == [0, 1, 1, 1, 1, 0]

"""Loads in which replicas share their reads: each byte is read once; where one fails, all do, or values are right."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.futures import Future

from dcp_nvcomp import CheckpointManager, NvcompReader, errors, load, save
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.loading.sharing import exchange, worth
from dcp_nvcomp.loading.sharing.peers import Peers
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.conformance.sabotage import LOAD_STEPS, FailingLoadPlanner, Sabotage
from tests.states import State, assert_same, blank

from .jobs import assert_alive
from .launch import RankFailure, RankPool, logged

# 1 MiB is the least that a read takes
SMALL_READS = {"host_memory_budget": 1 << 20, "thread_count": 2}
NBYTES = 24 << 20


def _full() -> State:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"w{number}": torch.randn(1024, 1024, generator=generator) for number in range(4)}
    return {**tensors, "half": torch.randn(2048, 2048, generator=generator).bfloat16(), "step": 7}


def _placed(full: State, kind: str) -> State:
    """Return a state as jobs have it: copies on all ranks, HSDP with two replicas, or partly sharded."""
    world = dist.get_world_size()
    if kind == "ddp":
        return full
    mesh = init_device_mesh("cpu", (2, world // 2)) if kind == "hsdp" else init_device_mesh("cpu", (1, world))
    kept = ("w0", "w1", "w2") if kind == "mixed" else ()
    return {
        key: distribute_tensor(value, mesh, [Replicate(), Replicate() if key in kept else Shard(0)], src_data_rank=None)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in full.items()
    }


def _local(state: State) -> State:
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}


def _reader(path: Path) -> NvcompReader:
    return NvcompReader(path, **SMALL_READS)  # type: ignore[arg-type]


def _loaded(path: Path, kind: str, policy: str = "always", reader: NvcompReader | None = None, **options: Any) -> Any:
    """Load on this rank, compare, and return what was read and received."""
    reader = reader or _reader(path)
    into = _placed(blank(_full()), kind)
    load(into, storage_reader=reader, exchange=policy, **options)  # type: ignore[arg-type]
    assert_same(_local(into), _local(_placed(_full(), kind)))
    assert reader.last_load is not None
    return reader.last_load.fetched_nbytes, reader.last_load.received_nbytes


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def _loads(path: Path, kind: str, policy: str) -> tuple[int, int, int]:
    save(_placed(_full(), kind), path)
    return *_loaded(path, kind, policy), threading.active_count()


@pytest.mark.parametrize(("kind", "world", "copies"), [("ddp", 2, 2), ("ddp", 4, 4), ("hsdp", 4, 2)])
def test_each_byte_is_read_once(ranks: RankPool, tmp_path: Path, kind: str, world: int, copies: int) -> None:
    found = ranks.run(_loads, tmp_path / "c", kind, "always", world_size=world)
    stored = _nbytes(tmp_path / "c")
    fetched = [one for one, _, _ in found]
    assert stored * 0.98 < sum(fetched) <= stored
    assert max(fetched) - min(fetched) <= 3 << 20
    assert sum(received for _, received, _ in found) == pytest.approx((copies - 1) * stored, rel=0.02)


def test_what_is_not_sharded_is_read_once_by_ranks_with_shards_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_loads, tmp_path / "c", "mixed", "always", world_size=4)
    stored = _nbytes(tmp_path / "c")
    assert stored * 0.98 < sum(fetched for fetched, _, _ in found) <= stored * 1.02
    assert min(received for _, received, _ in found) > 6 << 20


def test_each_rank_reads_all_where_that_is_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    for fetched, received, _ in ranks.run(_loads, tmp_path / "c", "ddp", "never", world_size=2):
        assert received == 0 and fetched > _nbytes(tmp_path / "c") * 0.98


def _differ(path: Path) -> tuple[int, int]:
    save(_full(), path)
    return _loaded(path, "ddp", "always" if dist.get_rank() else "never")


def test_ranks_that_differ_read_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert [received for _, received in ranks.run(_differ, tmp_path, world_size=2)] == [0, 0]


def _in_a_part_of_the_world(path: Path) -> tuple[int, int] | None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[dist.get_rank() % 2]
    place = path / str(dist.get_rank() % 2)
    save(_full(), place, process_group=own)
    return _loaded(place, "ddp", process_group=own)


def test_groups_of_some_ranks_exchange_among_themselves(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_in_a_part_of_the_world, tmp_path, world_size=4)
    for first, second in ((0, 2), (1, 3)):
        stored = _nbytes(tmp_path / str(first))
        assert stored * 0.98 < found[first][0] + found[second][0] <= stored


def _in_another_order(path: Path) -> tuple[int, int]:
    full = _full()
    own = f"loader.{dist.get_rank()}"
    save({"model": full, own: "of this rank alone"}, path)
    keys = sorted(full, reverse=dist.get_rank() == 1)
    into, reader = {"model": {key: blank(full)[key] for key in keys}, own: ""}, _reader(path)
    load(into, storage_reader=reader, exchange="always")
    assert_same(into, {"model": {key: full[key] for key in keys}, own: "of this rank alone"})
    assert reader.last_load is not None
    return reader.last_load.fetched_nbytes, reader.last_load.received_nbytes


def test_states_in_another_order_and_with_objects_of_their_own_share(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_in_another_order, tmp_path, world_size=2)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert sum(fetched for fetched, _ in found) <= _nbytes(tmp_path) and min(found)[1] > 6 << 20


# --- auto ------------------------------------------------------------------------------------------------------------


def _slowly(path: Path, rate: float | None, policy: str) -> tuple[float, int]:
    """Load while each rank reads at a rate; return how long it took, and what came from others."""
    if dist.get_rank() == 0:
        save(_full(), path, no_dist=True)
    dist.barrier()
    read, lock = PosixFilesystem.read_into, threading.Lock()

    def slow(filesystem: Any, name: str, start: int, buffer: memoryview) -> None:
        if rate is not None:
            with lock:
                time.sleep(len(buffer) / rate)
        read(filesystem, name, start, buffer)

    with patch.object(PosixFilesystem, "read_into", slow):
        began = time.perf_counter()
        _, received = _loaded(path, "ddp", policy)
        return time.perf_counter() - began, received


def test_slow_storage_is_shared_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_slowly, tmp_path, 20e6, "auto", world_size=2)
    assert all(received > 6 << 20 for _, received in found), found


def test_fast_storage_is_not(ranks: RankPool, tmp_path: Path) -> None:
    assert [received for _, received in ranks.run(_slowly, tmp_path, None, "auto", world_size=2)] == [0, 0]


def test_few_reads_are_not_worth_it() -> None:
    assert worth.first_reads(15, 2) is None
    assert worth.first_reads(16, 2) == 2
    assert worth.first_reads(1000, 16) == 16


# --- failures --------------------------------------------------------------------------------------------------------


class _Reads:
    """Counts the reads of a rank, and fails some."""

    def __init__(self, fails: Callable[[int], bool], *, how: str = "raise") -> None:
        self.count, lock, read = 0, threading.Lock(), PosixFilesystem.read_into

        def read_into(filesystem: Any, name: str, start: int, buffer: memoryview) -> None:
            if not name.endswith(".distcp") or len(buffer) < 1 << 19:  # footers are no part of this
                read(filesystem, name, start, buffer)
                return
            with lock:
                self.count += 1
                number = self.count
            if fails(number):
                if how == "exit":
                    os._exit(9)
                if how == "raise":
                    raise errors.StorageError("The disk is gone.", path=name)
            read(filesystem, name, start, buffer)
            if fails(number):
                buffer[len(buffer) // 2] ^= 0xFF

        self.patched = patch.object(PosixFilesystem, "read_into", read_into)


WAYS = [("always", 2), ("auto", 2), ("auto", 8)]  # 2 threads measure 2 reads, so of 8 some wait for what these show
each_way = pytest.mark.parametrize(("policy", "threads"), WAYS)


def _reader_of(path: Path, threads: int) -> NvcompReader:
    return NvcompReader(path, host_memory_budget=threads << 20, thread_count=threads)


def _save_on_one(path: Path) -> None:
    if dist.get_rank() == 0:
        save(_full(), path, no_dist=True)
    dist.barrier()


def _still_works(path: Path) -> None:
    """Nothing of the load before is left in the group."""
    assert_alive()
    assert _loaded(path, "ddp")[1] > 0
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp-")]


def _fails_to_read(path: Path, who: list[int], number: int | None, how: str, policy: str, threads: int) -> Any:
    _save_on_one(path)
    is_one = dist.get_rank() in who
    reads = _Reads(lambda at: is_one and number in (None, at), how=how)
    with patch.object(worth, "_GAIN", 1e9), logged(logging.WARNING) as lines, reads.patched:
        try:
            fetched, received = _loaded(path, "ddp", policy, _reader_of(path, threads))
        except errors.StorageError as error:
            fetched, received, lines = 0, 0, [str(error)]
    _still_works(path)
    return fetched, received, lines


@each_way
@pytest.mark.parametrize(("number", "how"), [(None, "raise"), (1, "raise"), (5, "raise"), (1, "flip"), (5, "flip")])
@pytest.mark.parametrize("who", [[0], [1, 2]])
def test_others_read_for_a_rank_that_can_not(
    ranks: RankPool, tmp_path: Path, who: list[int], number: int | None, how: str, policy: str, threads: int
) -> None:
    found = ranks.run(_fails_to_read, tmp_path, who, number, how, policy, threads, world_size=3, timeout_s=60)
    is_measured = policy == "auto" and number in (None, 1)
    for rank in range(3):
        fetched, received, lines = found[rank]
        if is_measured and how == "raise":  # what each rank reads for itself fails as ever
            assert any("The disk is gone." in line for line in lines)
            continue
        assert fetched + received >= NBYTES * 0.7
        if rank in who and policy == "always":
            assert (how == "raise") == any("Other ranks read for this one" in line for line in lines)


def _all_fail(path: Path, policy: str, threads: int) -> str:
    _save_on_one(path)
    fails = _Reads(lambda at: at > 3)
    with patch.object(worth, "_GAIN", 1e9), fails.patched, pytest.raises(errors.StorageError) as raised:
        _loaded(path, "ddp", policy, _reader_of(path, threads))
    _still_works(path)
    return str(raised.value)


@each_way
def test_what_no_rank_can_read_fails_on_all(ranks: RankPool, tmp_path: Path, policy: str, threads: int) -> None:
    for said in ranks.run(_all_fail, tmp_path, policy, threads, world_size=3, timeout_s=60):
        assert "The disk is gone." in said


def _planner_fails(path: Path, step: str, policy: str, threads: int) -> str:
    _save_on_one(path)
    planner = FailingLoadPlanner(step, rank=1, survivors=1)
    with patch.object(worth, "_GAIN", 1e9), pytest.raises((Sabotage, errors.CheckpointError)) as raised:
        _loaded(path, "ddp", policy, _reader_of(path, threads), planner=planner)
    _still_works(path)
    return repr(raised.value)


@each_way
@pytest.mark.parametrize("step", [step for step in LOAD_STEPS if step != "create_global_plan"])
def test_a_planner_that_fails_on_one_rank_fails_the_load_on_all(
    ranks: RankPool, tmp_path: Path, step: str, policy: str, threads: int
) -> None:
    for said in ranks.run(_planner_fails, tmp_path, step, policy, threads, world_size=3, timeout_s=60):
        assert step in said


class _EmptyItems(DefaultLoadPlanner):
    """Plans an item without elements, and on one rank has no tensor for it."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        one = next(item for item in plan.items if item.storage_index.fqn == "w0")
        return LoadPlan([*plan.items, dataclasses.replace(one, lengths=torch.Size([0, 1024]))])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if 0 not in read_item.lengths:
            return super().resolve_tensor(read_item)
        if dist.get_rank() == 1:
            raise Sabotage("empty")
        return torch.empty(0, 1024)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class _Unready(NvcompReader):
    """Fails on one rank, or does without reading there."""

    how = ""

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        if dist.get_rank() == 1 and self.how == "raises":
            raise Sabotage("read_data")
        if dist.get_rank() == 1 and self.how == "returns":
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return super().read_data(plan, planner)


def _is_not_ready(path: Path, how: str) -> str:
    _save_on_one(path)
    said = "right"
    if how == "empty":
        try:
            _loaded(path, "ddp", planner=_EmptyItems())
        except errors.RankFailedError as error:
            said = str(error)
    elif how == "threads":
        start = WorkerGroup.start

        def no_more(group: WorkerGroup, name: str, *arguments: Any) -> None:
            if dist.get_rank() == 1 and name.startswith("dcp-replace"):
                raise RuntimeError("can't start new thread")
            start(group, name, *arguments)

        with patch.object(WorkerGroup, "start", no_more), pytest.raises(errors.CheckpointError) as raised:
            _loaded(path, "ddp")
        return str(raised.value)  # the connections are closed
    else:
        reader = _Unready(path, **SMALL_READS)  # type: ignore[arg-type]
        reader.how = how
        try:
            load(blank(_full()), storage_reader=reader, exchange="always")
        except errors.RankFailedError as error:
            said = str(error)
    _still_works(path)
    return said


@pytest.mark.parametrize(
    ("how", "expected"),
    [("raises", "read_data"), ("returns", "right"), ("empty", "empty"), ("threads", "rank|thread")],
)
def test_a_rank_that_is_not_ready_is_not_waited_for(ranks: RankPool, tmp_path: Path, how: str, expected: str) -> None:
    for said in ranks.run(_is_not_ready, tmp_path, how, world_size=3, timeout_s=60):
        assert re.search(expected, said), said


def _damaged(path: Path, policy: str, threads: int) -> tuple[str, int]:
    sent, send = [0], Peers.send

    def counted(peers: Peers, data: torch.Tensor, to: int, tag: int) -> Any:
        sent[0] += data.nbytes
        return send(peers, data, to, tag)

    with (
        patch.object(worth, "_GAIN", 1e9),
        patch.object(Peers, "send", counted),
        pytest.raises(errors.CorruptDataError) as raised,
    ):
        _loaded(path, "ddp", policy, _reader_of(path, threads))
    assert_alive()
    return str(raised.value), sent[0]


@each_way
@pytest.mark.parametrize("part", [0.001, 0.5])
def test_damage_is_found_by_all_at_once(
    ranks: RankPool, tmp_path: Path, part: float, policy: str, threads: int
) -> None:
    save(_full(), tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[int(len(data) * part) + 20_000] ^= 4
    file.write_bytes(data)
    for said, sent_nbytes in ranks.run(_damaged, tmp_path, policy, threads, world_size=3, timeout_s=60):
        assert file.name in said
        if part < 0.5:
            assert sent_nbytes < 0.9 * len(data), "what no rank will use is not sent"


def _dies(path: Path, outcome: Path, at: int, policy: str) -> None:
    reads = _Reads(lambda number: dist.get_rank() == 1 and number == at, how="exit")
    began = time.monotonic()
    try:
        with patch.object(worth, "_GAIN", 1e9), reads.patched:
            _loaded(path, "ddp", policy)
    except errors.CheckpointError as error:
        (outcome / str(dist.get_rank())).write_text(f"{time.monotonic() - began:.1f} {type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("policy", ["always", "auto"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_rank_that_dies_ends_the_load_on_the_others_at_once(
    ranks: RankPool, tmp_path: Path, at: int, policy: str
) -> None:
    place, outcome = tmp_path / "c", tmp_path / "outcome"
    outcome.mkdir()
    save(_full(), place)
    with pytest.raises(RankFailure):
        ranks.run(_dies, place, outcome, at, policy, world_size=3, timeout_s=60)
    said = {file.name: file.read_text() for file in outcome.iterdir()}
    assert said.keys() == {"0", "2"}
    for text in said.values():
        seconds, _, words = text.partition(" ")
        assert float(seconds) < 30 and "rank" in words, text


def _connection_breaks(path: Path, kind: str) -> str:
    save(_placed(_full(), kind), path)
    send, count = Peers.send, [0]

    def breaking(peers: Peers, data: torch.Tensor, to: int, tag: int) -> Any:
        count[0] += 1
        if dist.get_rank() == 1 and count[0] == 3:
            raise RuntimeError("connection reset by peer")
        return send(peers, data, to, tag)

    with patch.object(Peers, "send", breaking), pytest.raises(errors.CheckpointError) as raised:
        _loaded(path, kind)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_a_connection_that_breaks_ends_the_load_on_all(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    began = time.monotonic()
    for said in ranks.run(_connection_breaks, tmp_path, kind, world_size=4, timeout_s=60):
        assert re.search("rank|connection", said)
    assert time.monotonic() - began < 50


# --- two lists of reads ----------------------------------------------------------------------------------------------


def _wants_more_on_one(path: Path, policy: str) -> tuple[int, int]:
    """HSDP, where the first rank alone has a tensor that is not sharded."""
    own = {"own": torch.ones(512, 512)}
    save({**_placed(_full(), "hsdp"), **own}, path)
    mine = own if dist.get_rank() == 0 else {}
    into, reader = {**_placed(blank(_full()), "hsdp"), **blank(mine)}, _reader(path)
    load(into, storage_reader=reader, exchange=policy)  # type: ignore[arg-type]
    assert_same(_local(into), _local({**_placed(_full(), "hsdp"), **mine}))
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
    load(into, storage_reader=_reader(path), exchange=policy)  # type: ignore[arg-type]
    return all(bool((value == float(name.strip("step"))).all()) for name, value in into.items())


@pytest.mark.parametrize("policy", ["always", "auto"])
def test_blocks_that_two_lists_want(ranks: RankPool, tmp_path: Path, policy: str) -> None:
    assert ranks.run(_small_ones_together, tmp_path, policy, world_size=4, timeout_s=60) == [True] * 4


def _longer_than_the_limit(path: Path) -> bool:
    group = dist.new_group(timeout=timedelta(seconds=3))
    save(_placed(_full(), "mixed"), path)
    read = PosixFilesystem.read_into

    def slow(filesystem: Any, name: str, start: int, buffer: memoryview) -> None:
        time.sleep(len(buffer) / 2e6 if len(buffer) > 1 << 19 else 0)
        read(filesystem, name, start, buffer)

    with patch.object(PosixFilesystem, "read_into", slow):
        _loaded(path, "mixed", process_group=group)
    return True


def test_a_load_may_take_longer_than_ranks_wait(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_longer_than_the_limit, tmp_path, world_size=3, timeout_s=120) == [True] * 3


# --- runs ------------------------------------------------------------------------------------------------------------


def _run_restores(path: Path) -> int:
    with CheckpointManager(str(path), every=1, **SMALL_READS) as manager:  # type: ignore[arg-type]
        manager.save(1, _full())
        manager.wait()
    into, reads = blank(_full()), _Reads(lambda at: False)
    again = CheckpointManager(str(path), every=1, **SMALL_READS)  # type: ignore[arg-type]
    with patch.object(worth, "_GAIN", 1e9), reads.patched, again as manager:  # whatever it takes
        manager.restore(into)
    assert_same(into, _full())
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

"""Loads in which replicas share their reads, and something fails: all fail, or values are right; no rank hangs."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.futures import Future

from dcp_nvcomp import NvcompReader, errors, load, save
from dcp_nvcomp.calls.peers import Peers
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.loading.sharing import worth
from tests.conformance.sabotage import LOAD_STEPS, FailingLoadPlanner, Sabotage
from tests.states import blank

from .jobs import assert_alive
from .launch import RankFailure, RankPool, logged
from .replicas import NBYTES, SMALL_READS, Reads, full_state, loaded, placed, reader_of, save_on_one, still_works

in_ci = pytest.mark.ci
WAYS = [
    ("always", 2),
    pytest.param("auto", 2, marks=in_ci),
    ("auto", 8),
]  # of 8 threads some wait for the 2 that measure
each_way = pytest.mark.parametrize(("policy", "threads"), WAYS)


def _fails_to_read(path: Path, who: list[int], number: int | None, how: str, policy: str, threads: int) -> Any:
    save_on_one(path)
    is_one = dist.get_rank() in who
    reads = Reads(lambda at: is_one and number in (None, at), how=how)
    with patch.object(worth, "_GAIN", 1e9), logged(logging.WARNING) as lines, reads.patched:
        try:
            fetched, received = loaded(path, "ddp", policy, reader_of(path, threads))
        except errors.StorageError as error:
            fetched, received, lines = 0, 0, [str(error)]
    still_works(path)
    return fetched, received, lines


@each_way
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (None, "raise"),
        (5, "raise"),
        pytest.param(5, "flip", marks=in_ci),
        pytest.param(1, "raise", marks=in_ci),
        pytest.param(1, "flip", marks=in_ci),
    ],
)
@pytest.mark.parametrize("who", [[0], pytest.param([1, 2], marks=in_ci)])
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
    save_on_one(path)
    fails = Reads(lambda at: at > 3)
    with patch.object(worth, "_GAIN", 1e9), fails.patched, pytest.raises(errors.StorageError) as raised:
        loaded(path, "ddp", policy, reader_of(path, threads))
    still_works(path)
    return str(raised.value)


@each_way
def test_what_no_rank_can_read_fails_on_all(ranks: RankPool, tmp_path: Path, policy: str, threads: int) -> None:
    for said in ranks.run(_all_fail, tmp_path, policy, threads, world_size=3, timeout_s=60):
        assert "The disk is gone." in said


def _planner_fails(path: Path, step: str, policy: str, threads: int) -> str:
    save_on_one(path)
    planner = FailingLoadPlanner(step, rank=1, survivors=1)
    with patch.object(worth, "_GAIN", 1e9), pytest.raises((Sabotage, errors.CheckpointError)) as raised:
        loaded(path, "ddp", policy, reader_of(path, threads), planner=planner)
    still_works(path)
    return repr(raised.value)


@each_way
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in ("finish_plan", "commit_tensor") else in_ci)
        for step in LOAD_STEPS
        if step != "create_global_plan"
    ],
)
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
    save_on_one(path)
    said = "right"
    if how == "empty":
        try:
            loaded(path, "ddp", planner=_EmptyItems())
        except errors.RankFailedError as error:
            said = str(error)
    elif how == "threads":
        start = WorkerGroup.start

        def no_more(group: WorkerGroup, name: str, *arguments: Any) -> None:
            if dist.get_rank() == 1 and name.startswith("dcp-replace"):
                raise RuntimeError("can't start new thread")
            start(group, name, *arguments)

        with patch.object(WorkerGroup, "start", no_more), pytest.raises(errors.CheckpointError) as raised:
            loaded(path, "ddp")
        return str(raised.value)  # the connections are closed
    else:
        reader = _Unready(path, **SMALL_READS)  # type: ignore[arg-type]
        reader.how = how
        try:
            load(blank(full_state()), storage_reader=reader, exchange="always")
        except errors.RankFailedError as error:
            said = str(error)
    still_works(path)
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
        loaded(path, "ddp", policy, reader_of(path, threads))
    assert_alive()
    return str(raised.value), sent[0]


@each_way
@pytest.mark.parametrize("part", [0.001, pytest.param(0.5, marks=in_ci)])
def test_damage_is_found_by_all_at_once(
    ranks: RankPool, tmp_path: Path, part: float, policy: str, threads: int
) -> None:
    save(full_state(), tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[int(len(data) * part) + 20_000] ^= 4
    file.write_bytes(data)
    for said, sent_nbytes in ranks.run(_damaged, tmp_path, policy, threads, world_size=3, timeout_s=60):
        assert file.name in said
        if part < 0.5:
            assert sent_nbytes < 0.9 * len(data), "what no rank will use is not sent"


def _dies(path: Path, outcome: Path, at: int, policy: str) -> None:
    reads = Reads(lambda number: dist.get_rank() == 1 and number == at, how="exit")
    began = time.monotonic()
    try:
        with patch.object(worth, "_GAIN", 1e9), reads.patched:
            loaded(path, "ddp", policy)
    except errors.CheckpointError as error:
        (outcome / str(dist.get_rank())).write_text(f"{time.monotonic() - began:.1f} {type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("at", "policy"),
    [
        pytest.param(1, "always", marks=in_ci),
        pytest.param(1, "auto", marks=in_ci),
        pytest.param(4, "always", marks=pytest.mark.slow),
        pytest.param(4, "auto", marks=in_ci),
    ],
)
def test_a_rank_that_dies_ends_the_load_on_the_others_at_once(
    ranks: RankPool, tmp_path: Path, at: int, policy: str
) -> None:
    place, outcome = tmp_path / "c", tmp_path / "outcome"
    outcome.mkdir()
    save(full_state(), place)
    with pytest.raises(RankFailure):
        ranks.run(_dies, place, outcome, at, policy, world_size=3, timeout_s=60)
    said = {file.name: file.read_text() for file in outcome.iterdir()}
    assert said.keys() == {"0", "2"}
    for text in said.values():
        seconds, _, words = text.partition(" ")
        assert float(seconds) < 30 and "rank" in words, text


def _connection_breaks(path: Path, kind: str) -> str:
    save(placed(full_state(), kind), path)
    send, count = Peers.send, [0]

    def breaking(peers: Peers, data: torch.Tensor, to: int, tag: int) -> Any:
        count[0] += 1
        if dist.get_rank() == 1 and count[0] == 3:
            raise RuntimeError("connection reset by peer")
        return send(peers, data, to, tag)

    with patch.object(Peers, "send", breaking), pytest.raises(errors.CheckpointError) as raised:
        loaded(path, kind)
    return str(raised.value)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=in_ci), pytest.param("hsdp", marks=pytest.mark.slow)])
def test_a_connection_that_breaks_ends_the_load_on_all(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    began = time.monotonic()
    for said in ranks.run(_connection_breaks, tmp_path, kind, world_size=4, timeout_s=60):
        assert re.search("rank|connection", said)
    assert time.monotonic() - began < 50

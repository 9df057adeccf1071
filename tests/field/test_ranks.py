"""Ranks that do not all call, or call different things, and process groups that are made again.

Each case runs over a process group of its own, with a short time limit: within that, and a few seconds, each rank that
did call has an error of ours that names the ranks that did not, or what differs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_nvcomp import CheckpointManager, NvcompWriter, async_save, load, save
from dcp_nvcomp.calls.ranks import Arrival, Call
from dcp_nvcomp.errors import ConfigurationError, RankFailedError, RanksDifferError
from tests.distributed.launch import RankPool
from tests.states import State

PATIENCE_SECONDS = 10.0


def _state() -> State:
    return {"w": torch.ones(3)}


@dataclass(frozen=True)
class Here:
    """Where a case runs."""

    group: dist.ProcessGroup  # its process group
    number: int  # this rank in the group
    place: Path  # a directory of the case; `saved` beside it is a checkpoint

    def save(self, name: str = "a", **options: object) -> None:
        save(_state(), self.place / name, process_group=self.group, **options)  # type: ignore[arg-type]

    def load(self) -> None:
        load(_state(), self.place.parent / "saved", process_group=self.group)

    def async_save(self, name: str = "a", **options: object) -> None:
        saving = async_save(_state(), self.place / name, process_group=self.group, **options)  # type: ignore[arg-type]
        saving.upload_completion.result(60)

    def async_saves(self, *names: str) -> None:
        for name in names:
            self.async_save(name)

    def manager(self, name: str = "run", **options: object) -> CheckpointManager:
        options = {"every": 1, "preemption_signals": (), **options}
        return CheckpointManager(self.place / name, process_group=self.group, **options)  # type: ignore[arg-type]

    def saves(self, step: int = 2) -> None:
        with self.manager() as manager:
            manager.save(1, _state())
            if step:
                manager.save(step, _state())

    def saves_one_and_alone(self) -> None:
        with self.manager() as manager:
            manager.save(1, _state())
            self.save()

    def restores(self, *, really: bool) -> None:
        with self.manager() as manager:
            manager.save(1, _state())
            if really:
                manager.restore(_state())


Does = Callable[[Here], None]
# What a rank does that takes part, what one does that is missing, and what the former calls.
CALLS: dict[str, tuple[Does, Does, str]] = {
    "save": (Here.save, lambda here: None, "save"),
    "load": (Here.load, lambda here: None, "load"),
    "async_save": (Here.async_save, lambda here: None, "async_save"),
    "a second async_save": (lambda here: here.async_saves("a", "b"), Here.async_save, "async_save"),
    "making a manager": (lambda here: here.manager().close(), lambda here: None, "CheckpointManager"),
    "manager.save": (Here.saves, lambda here: here.saves(0), "manager.save"),
    "manager.restore": (
        lambda here: here.restores(really=True),
        lambda here: here.restores(really=False),
        "manager.restore",
    ),
}
MISSING = {"the first": (0,), "the last": (-1,), "two": (0, -1)}


def _ask(here: Here, first: Does, others: Does) -> None:
    (others if here.number else first)(here)


def _with_manager(first: Callable[[CheckpointManager], object], others: Callable[[CheckpointManager], object]) -> Does:
    def does(here: Here) -> None:
        with here.manager() as manager:
            manager.save(1, _state())
            (others if here.number else first)(manager)

    return does


def _asks_twice(manager: CheckpointManager) -> None:
    manager.should_save(11)
    manager.should_save(12)  # a call of `should_save` learns of the one before it


def _differ(**values: tuple[object, object]) -> Does:
    def does(here: Here) -> None:
        options: dict[str, Any] = {name: pair[min(here.number, 1)] for name, pair in values.items()}
        here.manager(**options).close()

    return does


def _flatten(here: Here) -> None:
    here.save(planner=DefaultSavePlanner(flatten_state_dict=here.number > 0))


# What ranks do that all come, and what each of them is told.
MIXED: dict[str, tuple[Does, tuple[str, ...]]] = {
    "save, load": (lambda here: _ask(here, Here.save, Here.load), ("save('", "load('")),
    "load, save": (lambda here: _ask(here, Here.load, Here.save), ("save('", "load('")),
    "save, async_save": (lambda here: _ask(here, Here.save, Here.async_save), ("save('", "async_save('")),
    "async_save, load": (lambda here: _ask(here, Here.async_save, Here.load), ("async_save('", "load('")),
    "save, a manager": (
        lambda here: _ask(here, Here.save, lambda here: here.manager().close()),
        ("save('", "CheckpointManager('"),
    ),
    "paths of save": (lambda here: here.save(str(here.number)), ("path: ", "/0' (rank", "/1' (rank")),
    "paths of async_save": (lambda here: here.async_save(str(here.number)), ("path: ", "/0' (rank", "/1' (rank")),
    "paths of a manager": (lambda here: here.manager(str(here.number)).close(), ("path: ", "/0' (rank", "/1' (rank")),
    "overwrite": (lambda here: here.save(overwrite=here.number > 0), ("overwrite: False (rank", "True (rank")),
    "overwrite of async_save": (lambda here: here.async_save(overwrite=here.number > 0), ("overwrite: False (rank",)),
    "on_difference": (
        lambda here: here.save(on_difference="error" if here.number else "warn"),
        ("on_difference: 'warn' (rank", "'error' (rank"),
    ),
    "flatten_state_dict": (_flatten, ("flatten_state_dict: False (rank", "the usual (rank")),
    "every": (_differ(every=(1, 2)), ("every: 1 (rank", "2 (rank")),
    "asynchronous": (_differ(asynchronous=(True, False)), ("asynchronous: True (rank", "False (rank")),
    "fast": (_differ(fast=(None, "/nowhere/fast")), ("fast: False (rank", "True (rank")),
    "steps": (
        _with_manager(lambda one: one.save(10, _state()), lambda one: one.save(11, _state())),
        ("manager.save", "step: 10 (rank", "11 (rank"),
    ),
    "manager.save, should_save": (
        _with_manager(lambda one: one.save(10, _state()), _asks_twice),
        ("manager.save(10) (rank", "manager.should_save(11) (rank"),
    ),
    "manager.save, restore": (
        _with_manager(lambda one: one.save(10, _state()), lambda one: one.restore(_state())),
        ("manager.save(10) (rank", "manager.restore() (rank"),
    ),
    "manager.wait, restore": (
        _with_manager(lambda one: one.wait(), lambda one: one.restore(_state())),
        ("manager.wait() (rank", "manager.restore() (rank"),
    ),
    "restored steps": (
        _with_manager(lambda one: one.restore(_state(), 1), lambda one: one.restore(_state())),
        ("manager.restore", "step: 1 (rank", "None (rank"),
    ),
    "manager.save, save": (  # over different groups: both wait, and are told what the other called last
        lambda here: _ask(here, Here.saves, Here.saves_one_and_alone),
        ("did not call ", "The last that rank "),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a case on one rank."""

    error: str
    message: str
    seconds: float


def _tried(place: Path, limit_seconds: float, members: tuple[int, ...] | None, case: tuple[str, ...]) -> Outcome | None:
    """Run a case in a fresh process group, and return what became of it on this rank."""
    group = dist.new_group(members and list(members), timeout=timedelta(seconds=limit_seconds))
    if members is not None and dist.get_rank() not in members:
        return None
    number, count = dist.get_rank(group), dist.get_world_size(group)
    is_missing = case[0] == "missing" and number in (one % count for one in MISSING[case[2]])
    if case[0] == "mixed":
        does, _ = MIXED[case[1]]
    else:
        comes, stays_away, _ = CALLS[case[1]]
        does = stays_away if is_missing else comes
    start, error, message = time.monotonic(), "", ""
    try:
        does(Here(group, number, place / "-".join(case).replace(" ", "_")))
    except Exception as raised:
        error, message = type(raised).__name__, str(raised)
    return Outcome(error, message, time.monotonic() - start)


def _run_cases(
    place: Path, limit_seconds: float, members: tuple[int, ...] | None, cases: list[tuple[str, ...]]
) -> list[Outcome | None]:
    if dist.get_rank() == 0:
        save(_state(), place / "saved", no_dist=True)
    dist.barrier()
    outcomes = []
    for case in cases:
        outcomes.append(_tried(place, limit_seconds, members, case))
        dist.barrier()  # a rank that was told at once must not be late for the next case
    return outcomes


def _check(
    ranks: RankPool,
    place: Path,
    limit_seconds: float,
    cases: list[tuple[str, ...]],
    *,
    world_size: int,
    members: tuple[int, ...] | None = None,
) -> None:
    told = ranks.run(_run_cases, place, limit_seconds, members, cases, world_size=world_size, timeout_s=600.0)
    taking_part = members or tuple(range(world_size))
    for number, case in enumerate(cases):
        outcomes = {rank: told[rank][number] for rank in taking_part}
        missing = (
            {taking_part[one % len(taking_part)] for one in MISSING[case[2]]} if case[0] == "missing" else set[int]()
        )
        for rank, outcome in outcomes.items():
            assert outcome.seconds < limit_seconds + PATIENCE_SECONDS, (case, rank, outcome)
            if rank in missing:
                assert not outcome.error, (case, rank, outcome)
                continue
            assert outcome.error == "RanksDifferError", (case, rank, outcome)
            if missing:
                several = "Ranks" if len(missing) > 1 else "Rank"
                expected = [
                    f"{several} {', '.join(map(str, sorted(missing)))} did not call {CALLS[case[1]][2]} within "
                ]
            else:
                expected = list(MIXED[case[1]][1])
            assert all(words in outcome.message for words in expected), (case, rank, outcome)
        if "second" not in case[1]:
            files = (place / "-".join(case).replace(" ", "_")).glob("*/*.distcp")
            assert not list(files), "nothing was written"


QUICK = [
    ("missing", "save", "the first"),
    ("missing", "a second async_save", "the last"),
    ("missing", "manager.save", "the first"),
    *(("mixed", name) for name in MIXED if name != "manager.save, save"),
]
EVERYTHING = [*(("missing", call, who) for call in CALLS for who in MISSING), *(("mixed", name) for name in MIXED)]


@pytest.mark.ci
def test_ranks_that_do_not_call_the_same(ranks: RankPool, tmp_path: Path) -> None:
    _check(ranks, tmp_path, 3.0, QUICK, world_size=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "members"), [(2, None), (4, (0, 2, 3))])
def test_every_way_not_to_call_the_same(
    ranks: RankPool, tmp_path: Path, world_size: int, members: tuple[int, ...] | None
) -> None:
    count = len(members or range(world_size))
    cases = [case for case in EVERYTHING if count > 2 or case[-1] != "two"]
    _check(ranks, tmp_path, 3.0, cases, world_size=world_size, members=members)


def _again(place: Path) -> None:
    """Managers and saves over groups that come and go, beside each other and one after the other."""
    rank = dist.get_rank()
    for number in range(3):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        odd = dist.new_group([1, 2, 3]) if number else dist.new_group([0, 3])
        mine = [(pairs[rank // 2], f"pair-{rank // 2}")]
        if odd != dist.GroupMember.NON_GROUP_MEMBER:
            mine.append((odd, "odd"))  # some ranks are in more groups than others
        for group, name in mine:
            where = place / f"{name}-{number}"
            saving = async_save(_state(), where / "alone", process_group=group)
            with CheckpointManager(where, every=1, process_group=group, preemption_signals=()) as one:
                one.save(1, _state())
                with CheckpointManager(where / "b", every=1, process_group=group, preemption_signals=()) as other:
                    other.save(1, _state())
                    restored = one.restore(_state())
                    assert restored is not None and restored.step == 1
                one.save(2, _state())  # the other one is closed
            saving.upload_completion.result(60)
        for group, _ in mine:
            dist.destroy_process_group(group)
    with CheckpointManager(place / "all", every=1, preemption_signals=()) as manager:
        manager.save(1, _state())


@pytest.mark.ci
def test_groups_that_are_made_again(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_again, tmp_path, timeout_s=100.0)
    assert (tmp_path / "all" / "step-1" / ".metadata").exists()


def _after_its_end(place: Path) -> list[str]:
    """Use a group that was destroyed."""
    group = dist.new_group([0, 1])
    save(_state(), place / "a", process_group=group)
    dist.destroy_process_group(group)
    calls: list[Callable[[], object]] = [
        lambda: save(_state(), place / "a", process_group=group),
        lambda: async_save(_state(), place / "a", process_group=group),
        lambda: load(_state(), place / "a", process_group=group),
        lambda: CheckpointManager(place / "run", process_group=group),
    ]
    told = []
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_a_group_that_is_gone(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(_after_its_end, tmp_path, world_size=2):
        assert all(one.startswith("The process group is gone") for one in told), told


def test_a_group_of_a_world_that_is_gone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, mesh = dist.new_group([0]), dist.init_device_mesh("cpu", (1,))
    with pytest.raises(ConfigurationError, match=r"not a DeviceMesh; a mesh has get_group\(\)"):
        save(_state(), tmp_path, process_group=mesh)  # type: ignore[arg-type]
    dist.destroy_process_group()
    with pytest.raises(ConfigurationError, match="The process group is gone"):
        save(_state(), tmp_path, process_group=group)
    assert not list(tmp_path.iterdir())


def _groups_of_their_own(place: Path) -> None:
    """Groups that their ranks alone make: torch names them by how many a process has (made), which differs here."""
    rank = dist.get_rank()
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group(pair, use_local_synchronization=True) for _ in range(3)]
    for number, group in enumerate(groups):
        lonely = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
        with CheckpointManager(place / f"{pair[0]}-{number}", every=1, process_group=group) as manager:
            manager.save(1, _state())
        for one in lonely:
            dist.destroy_process_group(one)


def test_groups_that_only_their_ranks_make(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_groups_of_their_own, tmp_path, timeout_s=100.0)
    assert len(list(tmp_path.glob("*/step-1/.metadata"))) == 6


def _all_over_again(place: Path, number: int) -> int:
    """Each call has a default group of its own; return how many groups its managers made: one, and two for saves."""
    made, new_group = [], dist.new_group

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(new_group(*arguments, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        for step in range(1, 4):
            with CheckpointManager(place / str(number), every=1, preemption_signals=()) as manager:
                manager.save(step, _state())
    return len(made)


@pytest.mark.ci
def test_managers_use_the_groups_of_those_before(ranks: RankPool, tmp_path: Path) -> None:
    for number in range(2):
        assert ranks.run(_all_over_again, tmp_path, number, world_size=2) == [3, 3]


class _ForGpusOnly:
    """A group as NCCL's are: without a backend for the CPU."""

    _device_types = (torch.device("cuda"),)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __hash__(self) -> int:
        return hash(self._group)

    def __eq__(self, other: object) -> bool:
        return self._group == other


def _wait_in_store(limit_seconds: float) -> str:
    group: Any = _ForGpusOnly(dist.new_group([0, 1], timeout=timedelta(seconds=limit_seconds)))
    for _ in range(3):
        Arrival(group, Call("save")).wait_in_store()
    if dist.get_rank() == 0:
        return ""
    arrival = Arrival(group, Call("load"))
    with pytest.raises(RanksDifferError) as caught, arrival.waiting():
        arrival.wait_in_store()
    return str(caught.value)


def test_ranks_without_a_group_for_the_cpu_wait_in_the_store(ranks: RankPool) -> None:
    _, told = ranks.run(_wait_in_store, 2.0, world_size=2)
    assert told.startswith("Rank 0 did not call load within 2 s") and "called was save()" in told, told


def _stock_save(place: Path) -> str:
    """Stock DCP's call with our writer: the paths are compared with the plans."""
    with pytest.raises(CheckpointException) as caught:
        dcp.save({f"{dist.get_rank()}": torch.ones(3)}, storage_writer=NvcompWriter(place / f"{dist.get_rank()}"))
    (error,) = (failure for failure, _ in caught.value.failures.values())
    assert isinstance(error, RanksDifferError)
    return str(error)


def test_paths_that_stock_save_is_given(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(_stock_save, tmp_path, world_size=2):
        assert f"{tmp_path}/0' (rank 0)" in told and f"{tmp_path}/1' (rank 1)" in told
    assert not list(tmp_path.glob("*/*"))


def _from_outside(place: Path) -> list[str]:
    group: Any = dist.new_group([0])  # a number on other ranks
    if not dist.get_rank():
        return []
    said = []
    calls: list[Callable[[], object]] = [
        lambda: save(_state(), place, process_group=group),
        lambda: async_save(_state(), place, process_group=group),
        lambda: load(_state(), place, process_group=group),
        lambda: CheckpointManager(place, every=1, process_group=group, preemption_signals=()),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_rank_that_is_not_in_the_group(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(_from_outside, tmp_path, world_size=2)[1]:
        assert said.startswith("Rank 1 is not in the process group that it was given"), said
    assert not list(tmp_path.iterdir())


def _loses_its_peer(place: Path) -> str:
    group = dist.new_group([0, 1])
    dist.barrier()  # it takes both to make one
    if dist.get_rank():
        return ""
    with pytest.raises(RanksDifferError) as caught, Arrival(group, Call("save", "x")).waiting():
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4321")
    return str(caught.value)


def test_a_rank_whose_process_ends_is_not_said_to_be_late(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_loses_its_peer, tmp_path, world_size=2)[0]
    assert "Rank 1 did not call save within " in said
    assert "s, when the connection to a rank was closed, as it is when a process ends or gives up" in said
    assert "0 s" not in said


_forever = threading.Event()


def _torch_waits_for_good(place: Path) -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *ranks, **options: _forever.wait())
        with pytest.raises(RankFailedError) as raised:
            async_save(_state(), place / "a", process_group=group)
    return str(raised.value)


def _save_in_the_next_world(place: Path) -> None:
    async_save(_state(), place / "a").upload_completion.result()
    _forever.set()


def test_a_group_that_torch_never_makes(ranks: RankPool, tmp_path: Path) -> None:
    """As when a rank is killed while it is made: torch 2.13 may not return from that, whatever its limit."""
    for message in ranks.run(_torch_waits_for_good, tmp_path, world_size=2):
        assert "torch made no process group in 2 s" in message
    ranks.run(_save_in_the_next_world, tmp_path, world_size=2)  # torch still waits for the one before

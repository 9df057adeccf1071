"""Copies on a device, before anything is encoded: of host memory here, which a stand-in takes for a device's."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.staging import staged_by
from dcp_nvcomp import SaveStats, async_save
from dcp_nvcomp.saving import process_state as keeping
from dcp_nvcomp.saving import save as async_saving
from dcp_nvcomp.saving.asynchronous import device_copies
from dcp_nvcomp.saving.asynchronous.device_copies import CudaMemory
from dcp_nvcomp.saving.data_files import DataFileWriter
from tests.checkpoints import assert_loads
from tests.states import State

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = 64  # tensors of fewer elements are in host memory


class StandInMemory:
    """A device of which copies are made only when they are waited for, as late as a GPU may.

    Attributes:
        spare: what it has free.
        fails_after: so many copies can be made.
        copies: those that are still held.
        made: how many were.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.is_in_use = True
        self.spare = 1 << 30
        self.fails_after = 1 << 30
        self.copies: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.made = 0
        self._followed = False
        self._under_way: list[tuple[Tensor, weakref.ref[Tensor]]] = []

    def has(self, tensor: Tensor) -> bool:
        return tensor.numel() >= SMALL

    def spare_nbytes(self, device: torch.device) -> int:
        return self.spare

    def empty_like(self, tensor: Tensor) -> Tensor:
        assert not self._under_way, "one that is taken now would have to be waited for once more"
        if self.made >= self.fails_after:
            raise torch.OutOfMemoryError
        self.made += 1
        copy = torch.full_like(tensor, 7)
        self.copies.add(copy)
        self._followed = False
        return copy

    def follow(self, device: torch.device) -> None:
        self._followed = True

    def copy(self, tensor: Tensor, into: Tensor) -> None:
        assert self._followed, "kernels may still use what lay there"
        self._under_way.append((tensor, weakref.ref(into)))

    def wait(self, device: torch.device) -> None:
        for tensor, copy in self._under_way:
            there = copy()
            assert there is not None, "its memory is another's, and is written to"
            there.copy_(tensor)
        self._under_way.clear()

    def assert_free(self) -> None:
        gc.collect()
        assert not len(self.copies) and not self._under_way
        assert self.turn.acquire(blocking=False)
        self.turn.release()


@pytest.fixture
def memory() -> Iterator[StandInMemory]:
    keeping.forget_all()
    made = StandInMemory()
    keeping.process_state().device_memory = made
    with staged_by("encode"), patch.object(async_saving, "has_cuda_engine", lambda engine: True):
        yield made
    keeping.forget_all()


def trained(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"w{number}": torch.randn(70 + number, 30, generator=generator) for number in range(9)}
    return {"step": torch.tensor(seed), **weights, "t": torch.randn(40, 50).t(), "object": [1, seed]}


def spoil(state: State) -> None:
    for value in state.values():
        if isinstance(value, Tensor):
            value.fill_(-1)


class Writing:
    """Keeps saves from writing their first blocks until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        append = DataFileWriter.append

        def waits(writer: DataFileWriter, blocks: Any) -> None:
            assert self.may_go_on.wait(60)
            append(writer, blocks)

        monkeypatch.setattr(DataFileWriter, "append", waits)


@pytest.mark.parametrize("wait", ["staged", "nothing"])
def test_the_state_may_change_once_it_is_copied(
    tmp_path: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch, wait: Any
) -> None:
    writing = Writing(monkeypatch)
    for seed in range(3):  # from the second on with a kept plan
        writing.may_go_on.clear()
        state = trained(seed)
        expected = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        saving = async_save(state, tmp_path / str(seed), no_dist=True, wait=wait)
        saving.staging_completion.result(60)
        spoil(state)
        writing.may_go_on.set()
        stats = SaveStats.of(saving.upload_completion.result(60))
        assert stats is not None
        assert stats.staged_nbytes == sum(one.nbytes for key, one in expected.items() if key[0] in "wt")
        assert_loads(tmp_path / str(seed), expected)
        memory.assert_free()
    assert memory.made == 3 * 10


def test_without_room_the_state_is_encoded_at_once(tmp_path: Path, memory: StandInMemory) -> None:
    memory.spare = sum(one.nbytes for key, one in trained().items() if key != "object") - 1
    state = trained()
    async_save(state, tmp_path, no_dist=True).staging_completion.result(60)
    spoil(state)
    keeping.forget_all()
    assert not memory.made
    memory.assert_free()


@pytest.mark.parametrize("wait", ["staged", "nothing"])
@pytest.mark.parametrize("fails_after", [0, 4, 9])
def test_memory_that_is_not_there_after_all(tmp_path: Path, memory: StandInMemory, fails_after: int, wait: Any) -> None:
    """Objects are those of the call all the same."""
    memory.fails_after = fails_after
    state = {"first": {"of": [1]}, **trained(5)}
    expected = {**trained(5), "first": {"of": [1]}, "t": state["t"].clone()}
    saving = async_save(state, tmp_path, no_dist=True, wait=wait)
    state["first"]["of"][0] = 2
    state["object"][0] = 2
    saving.staging_completion.result(60)
    spoil(state)
    memory.assert_free()
    saving.upload_completion.result(60)
    assert_loads(tmp_path, expected)


def test_two_saves_never_have_copies(tmp_path: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(monkeypatch)
    first = async_save(trained(1), tmp_path / "1", no_dist=True)
    made = memory.made
    second = async_save(trained(2), tmp_path / "2", no_dist=True, wait="nothing")
    second.staging_completion.result(60)
    writing.may_go_on.set()
    first.upload_completion.result(60), second.upload_completion.result(60)
    assert made == 10 == memory.made
    memory.assert_free()


def test_a_save_that_fails_gives_back(tmp_path: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(writer: DataFileWriter, blocks: Any) -> None:
        raise RuntimeError("with a traceback that holds what it can")

    monkeypatch.setattr(DataFileWriter, "append", fails)
    state = {f"{number}": torch.randn(1 << 20) for number in range(40)}
    saving = async_save(state, tmp_path, no_dist=True)
    assert saving.staging_completion.result(60) is None
    assert saving.upload_completion.exception(60) is not None
    memory.assert_free()


def test_a_place_that_refuses(tmp_path: Path, memory: StandInMemory) -> None:
    async_save(trained(), tmp_path, no_dist=True).upload_completion.result(60)
    saving = async_save(trained(), tmp_path, no_dist=True, overwrite=False, wait="nothing")
    assert "already exists" in str(saving.upload_completion.exception(60))
    del saving
    memory.assert_free()


class Counted:
    pickled = 0

    def __reduce__(self) -> Any:
        type(self).pickled += 1
        return dict, ()


def test_objects_are_pickled_as_often_as_without_copies(
    tmp_path: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for number, is_in_use in enumerate((True, False, True, False)):
        monkeypatch.setattr(Counted, "pickled", 0)
        memory.is_in_use = is_in_use
        state = {"loader": Counted(), "w": torch.ones(SMALL)}
        async_save(state, tmp_path / str(number), no_dist=True).upload_completion.result(60)
        counts.append(Counted.pickled)
    assert memory.made == 2 and counts[:2] == counts[2:] and counts[0] == counts[1]


def test_a_state_in_host_memory_is_not_copied(
    tmp_path: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.ones(SMALL - 1), "b": torch.ones(3)}
    async_save(state, tmp_path / "a", no_dist=True).upload_completion.result(60)
    monkeypatch.setattr(device_copies, "_MOST_HOST_NBYTES", 100)
    async_save({**state, "w": torch.ones(SMALL)}, tmp_path / "b", no_dist=True).upload_completion.result(60)
    memory.assert_free()
    assert memory.made == 0
    assert_loads(tmp_path / "b", {**state, "w": torch.ones(SMALL)})


GIB = 1 << 30


def test_what_training_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"free": 50 * GIB, "total": 80 * GIB, "reserved": 28 * GIB, "peak": 26 * GIB, "allocated": 20 * GIB}
    device, memory = torch.device("cuda", 0), CudaMemory()
    names = {"memory_reserved": "reserved", "max_memory_allocated": "peak", "memory_allocated": "allocated"}
    for name, key in names.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, key=key: seen[key])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (seen["free"], seen["total"]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: nullcontext())
    monkeypatch.setattr(nullcontext, "synchronize", lambda _: None, raising=False)
    assert memory.spare_nbytes(device) == (50 - 5) * GIB, "what torch has reserved is training's"
    seen |= {"reserved": 40 * GIB, "free": 38 * GIB, "allocated": 40 * GIB, "peak": 40 * GIB}
    memory.wait(device)
    seen |= {"allocated": 20 * GIB}
    for _ in range(2):
        assert memory.spare_nbytes(device) == (38 + 12 - 5) * GIB, "but for what copies had it reserve"
        memory.wait(device)
    seen |= {"reserved": 28 * GIB, "free": 50 * GIB}  # empty_cache was called
    assert memory.spare_nbytes(device) == (50 + 8 - 5) * GIB
    memory.wait(device)
    seen["peak"] = 20 * GIB
    assert memory.spare_nbytes(device) == (50 + 8 - 5) * GIB, "training reset its peaks"
    memory.wait(device)
    seen |= {"reserved": 21 * GIB, "free": 57 * GIB}
    assert memory.spare_nbytes(device) == 0, "before a step it is not known what one takes"

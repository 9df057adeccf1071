"""What engines hold of a device: never more than device_memory_budget, and whatever there is, if it is less."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Zstd
from dcp_nvcomp.engines import choice
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda import pool
from dcp_nvcomp.engines.cuda.arena import Arena, NvcompMemory
from dcp_nvcomp.engines.cuda.coders import NvcompCoders
from dcp_nvcomp.engines.cuda.device import FreeMemory
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob, EnginePolicy
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE, EnginePool, release_device_memory, shared_pool
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import load_into, save

from .cases import BUDGET
from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import Codec, NvcompStandIn, StandInDevice
from .stand_in_pool import StandInPool, install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CPU = torch.device("cpu")
MIB = 1 << 20
STATE = {f"{at}": torch.randn(300, 1000) for at in range(8)}


class CountingDevice(StandInDevice):
    """A device that counts the requests which it refuses."""

    refused = 0

    def _hold(self, nbytes: int) -> None:
        self.refused += self.held_nbytes + nbytes > self.capacity_nbytes
        super()._hold(nbytes)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandInPool]:
    def installed(**options: Any) -> StandInPool:
        for module in (buffers, decoding):
            monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
        return install_stand_ins(monkeypatch, ReferenceKernels(), **options)

    return installed


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> Any:
        raise AssertionError("left to the CPU")

    monkeypatch.setattr(CopyingEngine, "encode_block", fails)
    monkeypatch.setattr(CopyingEngine, "decoded", fails)


def load_all(path: Path, budget: int, *, strided: bool) -> None:
    """Load to tensors that blocks can be decoded in, or, through scratch memory, to others."""
    into = {key: torch.zeros(1000, 300).t() if strided else torch.zeros(300, 1000) for key in STATE}
    load_into(path, into, device_memory_budget=budget)
    assert all(torch.equal(into[key], value) for key, value in STATE.items())


def held_nbytes(pool: StandInPool) -> int:
    return sum(device.held_nbytes for device in pool.devices)


# ---- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strided", [False, True], ids=["in place", "through scratch memory"])
def test_a_smaller_budget_counts_from_then_on(
    tmp_path: Path, install: Callable[..., StandInPool], no_cpu: None, strided: bool
) -> None:
    pool = install(self_test=True)
    with shared_pool().lend(CPU, EnginePolicy(32 * MIB)), shared_pool().lend(CPU, EnginePolicy(32 * MIB)):
        pass
    assert held_nbytes(pool) == 64 * MIB
    save(tmp_path, STATE, device_memory_budget=24 * MIB)
    assert held_nbytes(pool) <= 24 * MIB
    for device in pool.devices:
        device.peak_nbytes = 0
    load_all(tmp_path, 24 * MIB, strided=strided)
    assert sum(device.peak_nbytes for device in pool.devices) <= 24 * MIB, "scratch memory is of the budget"
    load_all(tmp_path, 8 * MIB, strided=strided)
    assert held_nbytes(pool) <= 8 * MIB


def test_scratch_memory_is_of_the_engine(
    tmp_path: Path, install: Callable[..., StandInPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, STATE, engine="cpu")
    install()
    empty, nbytes = torch.empty, list[int]()

    def watched(*shape: Any, **more: Any) -> torch.Tensor:
        made = empty(*shape, **more)
        nbytes.append(0 if made.is_meta else made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    load_all(tmp_path, 32 * MIB, strided=True)
    assert max(nbytes, default=0) < MIB / 4


def test_batches_make_do_with_what_scratch_memory_leaves() -> None:
    memory = StandInDevice(ReferenceKernels()).arena
    memory.set_limit(MIB)
    costs = [MIB // 8] * 8
    assert memory.fitting(costs, 0, 8) == 8
    scratch = memory.take_scratch(MIB // 4, costs[:2])
    with memory.lending(scratch):
        assert memory.fitting(costs, 0, 8) == 6
    del scratch
    assert memory.fitting(costs, 0, 8) == 8
    with pytest.raises(torch.OutOfMemoryError):
        memory.take_scratch(MIB, costs[:2])


@pytest.mark.parametrize("strided", [False, True], ids=["in place", "through scratch memory"])
def test_a_block_that_alone_takes_more_gets_it_for_a_while(
    tmp_path: Path, install: Callable[..., StandInPool], no_cpu: None, strided: bool
) -> None:
    pool = install()
    save(tmp_path, STATE, device_memory_budget=2 * MIB)
    assert held_nbytes(pool) <= 2 * MIB
    assert max(device.peak_nbytes for device in pool.devices) > MIB, "the share of an engine"
    load_all(tmp_path, MIB, strided=strided)
    assert held_nbytes(pool) <= MIB


def test_later_saves_and_loads_give_nothing_back(
    tmp_path: Path, install: Callable[..., StandInPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.cuda.empty_cache`, which gives it back, takes what training has cached too, and waits for the device."""
    install()
    release, released = Arena.release, list[int]()

    def counted(arena: Arena) -> None:
        if arena._region is not None:
            released.append(turn)
        release(arena)

    monkeypatch.setattr(Arena, "release", counted)
    for turn in range(3):
        save(tmp_path / str(turn), STATE, device_memory_budget=BUDGET)
        load_all(tmp_path / str(turn), BUDGET, strided=turn == 1)
    assert {*released} == {0}


def test_an_engine_that_a_job_does_not_need_gives_back_too(install: Callable[..., StandInPool]) -> None:
    pool = install()
    shared = shared_pool()
    with shared.lend(CPU, EnginePolicy(16 * MIB)), shared.lend(CPU, EnginePolicy(16 * MIB)):
        pass
    shared.begin(8 * MIB)
    assert held_nbytes(pool) == 0


def test_one_thread_alone_makes_do_with_one_engine(install: Callable[..., StandInPool]) -> None:
    pool = install()
    shared = shared_pool()
    for _ in range(3):
        with shared.lend(CPU, EnginePolicy(BUDGET)):
            pass
        release_device_memory()
        shared.begin(2 * BUDGET)
    assert len(pool.devices) == 1


# ---- less than the budget --------------------------------------------------------------------------------------------


def test_what_is_not_there_is_asked_for_once_in_each_save(
    tmp_path: Path, install: Callable[..., StandInPool], no_cpu: None
) -> None:
    devices: list[CountingDevice] = []

    def make(device: torch.device) -> StandInDevice:
        devices.append(CountingDevice(ReferenceKernels(), capacity_nbytes=20 * MIB))
        return devices[-1]

    install(make_device=make)
    for number in range(1, 4):
        save(tmp_path / f"{number}", STATE, device_memory_budget=256 * MIB)
        for _ in range(10):
            with shared_pool().lend(CPU, EnginePolicy(128 * MIB)):
                pass
        # of 128 MiB for each engine there are 16
        assert 3 <= sum(device.refused for device in devices) <= 3 * number * len(devices)


class _ShortMemory:
    """Memory of which a driver has little: what was asked for, how often it was given back, and an arena of it."""

    def __init__(self, free_nbytes: int) -> None:
        self.free_nbytes = free_nbytes
        self.asked, self.returned = list[int](), 0
        self._taken: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.arena = Arena(self._allocate, self._return, lambda: self.free_nbytes)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self.asked.append(nbytes)
        if nbytes > self.free_nbytes:
            self._empty_cache()  # as torch does before it fails
        if nbytes > self.free_nbytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.free_nbytes -= nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._taken.append((weakref.ref(memory), nbytes))
        return memory

    def _return(self) -> None:
        self.returned += 1
        self._empty_cache()

    def _empty_cache(self) -> None:
        self.free_nbytes += sum(nbytes for memory, nbytes in self._taken if memory() is None)
        self._taken = [(memory, nbytes) for memory, nbytes in self._taken if memory() is not None]


UNIT = 32 * MIB  # less is not worth what torch has cached


def test_what_is_held_stays_where_the_device_has_no_more() -> None:
    """To give it back, and to ask in vain, makes torch give back all that it keeps for training."""
    memory = _ShortMemory(3 * UNIT)
    arena = memory.arena
    for _ in range(3):
        arena.retry()
        arena.set_limit(4 * UNIT)
        assert arena.capacity_nbytes == 2 * UNIT
    assert not memory.returned and memory.asked == [4 * UNIT, 2 * UNIT]
    memory.free_nbytes += UNIT
    arena.set_limit(4 * UNIT)
    assert arena.capacity_nbytes == 2 * UNIT, "only the next save asks again"
    arena.retry()
    arena.set_limit(4 * UNIT)
    assert arena.capacity_nbytes == 4 * UNIT and memory.returned == 1


def test_an_engine_that_never_went_short_grows_whatever_the_driver_has() -> None:
    """Torch may have it in its cache, and the self-test leaves an engine with little."""
    memory = _ShortMemory(2 * MIB)
    memory.arena.set_limit(MIB)
    memory.arena.reserve()
    memory.arena.set_limit(2 * MIB)
    assert memory.arena.capacity_nbytes == 2 * MIB


def test_a_gpu_without_memory_is_given_up_until_the_next_save(
    tmp_path: Path, install: Callable[..., StandInPool]
) -> None:
    devices: list[CountingDevice] = []

    def make(device: torch.device) -> StandInDevice:
        devices.append(CountingDevice(ReferenceKernels(), capacity_nbytes=0))
        return devices[-1]

    install(make_device=make)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError: the device has no memory left"):
        save(tmp_path / "1", STATE, device_memory_budget=16 * MIB)
    attempts, refused = len(devices), sum(device.refused for device in devices)
    assert attempts == 1 and refused <= 12, "8 MiB, and then half of that down to 4 KiB"
    save(tmp_path / "2", STATE, device_memory_budget=16 * MIB)
    assert len(devices) == attempts + 1


def test_an_odd_error_of_the_allocator_counts_for_this_save_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, error = StandInDevice._reserve, [RuntimeError("CUDA error: unknown")]

    def fails_once(self: StandInDevice, nbytes: int) -> torch.Tensor:
        if error:
            raise error.pop()
        return reserve(self, nbytes)

    monkeypatch.setattr(StandInDevice, "_reserve", fails_once)
    shared = EnginePool(lambda device: StandInDevice(ReferenceKernels()), lambda engine, device: None)
    with (
        pytest.warns(RuntimeWarning, match="RuntimeError: CUDA error: unknown"),
        shared.lend(CPU, EnginePolicy(BUDGET)) as engine,
    ):
        assert isinstance(engine, CopyingEngine)
    shared.begin(2 * BUDGET)
    with shared.lend(CPU, EnginePolicy(BUDGET)) as engine:
        assert isinstance(engine, CudaEngine)


# ---- memory for one engine only --------------------------------------------------------------------------------------


def one_at_a_time(how: str, devices: list[StandInDevice], limit: list[int]) -> Callable[[torch.device], StandInDevice]:
    def make(device: torch.device) -> StandInDevice:
        if len(devices) >= limit[0]:
            if how == "no engine":
                raise torch.OutOfMemoryError("CUDA out of memory")
            if how == "an error":
                raise TypeError("one at a time")
            return StandInDevice(ReferenceKernels(), capacity_nbytes=0)
        devices.append(StandInDevice(ReferenceKernels()))
        return devices[-1]

    return make


@pytest.mark.parametrize("how", ["no engine", "no arena", "an error"])
def test_one_engine_does_the_work_of_two(
    tmp_path: Path, install: Callable[..., StandInPool], no_cpu: None, how: str
) -> None:
    devices, limit = list[StandInDevice](), [1]
    install(make_device=one_at_a_time(how, devices, limit))
    save(tmp_path, STATE, device_memory_budget=16 * MIB, engine="cuda")
    load_all(tmp_path, 16 * MIB, strided=False)
    assert len(devices) == 1
    limit[0] = 2
    save(tmp_path / "again", STATE, device_memory_budget=16 * MIB)
    load_all(tmp_path, 16 * MIB, strided=True)


def test_the_second_borrower_waits_for_the_first_engine() -> None:
    devices, limit, lent = list[StandInDevice](), [1], list[object]()
    shared = EnginePool(one_at_a_time("no engine", devices, limit), lambda engine, device: None)

    def borrow() -> None:
        with shared.lend(CPU, EnginePolicy(BUDGET)) as engine:
            lent.append(engine)

    with shared.lend(CPU, EnginePolicy(BUDGET)) as first:
        thread = threading.Thread(target=borrow)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not lent
    thread.join(60)
    assert lent == [first]
    limit[0] = 2
    shared.begin(2 * BUDGET)
    with shared.lend(CPU, EnginePolicy(BUDGET)) as one, shared.lend(CPU, EnginePolicy(BUDGET)) as other:
        assert one is first and isinstance(other, CudaEngine), "there is memory again"


# ---- nvCOMP's part ---------------------------------------------------------------------------------------------------


def test_the_self_test_passes_though_codecs_keep_their_scratch_memory() -> None:
    """It coded by nvCOMP's Zstd and then by Deflate, in memory that was enough for either, on an H100."""
    devices: list[StandInDevice] = []

    def make(device: torch.device) -> StandInDevice:
        devices.append(StandInDevice(ReferenceKernels()))
        return devices[-1]

    health = EnginePool(make).tested(CPU)
    assert (health.unusable, health.refused) == (None, {})
    assert {name for name, _ in devices[0].nvcomp.calls} == {"encode", "decode"}
    assert devices[0].held_nbytes <= MIB, "what it took beyond that is given back"


def test_batches_fit_beside_what_codecs_keep() -> None:
    device = StandInDevice(ReferenceKernels())
    engine = CudaEngine(CPU, EnginePolicy(4 * MIB), backend=device)
    blocks = list(torch.randint(0, 9, (2 * MIB,), dtype=torch.uint8).split(MIB // 4))
    room = memoryview(bytearray(8 * MIB))
    for coder in (Zstd(), Deflate(literals_only=True), Zstd(), Deflate(literals_only=True)):
        chain = CodecChain(Bytes(), coder)
        if isinstance(coder, Deflate):
            encoded = engine.encode([EncodeJob((block,), chain) for block in blocks], room)
        else:
            encoded = [CpuEngine().encode(block.numpy(), chain, memoryview(bytearray(MIB))) for block in blocks]
        outs = [torch.zeros_like(block) for block in blocks]
        rows = zip(encoded, outs, strict=True)
        engine.decode([DecodeJob(one.data, one.row, chain, out) for one, out in rows], verify="stored")
        assert all(torch.equal(out, block) for out, block in zip(outs, blocks, strict=True))
    assert device.peak_nbytes <= 4 * MIB
    assert engine._copying.reason == "", "a batch found too little"


class GreedyNvcomp(NvcompStandIn):
    """nvCOMP that takes scratch memory of which none was expected."""

    def Codec(self, **options: Any) -> Codec:  # noqa: N802
        codec = super().Codec(**options)
        codec._take_scratch = lambda nbytes: codec._module.allocate(10 * MIB)  # type: ignore[method-assign]
        return codec


def test_scratch_memory_that_could_not_be_had_is_expected_from_then_on() -> None:
    device = StandInDevice(ReferenceKernels(), GreedyNvcomp())
    device.arena.set_limit(8 * MIB)
    coders, coder = NvcompCoders(device), Deflate(literals_only=True)
    lengths = np.full(4, coder.slice_nbytes)
    scratch = torch.zeros(int(lengths.sum()), dtype=torch.uint8)
    expected_nbytes = coders.encode_nbytes(coder, lengths)
    with device.session([scratch]), pytest.raises(torch.OutOfMemoryError):
        coders.encode(coder, scratch, np.arange(4) * coder.slice_nbytes, lengths)
    assert coders.encode_nbytes(coder, lengths) >= expected_nbytes + 9 * MIB


def test_nvcomp_is_without_our_allocator_when_python_ends() -> None:
    """If nvCOMP's module then drops the last reference to it, the process ends in SIGABRT or SIGSEGV."""
    script = """
import atexit
from dcp_nvcomp.engines.cuda import arena

class Nvcomp:
    allocator = None
    def set_device_allocator(self, allocator=None):
        self.allocator = allocator

nvcomp = Nvcomp()
arena.load_nvcomp = lambda: nvcomp
atexit.register(lambda: print(nvcomp.allocator))
print(arena.installed_memory() is nvcomp.allocator is arena.installed_memory())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["True", "None"]


class Stream:
    ptr = 5
    device = 0


class Elsewhere:
    ptr = 4096

    def give_back(self) -> None:
        pass


def test_nvcomp_keeps_no_arena_of_a_device_that_is_gone() -> None:
    """The driver gives the handle of a stream that is gone to another."""
    asked: list[int] = []

    def take(nbytes: int, stream: Any) -> Elsewhere:
        asked.append(nbytes)
        return Elsewhere()

    memory = NvcompMemory(take)
    arena = Arena(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    memory.attach(Stream.ptr, arena)
    memory(100, Stream())
    assert asked == []
    del arena
    memory(100, Stream())
    assert asked == [100]


def test_the_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what is free, at most 2 GiB, and the same for all saves and loads of a process that uses a GPU."""
    free: list[FreeMemory | None] = [None]
    monkeypatch.setattr(pool, "free_memory", lambda: free[0])
    shared = EnginePool()
    assert shared.default_budget_nbytes() == 2 << 30
    free[0] = FreeMemory(3 << 30, 2 << 30)
    assert shared.default_budget_nbytes() == (5 << 30) // 10
    free[0] = FreeMemory(60 << 30, 20 << 30)
    assert shared.default_budget_nbytes() == (5 << 30) // 10
    assert EnginePool().default_budget_nbytes() == 2 << 30
    free[0] = FreeMemory(3 << 30, 70 << 30)
    assert EnginePool().default_budget_nbytes() == 3 << 29, "what torch has cached is training's"
    free[0] = FreeMemory(0, 70 << 30)
    assert EnginePool().default_budget_nbytes() == 256 << 20
    monkeypatch.setattr(choice, "shared_pool", lambda: shared)
    assert EngineChoice("auto").policy(None).device_memory_budget == (5 << 30) // 10 // ENGINES_PER_DEVICE
    assert EngineChoice("auto").policy(1000).device_memory_budget == 1000 // ENGINES_PER_DEVICE


# ---- a forked child leaves its parent's engines alone ----------------------------------------------------------------


SCRIPT = """
import os, sys
import torch
from dcp_nvcomp.engines.cuda import pool
from dcp_nvcomp.engines.cuda.engine import EnginePolicy
from tests.engines.kernels_on_cpu import ReferenceKernels
from tests.engines.nvcomp_stand_in import StandInDevice

class Device(StandInDevice):
    def __del__(self):
        os.write(1, f"{name} ends {id(self)}\\n".encode())

name = "parent"
pool._pool = pool.EnginePool(lambda device: Device(ReferenceKernels()), lambda engine, device: None)
pool.atexit.register(pool._drop_engines)
def fork():
    global name
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        return
    name = "child"
    CHILD
    sys.exit(0)

def lend():
    return pool.shared_pool().lend(torch.device("cpu"), EnginePolicy(1 << 20))

with lend(), lend():
    pass
fork()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(
    "child",
    [
        pytest.param("pass", id="that just ends", marks=pytest.mark.slow),
        pytest.param(
            "import gc; gc.collect(); assert pool.shared_pool() is pool.shared_pool() is not None",
            id="that makes a pool of its own",
        ),
    ],
)
def test_a_child(child: str) -> None:
    script = SCRIPT.replace("CHILD", child)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    assert len(ends) == 2 and all(end.startswith("parent ends") for end in ends), ends

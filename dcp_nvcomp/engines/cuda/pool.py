"""The CUDA engines of a process: at most two for each device, made when first needed, lent to one thread at a time.

Engines own streams, compiled kernels, nvCOMP's codecs and device memory. Made anew for each save they would leave
memory reserved for streams that are no longer used; kept here, the twentieth save reserves no more than the
first. `release_device_memory` gives the memory back.

Before a GPU is given anything that matters, `run_self_test` codes a known block there in both directions, and on the
CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, LifoQueue
from typing import Final

import numpy as np
import torch

from dcp_nvcomp.codecs.base import U8, CodecChain
from dcp_nvcomp.codecs.coders import Deflate, Zstd
from dcp_nvcomp.codecs.transforms import Bytes, Planes
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.decode_jobs import DecodeJob
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device, current_device, free_memory
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.engines.cuda.engine import BlockEngine, CudaEngine
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.health import LITERALS, DeviceHealth
from dcp_nvcomp.errors import CodecUnavailableError

logger = logging.getLogger(__name__)

# One copies while the other computes.
ENGINES_PER_DEVICE: Final = 2
# What the self-test's block takes beyond that is given back; saves and loads say how much an engine may keep.
_SELF_TEST_NBYTES: Final = 1 << 20
# Room for two batches of some 200 MiB, which have enough slices for every multiprocessor of a large GPU.
_MOST_BUDGET_NBYTES: Final = 2 << 30
# So much is taken also where torch has reserved nearly all of a device: training may be short of what it had cached.
_LEAST_BUDGET_NBYTES: Final = 256 << 20

_TEST_NBYTES = 1 << 20


class _DeviceEngines:
    """The engines of one device; None stands for one that was not made yet."""

    def __init__(self, device: torch.device) -> None:
        self.health = DeviceHealth(str(device))
        self.making = threading.Lock()
        # last in, first out: one thread alone needs one engine only
        self.free: LifoQueue[CudaEngine | None] = LifoQueue()
        for _ in range(ENGINES_PER_DEVICE):
            self.free.put(None)
        self.made: list[CudaEngine] = []
        self.aside: list[CudaEngine | None] = []

    def has_other(self, engine: CudaEngine | None) -> bool:
        """True if another engine works."""
        return any(other is not engine and other not in self.aside for other in self.made)

    def take_back(self) -> None:
        """Try once more with what was set aside, and for memory that was not there."""
        with self.making:
            back, self.aside = self.aside, []
            for engine in self.made:
                engine.memory.retry()
        with self.idle():  # below the others, which are ready
            for one in sorted(back, key=lambda one: one is not None):
                self.free.put(one)

    @contextmanager
    def idle(self) -> Iterator[list[CudaEngine]]:
        """Hold the engines that were made and are not lent."""
        taken: list[CudaEngine | None] = []
        try:
            with suppress(Empty):
                while True:
                    taken.append(self.free.get_nowait())
            yield [engine for engine in taken if engine is not None]
        finally:
            for engine in reversed(taken):
                self.free.put(engine)


def run_self_test(engine: CudaEngine, device: torch.device) -> None:
    """Code a known block by each coder that several engines have; ANS is left out, as nothing else could check it.

    Records in the engine's health which of them do not work, and if none does, that the device is broken.
    """
    health, coders, weights = engine.health, engine.coders, _bfloat16_weights()
    matches = np.tile(weights[: _TEST_NBYTES // 16], 16)
    tests = {
        LITERALS: (CodecChain(Planes(2), Zstd(literals_only=True)), weights, coders.encodes, _check_encode),
        Zstd.name: (CodecChain(Bytes(), Zstd()), matches, coders.decodes, None),
        Deflate.name: (CodecChain(Planes(2), Deflate(literals_only=True)), weights, coders.encodes, _check_encode),
    }
    for name, (chain, block, serves, check_encode) in tests.items():
        if not serves(chain):
            continue
        try:
            for check in filter(None, (check_encode, _check_decode)):
                check(engine, chain, block, device)
        except (torch.OutOfMemoryError, MemoryError):
            raise  # says nothing of the coder
        except Exception as error:  # whatever it is, this coder can't be used
            health.refuse(name, error)
    engine.memory.release()  # it may be more than the budget
    if health.refused.keys() >= tests.keys():
        health.broken = f"its self-test failed ({next(iter(health.refused.values()))})"


def _bfloat16_weights() -> U8:
    """1 MiB of what this package is for: exponents with some ten values, mantissas that are random."""
    values = np.random.default_rng(0).normal(0, 0.02, _TEST_NBYTES // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _check_encode(engine: CudaEngine, chain: CodecChain, block: U8, device: torch.device) -> None:
    """Raise an error of any type if the CPU engine does not decode what the GPU makes of the block, by CRCs."""
    room = memoryview(bytearray(chain.max_encoded_nbytes(block.nbytes)))
    (ours,) = engine.encode_unaided([EncodeJob((torch.from_numpy(block).to(device),), chain)], room)
    CpuEngine().decode(ours.data, ours.row, chain, np.empty_like(block), verify="full")


def _check_decode(engine: CudaEngine, chain: CodecChain, block: U8, device: torch.device) -> None:
    """Raise an error of any type if the GPU does not decode what the CPU engine makes of the block, by CRCs."""
    theirs = CpuEngine().encode(block, chain, memoryview(bytearray(chain.max_encoded_nbytes(block.nbytes))))
    out = torch.zeros(block.nbytes, dtype=torch.uint8, device=device)
    engine.decode_unaided([DecodeJob(theirs.data, theirs.row, chain, out)])


class EnginePool:
    """Engines by device."""

    def __init__(
        self,
        make_device: Callable[[torch.device], Device] = CudaDevice,
        self_test: Callable[[CudaEngine, torch.device], None] = run_self_test,
    ) -> None:
        self._make_device = make_device
        self._self_test = self_test
        self._lock = threading.Lock()
        self._devices: dict[torch.device, _DeviceEngines] = {}
        self._default_budget_nbytes: int | None = None

    def _engines(self, device: torch.device) -> _DeviceEngines:
        if device.type == "cuda" and device.index is None:
            device = current_device()
        with self._lock:
            if device not in self._devices:
                self._devices[device] = _DeviceEngines(device)
            return self._devices[device]

    def tested(self, device: torch.device) -> DeviceHealth:
        """Return what is known of a device once it has been through the self-test.

        So what is left to the CPU can go to all of its threads from the first block on.
        """
        engines = self._engines(device)
        while not engines.health.is_tested and engines.health.unusable is None:
            engine, _ = self._take(engines, device, EnginePolicy(_SELF_TEST_NBYTES))
            engines.free.put(engine)
        return engines.health

    def default_budget_nbytes(self) -> int:
        """Return the default of `device_memory_budget`; the first save or load of the process decides for all of them.

        Asked again and again, it would become smaller by what engines keep.
        """
        with self._lock:
            if self._default_budget_nbytes is None and (free := free_memory()) is not None:
                # what torch has cached, the next step takes again
                spare_nbytes = max(_LEAST_BUDGET_NBYTES, free.unreserved_nbytes // 2)
                self._default_budget_nbytes = max(1, min(_MOST_BUDGET_NBYTES, free.nbytes // 10, spare_nbytes))
            return self._default_budget_nbytes or _MOST_BUDGET_NBYTES

    def begin(self, device_memory_budget: int) -> None:
        """Another save or load begins: what failed for lack of memory may work now."""
        for engines in self._all():
            engines.health.begin()
            engines.take_back()
            with engines.idle() as idle:
                for engine in idle:
                    engine.memory.settle(device_memory_budget // ENGINES_PER_DEVICE)

    @contextmanager
    def lend(self, device: torch.device, policy: EnginePolicy) -> Iterator[BlockEngine]:
        """Lend an engine, after waiting for a free one; one that uses the CPU, with a warning, if the GPU can't."""
        engines = self._engines(device)
        engine, ready = self._take(engines, device, policy)
        try:
            if ready is not None:
                yield ready
            else:
                reason = engines.health.unusable or "it has no memory left"
                if not policy.may_fall_back:
                    raise CodecUnavailableError(f"engine='cuda' can't run here: {reason}. Use engine='auto' or 'cpu'.")
                engines.health.fell_back(reason)
                yield CopyingEngine(reason)
        finally:
            if engine is not None:
                engine.memory.settle()
            engines.free.put(engine)

    def _take(
        self, engines: _DeviceEngines, device: torch.device, policy: EnginePolicy
    ) -> tuple[CudaEngine | None, CudaEngine | None]:
        while True:
            engine = engines.free.get()
            try:
                with engines.making:
                    ready, is_aside = self._ready(engine, engines, device, policy)
            except BaseException:
                engines.free.put(engine)
                raise
            if not is_aside:
                return ready or engine, ready

    def _ready(
        self, engine: CudaEngine | None, engines: _DeviceEngines, device: torch.device, policy: EnginePolicy
    ) -> tuple[CudaEngine | None, bool]:
        health, made = engines.health, engine
        if health.broken is not None or (engine is None and health.unusable is not None):
            return None, False
        try:
            if made is None:
                made = CudaEngine(device, policy, health=health, backend=self._make_device(device))
            made.set_policy(policy)
            if not health.is_tested:
                self._self_test(made, device)
                health.is_tested = True
            if health.unusable is None:
                made.memory.reserve()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if engines.has_other(engine):
                logger.warning("An engine of %s is not used until the next save or load (%s).", device, reason)
                engines.aside.append(engine)
                return None, True
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                health.give_up(reason)
            else:
                health.broken = reason
            return None, False
        if engine is None:
            engines.made.append(made)
        return (made if health.broken is None else None), False

    def release_memory(self) -> None:
        """Free the device memory of all engines that are not at work."""
        for engines in self._all():
            with engines.idle() as idle:
                for engine in idle:
                    engine.memory.release()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _all(self) -> list[_DeviceEngines]:
        with self._lock:
            return list(self._devices.values())


_pool: EnginePool | None = None
_pool_lock = threading.Lock()


def shared_pool() -> EnginePool:
    """Return this process's pool; a forked child gets one of its own, as CUDA does not survive a fork."""
    global _pool
    with _pool_lock:
        if _pool is None:
            # before the interpreter takes apart what nvCOMP's and CuPy's objects need to free theirs
            atexit.register(_drop_engines)
            _pool = EnginePool()
        return _pool


def _drop_engines() -> None:
    global _pool
    _pool = None


def _leave_to_parent() -> None:
    """In a forked child: never touch the parent's engines, and do not end them either.

    Their destructors call CUDA, which does not work in a child. One more reference, which is never dropped, keeps
    them from running, even when the interpreter ends and takes modules apart.
    """
    global _pool, _pool_lock
    _pool_lock = threading.Lock()  # a thread that is not here may have held it
    if _pool is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_pool))
        _pool = None


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_leave_to_parent)


def release_device_memory() -> None:
    """Give back the device memory that saves and loads keep for the next ones.

    Each device has at most `device_memory_budget` bytes of it. Call it if training needs every byte between saves; the
    next save or load reserves the memory again. What a save or load that is under way uses is not touched.

    Examples:
        >>> import dcp_nvcomp
        >>> dcp_nvcomp.tools.release_device_memory()
    """
    if _pool is not None:
        _pool.release_memory()

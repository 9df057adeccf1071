"""What the host does for a batch on a GPU: an engine on a null device, whose kernels and copies do nothing.

    python -m benchmarks.gpu_host [--json FILE] [--profile]

Addresses, tables and batches are those of a real engine with our own kernels; what is left is the time of Python. What
the driver takes to launch kernels and to start copies is not in it, nor what a load does to plan reads. It is processor
time of the thread, so that a busy machine does not count. A model, not a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

from benchmarks.gpu_codecs import Metered
from benchmarks.measuring import invocation, machine, versions
from dcp_nvcomp.codecs import CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.choose import Auto
from dcp_nvcomp.codecs.encoded_run import EncodedRun
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda.arena import Arena, NvcompMemory
from dcp_nvcomp.engines.cuda.decode_jobs import DecodeRun, JobChecks
from dcp_nvcomp.engines.cuda.device import Launch, LaunchedKernels
from dcp_nvcomp.engines.cuda.engine import EncodeJob, EnginePolicy
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.encode.tasks import BufferPool, Task, Tasks

__all__ = ["NullDevice", "main", "measured"]

MIB = 1 << 20
_FRAME_SHARE = 0.35
_RATIO = 0.67


class NullDevice:
    """A device on which nothing takes time, but for what the host does."""

    torch_device = torch.device("cpu")
    name = "null"
    stream_handle = 1

    def __init__(self) -> None:
        # tables are made and handed over, and CRCs stay zero, which is what decoding compares with
        self.kernels = LaunchedKernels(self.torch_device, lambda name, tiles, addresses: None)
        self.nvcomp: Any = None
        # the pages of this memory are never touched
        self.arena = Arena(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        self.nvcomp_memory = NvcompMemory(lambda nbytes, stream: self.arena.take(nbytes))

    @contextmanager
    def session(self, tensors: Sequence[Tensor], after: Sequence[Any] = ()) -> Iterator[None]:
        yield

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compile(self, sources: Sequence[str], options: Sequence[str], names: Sequence[str]) -> Launch:
        def launch(name: str, blocks: int, arguments: tuple[int, ...]) -> None:
            if name == "measure_slices":  # the host reads the lengths
                nbytes = int(_FRAME_SHARE * 128 * 1024)
                lengths = np.full(blocks, nbytes, np.int32)
                ctypes.memmove(arguments[-1], lengths.ctypes.data, lengths.nbytes)

        return launch

    def copy_in(self, host: memoryview, target: Tensor) -> None:
        pass

    def copy_out(self, source: Tensor, host: memoryview) -> None:
        pass


class _Work:
    """A batch of bfloat16 weights, and the engine.

    Args:
        nbytes: how much.
    """

    def __init__(self, nbytes: int) -> None:
        chain = CodecChain(Planes(2), Zstd(literals_only=True))
        self._engine = Metered(torch.device("cpu"), EnginePolicy(8 << 30), backend=NullDevice())
        # tensors of 16 MiB, as of a model
        self._tensors = [torch.empty(16 * MIB, dtype=torch.uint8) for _ in range(nbytes // (16 * MIB))]
        self._chain = chain
        self._room = torch.empty(2 * nbytes, dtype=torch.uint8).numpy().data
        self._runs: list[DecodeRun] = []
        self._checks, self._turns = JobChecks(), count()

    def encode(self) -> None:
        """Encode runs of blocks, as a save hands them over."""
        # the one operation of torch that goes over device memory
        with patch.object(torch.Tensor, "bitwise_not_", lambda tensor: tensor):
            self._encode()

    def _encode(self) -> None:
        chain = self._chain
        bounds = np.arange(0, 16 * MIB + 1, chain.block_nbytes)
        jobs = [EncodeJob((tensor,), chain, bounds=bounds) for tensor in self._tensors]
        encoded = self._engine.encode(jobs, self._room)
        if not self._runs:
            assert isinstance(encoded, EncodedRun)
            each = bounds.size - 1
            self._runs = [
                DecodeRun(encoded[at * each : (at + 1) * each], chain, tensor)
                for at, tensor in enumerate(self._tensors)
            ]

    def decode(self) -> None:
        """Decode as a load does, which looks at the rows first, and meets each batch for the first time."""
        first, *others, last = self._runs
        each, turn = first.count, next(self._turns)
        cut, other = 1 + turn % (each - 1), 1 + turn // (each - 1) % (each - 1)  # more ways than are remembered
        runs = [first.part(0, cut), first.part(cut, each), *others, last.part(0, other), last.part(other, each)]
        columns = self._checks.columns_of(runs)
        assert columns is not None
        self._engine.decode_checked(runs, verify="stored", columns=columns)


class _Feed:
    """What the feeding thread does for tensors of one block, of which an earlier save has chosen the codec.

    Args:
        count: how many tensors of 1 MiB.
    """

    def __init__(self, count: int) -> None:
        weights = torch.randn(MIB // 2, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
        self._state = {f"layers.{number}.weight": weights.clone() for number in range(count)}
        planner = DefaultSavePlanner()
        planner.set_up_planner(self._state, None, True)
        self._items = planner.create_local_plan().items
        self._remembered = RememberedChoices()
        self._memory = BufferPool(256 * MIB, 8 << 30, 8)
        for _ in range(2):  # the first save looks at the tensors, and the second at those that chance had spared
            for task in self._fed():
                for record, _, _ in task.records:
                    record.choice.achieved(_RATIO)

    def run(self) -> None:
        """Choose, make records and gather tasks."""
        self._fed()

    def _fed(self) -> list[Task]:
        with patch.multiple(EngineChoice, on_cuda=lambda *_: True, serves=lambda *_: True):
            maker = RecordMaker(Auto(), EngineChoice("auto"), self._remembered, pack=True)
            tasks, found = Tasks(lambda source: self._memory), list[Task]()
            for item in self._items:
                for record, source in maker.add(item, self._state[item.index.fqn]):
                    found += tasks.add(record, source)
            found += tasks.flush()
        for task in found:
            task.release()
        return found


def measured(nbytes: int, tensors: int, repeats: int) -> dict[str, float]:
    """Return milliseconds of processor time of encoding and of decoding a batch, and of feeding tensors.

    Args:
        nbytes: the batch's size, a multiple of 16 MiB, 32 at least.
        tensors: how many of 1 MiB are fed.
        repeats: how often; the median counts.
    """
    work, feed = _Work(nbytes), _Feed(tensors)
    runs = {"encode": work.encode, "decode": work.decode, "feed": feed.run}
    return {action: _milliseconds(run, repeats) for action, run in runs.items()}


def _milliseconds(run: Callable[[], None], repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        run()
        found.append(1e3 * (time.thread_time() - start))
    return median(found[1:])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="receives the result")
    parser.add_argument("--profile", action="store_true", help="list where the time goes")
    options = parser.parse_args()
    found = measured(256 * MIB, 1000, 31)
    for action, milliseconds in found.items():
        what = "1,000 tensors of 1 MiB" if action == "feed" else "a batch of 256 MiB"
        print(f"{action}: {milliseconds:.2f} ms of the host for {what}")
    if options.json is not None:
        facts = {"quick": False, **invocation(["gpu_host"]), "machine": machine(), "versions": versions()}
        options.json.write_text(json.dumps({**facts, "milliseconds": found}, indent=1) + "\n")
    if options.profile:
        work = _Work(256 * MIB)
        work.encode()
        for run in (work.encode, work.decode):
            profile = cProfile.Profile()
            for _ in range(10):
                profile.runcall(run)
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()

"""A GPU that fails in the middle of a checkpoint: the CPU takes over, or the save fails and the old checkpoint loads.

On the stand-in for nvCOMP, call by call; and on a real GPU without memory. tests/engines has the engine's own failures.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda import fallback as copying
from dcp_nvcomp.engines.cuda.engine import EnginePolicy
from dcp_nvcomp.engines.cuda.pool import release_device_memory
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import file_names, load, save
from tests.engines.kernels_on_cpu import ReferenceKernels
from tests.engines.nvcomp_stand_in import NvcompStandIn, StandInDevice
from tests.engines.stand_in_pool import install_stand_ins
from tests.states import State, same

from .small import failure_of, nothing_leaks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The GPU failed on a block:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Tensors on cpu are handled by the slower CPU engine:RuntimeWarning"),
]

Step = tuple[str, int]


def state_of_blocks(seed: int, device: str = "cpu") -> State:
    generator = torch.Generator().manual_seed(seed)
    sizes = (30_000, 50_000, 20_000, 40_000)
    state = {f"w{at}": torch.randn(size, generator=generator) / 50 for at, size in enumerate(sizes)}
    state["i"] = torch.randint(0, 100, (30_000,), generator=generator)
    return {key: value.to(device) for key, value in state.items()}


OLD, NEW = state_of_blocks(1), state_of_blocks(2)
OPTIONS: dict[str, Any] = {"codec": "planes-zstd", "sync_files": False}


@dataclass
class FailingGpu:
    """What happens on the stand-in, in order, and from which step on it fails."""

    error: BaseException | None = None  # what is raised there; None where nothing fails
    first: int = 0  # the first step that fails
    lasting: bool = False  # whether those after it do too
    of: tuple[str, ...] = ("encode", "decode", "copy in", "copy out", "allocate")
    steps: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, name: str) -> None:
        if name not in self.of:
            return
        with self._lock:
            at = len(self.steps)
            self.steps.append(name)
        if self.error is not None and (at == self.first or (self.lasting and at > self.first)):
            raise self.error


class Device(StandInDevice):
    """A stand-in that asks a `FailingGpu` before each step."""

    def __init__(self, gpu: FailingGpu) -> None:
        self._gpu = gpu
        super().__init__(ReferenceKernels(), NvcompStandIn(lambda name, _: gpu.step(name)))

    def _reserve(self, nbytes: int) -> torch.Tensor:
        self._gpu.step("allocate")
        return super()._reserve(nbytes)

    def copy_in(self, host: memoryview, target: torch.Tensor) -> None:
        self._gpu.step("copy in")
        super().copy_in(host, target)

    def copy_out(self, source: torch.Tensor, host: memoryview) -> None:
        self._gpu.step("copy out")
        super().copy_out(source, host)


Use = Callable[[FailingGpu], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Host tensors take the way of CUDA tensors, to engines on the given GPU."""
    current = [FailingGpu()]

    def engine(device: torch.device) -> Device:
        return Device(current[0])

    def policy(choice: EngineChoice, *_: object, **options: bool) -> EnginePolicy:
        """A small budget, so that there are several batches."""
        return EnginePolicy(400 << 10, may_fall_back=choice.option != "cuda", **options)

    def use(gpu: FailingGpu) -> None:
        current[0] = gpu
        install_stand_ins(monkeypatch, ReferenceKernels(), make_device=engine)

    def counted(name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*args: Any) -> Any:
            current[0].step(name)
            return copy(*args)

        return copied

    monkeypatch.setattr(EngineChoice, "policy", policy)
    monkeypatch.setattr(copying, "to_host", counted("copy out", copying.to_host))
    monkeypatch.setattr(copying, "to_device", counted("copy in", copying.to_device))
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    return use


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("nvCOMP error: internal"),
    TypeError("incompatible function arguments"),
]


@pytest.mark.ci
@pytest.mark.parametrize("error", ERRORS, ids=["out of memory", "nvCOMP", "binding"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_nvcomp_fails_in_batch_n(tmp_path: Path, use: Use, error: BaseException, lasting: bool) -> None:
    """Memory and coders: the CPU engine takes the batch, in saves and loads, and nobody sees more than a warning."""
    of = ("encode", "decode", "allocate")
    healthy = FailingGpu(of=of)
    use(healthy)
    save(tmp_path, OLD, **OPTIONS)
    saving_steps = len(healthy.steps)
    assert same(load(tmp_path, OLD, verify="full"), OLD)
    loading_steps = len(healthy.steps) - saving_steps
    assert min(healthy.steps.count("encode"), healthy.steps.count("decode")) >= 2
    for at in range(0, saving_steps, 3 if lasting else 1):
        use(FailingGpu(error, at, lasting, of))
        save(tmp_path, NEW, **OPTIONS)
        assert same(load(tmp_path, OLD, verify="full", engine="cpu"), NEW), f"step {at} of the save"
    for at in range(0, loading_steps, 3 if lasting else 1):
        use(FailingGpu(error, at, lasting, of))
        assert same(load(tmp_path, OLD, verify="full"), NEW), f"step {at} of the load"


@pytest.mark.parametrize(
    ("of", "error", "options"),
    [
        ("copy out", RuntimeError("CUDA error: an illegal memory access was encountered"), {}),
        ("encode", KeyError("broken"), {"engine": "cuda"}),  # so the CPU engine may not take over
    ],
)
def test_a_gpu_that_is_lost_in_batch_n_of_a_save(
    tmp_path: Path, use: Use, of: str, error: Exception, options: dict[str, Any]
) -> None:
    """Not even copies work from then on: the save fails with an error of ours, and harms nothing."""
    path = tmp_path / "c"
    healthy = FailingGpu(of=(of,))
    use(healthy)
    save(path, OLD, **OPTIONS)
    assert len(healthy.steps) >= 2
    before = file_names(path)
    for at in range(len(healthy.steps)):
        use(FailingGpu(error, at, True, (of,)))
        with nothing_leaks():
            failure = failure_of(lambda: save(path, NEW, **options, **OPTIONS))
        assert failure is not None and failure.kind is errors.CodecUnavailableError, f"{of} {at}: {failure}"
        assert options or "illegal memory access" in failure.text
        assert file_names(path) == before, "left behind"
        assert same(load(path, OLD, verify="full", engine="cpu"), OLD)
    use(FailingGpu())
    save(path, NEW, **OPTIONS)
    assert same(load(path, OLD, verify="full"), NEW)


def test_a_gpu_that_is_lost_in_batch_n_of_a_load(tmp_path: Path, use: Use) -> None:
    healthy = FailingGpu(of=("copy in",))
    use(healthy)
    save(tmp_path, OLD, **OPTIONS)
    load(tmp_path, OLD, verify="full")
    assert len(healthy.steps) >= 2
    for at in range(len(healthy.steps)):
        use(FailingGpu(RuntimeError("CUDA error: unspecified launch failure"), at, True, ("copy in",)))
        with nothing_leaks():
            failure = failure_of(lambda: load(tmp_path, OLD, verify="full"))
        assert failure is not None and failure.kind is errors.CodecUnavailableError, f"copy {at}: {failure}"
        assert "undefined" in failure.text
        use(FailingGpu())
        assert same(load(tmp_path, OLD, verify="full"), OLD), "the next load is whole"


# ---- a real GPU ------------------------------------------------------------------------------------------------------

REASON = cuda_unavailable_reason()


@pytest.fixture
def without_memory() -> Iterator[Callable[[], None]]:
    """Leaves the process next to no device memory beyond what it has."""

    def leave() -> None:
        release_device_memory()  # the saves before may have left the engines what the next one needs
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")
def test_a_real_gpu_without_memory(tmp_path: Path, without_memory: Callable[[], None]) -> None:
    """What only a GPU can encode fails the save, and the old checkpoint loads; the rest goes on on the CPU."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    old, new = ({"w": torch.randn(64 << 20, generator=generator, device="cuda")} for _ in range(2))

    def save_as(codec: str, state: State) -> None:
        writer = NvcompWriter(tmp_path / codec, codec=codec, engine="cuda", sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def loads(codec: str, into: State) -> State:
        dcp.load(into, storage_reader=NvcompReader(tmp_path / codec, verify="full"), no_dist=True)
        return into

    for codec in ("ans", "planes-zstd"):
        save_as(codec, old)
    before = file_names(tmp_path / "ans")
    into = {"w": torch.zeros_like(old["w"])}
    without_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        failure = failure_of(lambda: save_as("ans", new))
        save_as("planes-zstd", new)
    assert failure is not None and failure.kind is errors.CodecUnavailableError, failure
    assert file_names(tmp_path / "ans") == before
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(loads("planes-zstd", into)["w"], new["w"])
    assert torch.equal(loads("ans", into)["w"], old["w"])

"""engine="cuda" is never ignored: where CUDA can't run, saves and loads fail before they do anything."""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompReader
from dcp_nvcomp.engines import choice, notices
from dcp_nvcomp.engines.choice import warm_up
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.health import DeviceHealth
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason, find_reason, load_cupy, nvcomp_version
from dcp_nvcomp.engines.tensors import PinnedMemory, plain_allocate
from dcp_nvcomp.errors import CodecUnavailableError
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import assert_loads, save

from .kernels_on_cpu import ReferenceKernels
from .stand_in_pool import install_stand_ins

STATE = {"w": torch.arange(9.0)}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

REASON = cuda_unavailable_reason()
without_cuda = pytest.mark.skipif(REASON is None, reason="CUDA can run here")


def refusal(caught: pytest.ExceptionInfo[CheckpointException]) -> str:
    error = caught.value.failures[0][0]
    assert isinstance(error, CodecUnavailableError)
    return str(error)


@without_cuda
def test_a_save_is_refused_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "run", STATE, engine="cuda")
    assert "engine='cuda' can't run here" in refusal(caught) and str(REASON) in refusal(caught)
    assert not (tmp_path / "run").exists()


@without_cuda
def test_a_load_is_refused_before_it_reads(tmp_path: Path) -> None:
    save(tmp_path, STATE)
    into = {"w": torch.full((9,), 7.0)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, storage_reader=NvcompReader(tmp_path, engine="cuda"), no_dist=True)
    assert "engine='cuda' can't run here" in refusal(caught) and str(REASON) in refusal(caught)
    assert bool((into["w"] == 7).all())


@without_cuda
def test_metadata_can_be_read_all_the_same(tmp_path: Path) -> None:
    save(tmp_path, STATE)
    assert list(NvcompReader(tmp_path, engine="cuda").read_metadata().state_dict_metadata) == ["w"]


def test_tensors_in_host_memory_are_handled_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA can run, engine="cuda" is about GPU tensors: a state has others too, such as step counters."""
    monkeypatch.setattr(choice, "cuda_unavailable_reason", lambda: None)
    save(tmp_path, STATE, engine="cuda")
    assert_loads(tmp_path, STATE, engine="cuda")


@without_cuda
@pytest.mark.parametrize("engine", ["auto", "cpu"])
def test_others_say_nothing(tmp_path: Path, engine: str) -> None:
    save(tmp_path, STATE, engine=engine)
    assert_loads(tmp_path, STATE, engine=engine)


# ---- what a machine lacks --------------------------------------------------------------------------------------------


class Installed:
    def __init__(self, version: str) -> None:
        self.__version__ = version


def missing() -> Installed:
    raise ModuleNotFoundError("No module named 'nvidia'")


def broken() -> Installed:
    raise OSError("libnvcomp.so.6: cannot open shared object file")


def test_reasons() -> None:
    def six() -> Installed:
        return Installed("6.0.0")

    assert find_reason("13.0", 1, six, six) is None
    assert "built without CUDA" in str(find_reason(None, 0, six, six))
    assert "no CUDA device" in str(find_reason("13.0", 0, six, six))
    assert "pip install 'dcp-nvcomp[cu13]'" in str(find_reason("13.0", 1, missing, six))
    assert "nvidia-nvcomp-cu12 is not installed" in str(find_reason("12.8", 1, missing, six))
    assert "cupy-cuda12x is not installed" in str(find_reason("12.8", 1, six, missing))
    assert "does not load (OSError: libnvcomp" in str(find_reason("13.0", 1, broken, six))
    assert "nvCOMP 5.1.0 is installed, but version 6" in str(find_reason("13.0", 1, lambda: Installed("5.1.0"), six))


@pytest.fixture
def cupy_that_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that warns, slowly, while it is imported; CuPy does so of what it finds or misses on a machine."""
    code = "import time, warnings\ntime.sleep(0.2)\nwarnings.warn('CUDA path could not be detected', UserWarning)\n"
    (tmp_path / "cupy.py").write_text(code + "__version__ = '13.6.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    yield
    sys.modules.pop("cupy", None)


def test_a_warning_while_importing_is_no_reason(cupy_that_warns: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_reason("13.0", 1, lambda: Installed("6.0.0"), load_cupy) is None
    assert sys.modules["cupy"].__version__ == "13.6.0"


def test_threads_that_import_at_once_leave_warnings_as_they_were(cupy_that_warns: None) -> None:
    before = list(warnings.filters)
    threads = [threading.Thread(target=load_cupy) for _ in range(4)]
    for thread in threads:
        thread.start()
        thread.join(0.05)  # the first one is in the middle of it when the next begins
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_here() -> None:
    reason = cuda_unavailable_reason()
    if torch.version.cuda is None:
        assert reason is not None and "built without CUDA" in reason
    if reason is not None:
        with pytest.raises(CodecUnavailableError, match="can't run here"):
            CudaEngine(torch.device("cuda"), EnginePolicy(1))


def test_nvcomp_version() -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nvcomp") is None:
        with pytest.raises(CodecUnavailableError, match="pip install"):
            nvcomp_version()
    else:
        assert nvcomp_version().split(".")[0].isdigit()


# ---- warnings that fail no save and no load, where warnings are errors either ----------------------------------------


FLOATS = {f"{at}": torch.randn(50_000) for at in range(5)}


def no_pinned_memory(nbytes: int) -> memoryview:
    raise RuntimeError("CUDA error: out of memory")


def runtime_warnings(caught: pytest.WarningsRecorder) -> int:
    return sum(issubclass(one.category, RuntimeWarning) for one in caught)


# ---- page-locked memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, TypeError, OSError])
def test_without_page_locked_memory_another_will_do(error: type[Exception]) -> None:
    asked: list[int] = []

    def fails(nbytes: int) -> memoryview:
        asked.append(nbytes)
        raise error("none left")

    memory = PinnedMemory(fails)
    with pytest.warns(RuntimeWarning, match=rf"5000 bytes of page-locked .*{error.__name__}: none left") as caught:
        assert [len(memory.allocate(nbytes)) for nbytes in (5000, 6000)] == [5000, 6000]
    assert len(caught) == 1 and asked == [5000], "once is enough"


def test_several_threads_warn_once() -> None:
    together = threading.Barrier(8)

    def fails(nbytes: int) -> memoryview:
        together.wait(60)
        raise MemoryError("none left")

    memory = PinnedMemory(fails)
    threads = [threading.Thread(target=memory.allocate, args=(1000,)) for _ in range(8)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1


def test_a_save_without_page_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "pinned_allocate", no_pinned_memory)
    stand_ins = install_stand_ins(monkeypatch, ReferenceKernels())
    with pytest.warns(RuntimeWarning, match="page-locked memory") as caught:
        save(tmp_path, FLOATS)
    assert runtime_warnings(caught) == 1 and stand_ins.calls("encode"), "on the GPU all the same"
    assert_loads(tmp_path, FLOATS, engine="cpu", verify="full")


def test_a_load_without_page_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, FLOATS, engine="cpu")
    monkeypatch.setattr(decoding, "pinned_allocate", no_pinned_memory)
    stand_ins = install_stand_ins(monkeypatch, ReferenceKernels())
    with pytest.warns(RuntimeWarning, match="page-locked memory") as caught:
        assert_loads(tmp_path, FLOATS)
    assert runtime_warnings(caught) == 1 and stand_ins.calls("decode"), "on the GPU all the same"


# ---- warnings that are errors ----------------------------------------------------------------------------------------


def warned_by_the_choice() -> None:
    chosen = choice.EngineChoice("auto")
    chosen._unavailable_reason = lambda: "there is no driver"  # type: ignore[method-assign]
    assert not chosen.on_cuda(torch.device("cuda", 0))


NOTICES: dict[str, Callable[[], object]] = {
    "failed": lambda: DeviceHealth("cuda:0").failed("there is no driver"),
    "was wrong": lambda: DeviceHealth("there is no driver").was_wrong(3, "encoded"),
    "fell back": lambda: DeviceHealth("cuda:0").fell_back("there is no driver"),
    "unavailable": warned_by_the_choice,
    "page-locked": lambda: PinnedMemory(no_pinned_memory).allocate(10),
}


@pytest.mark.parametrize("notice", NOTICES)
def test_a_warning_is_logged_where_warnings_are_errors(notice: str, lost_warnings: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NOTICES[notice]()
    (logged,) = lost_warnings
    assert "there is no driver" in logged or "out of memory" in logged
    lost_warnings.clear()


def test_no_save_and_no_load_fails_where_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_warnings: list[str]
) -> None:
    def no_device(device: torch.device) -> None:
        raise TypeError("incompatible constructor arguments")

    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    install_stand_ins(monkeypatch, ReferenceKernels(), make_device=no_device)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        save(tmp_path, FLOATS)
        assert_loads(tmp_path, FLOATS)
    assert len(lost_warnings) == 1 and "TypeError" in lost_warnings[0]
    lost_warnings.clear()


def test_a_warning_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        notices.warn("something")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("made_by", ["call", "manager"])
def test_an_engine_that_is_made_and_tested_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by: str) -> None:
    monkeypatch.setattr(buffers, "pinned_allocate", plain_allocate)
    monkeypatch.setattr(choice, "current_device", lambda: torch.device("cpu"))
    pool = install_stand_ins(monkeypatch, ReferenceKernels(), self_test=True)
    warm_up("cpu")
    assert not pool.devices
    if made_by == "call":
        warm_up()
    else:
        from dcp_nvcomp import CheckpointManager  # which needs more than a GPU host has

        CheckpointManager(tmp_path / "run").close()
    tests = len(pool.calls("encode"))
    assert len(pool.devices) == 1 and tests and pool.devices[0].held_nbytes <= 4 << 20
    warm_up()
    assert len(pool.calls("encode")) == tests
    save(tmp_path / "a", {"w": torch.randn(100_000)}, device_memory_budget=8 << 20)
    assert len(pool.calls("encode")) == tests + 1, "no other self-test"

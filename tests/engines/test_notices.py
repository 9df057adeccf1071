"""What costs time and nothing else is warned of, and fails no save or load: not where warnings are errors either."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_nvcomp.engines import choice, notices
from dcp_nvcomp.engines.cuda.health import DeviceHealth
from dcp_nvcomp.engines.tensors import PinnedMemory, plain_allocate
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import assert_loads, save

from .kernels_on_cpu import ReferenceKernels
from .stand_in_pool import install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {f"{at}": torch.randn(50_000) for at in range(5)}


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
        save(tmp_path, STATE)
    assert runtime_warnings(caught) == 1 and stand_ins.calls("encode"), "on the GPU all the same"
    assert_loads(tmp_path, STATE, engine="cpu", verify="full")


def test_a_load_without_page_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, STATE, engine="cpu")
    monkeypatch.setattr(decoding, "pinned_allocate", no_pinned_memory)
    stand_ins = install_stand_ins(monkeypatch, ReferenceKernels())
    with pytest.warns(RuntimeWarning, match="page-locked memory") as caught:
        assert_loads(tmp_path, STATE)
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
        save(tmp_path, STATE)
        assert_loads(tmp_path, STATE)
    assert len(lost_warnings) == 1 and "TypeError" in lost_warnings[0]
    lost_warnings.clear()


def test_a_warning_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        notices.warn("something")
    assert caught[0].filename == __file__

"""With a kept plan, a state is copied before DCP's part of the save begins: nothing of that may matter to the copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.staging import staged_by
from dcp_nvcomp import AsyncSave, NvcompWriter, async_save, errors
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegment
from dcp_nvcomp.saving.kept import forget_all, process_state
from tests.checkpoints import assert_loads, file_names
from tests.conformance.sabotage import Sabotage
from tests.states import State

PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """The background process, which takes seconds to start, serves all tests."""
    yield
    forget_all()


@pytest.fixture(autouse=True)
def like_a_new_process() -> None:
    """Instead of the fixture that forgets what is kept after each test."""


def state_of(seed: int) -> State:
    return {"w": torch.full((1 << 18,), float(seed)), "nested": {"b": torch.full((1000,), -seed)}, "step": seed}


def begin(state: State, path: Path, **options: Any) -> AsyncSave:
    with staged_by("copy"):
        return async_save(state, path, no_dist=True, **options)


def finish(saving: AsyncSave) -> None:
    saving.upload_completion.result(PATIENCE_SECONDS)


@pytest.fixture
def planned(tmp_path: Path) -> None:
    finish(begin(state_of(0), tmp_path / "first"))


@pytest.mark.usefixtures("planned")
def test_the_caller_goes_on_before_dcp_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, set_up = threading.Event(), NvcompWriter.set_up_storage_writer

    def gated(*arguments: Any, **options: Any) -> None:
        assert go_on.wait(PATIENCE_SECONDS)
        set_up(*arguments, **options)

    monkeypatch.setattr(NvcompWriter, "set_up_storage_writer", gated)
    state = state_of(1)
    saving = begin(state, tmp_path / "second")
    assert saving.staging_completion.done()
    state["w"].zero_()
    state["nested"]["b"].zero_()
    go_on.set()
    finish(saving)
    assert_loads(tmp_path / "second", state_of(1))


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("step", ["prepare_local_plan", "prepare_global_plan", "finish"])
def test_a_failure_after_it_gives_the_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise Sabotage("on purpose")

    budget = {"staging_budget_nbytes": 3 << 19}  # of one state
    with monkeypatch.context() as patch:
        patch.setattr(NvcompWriter, step, fails)
        saving = begin(state_of(1), tmp_path / "second", **budget)
        with pytest.raises(errors.RankFailedError, match="on purpose"):
            finish(saving)
        assert saving.staging_completion.exception() is None
    assert process_state().stores.budget._in_use_nbytes == 0, "the next save would wait for ever"
    finish(begin(state_of(3), tmp_path / "second", **budget))
    assert_loads(tmp_path / "second", state_of(3))


@pytest.mark.usefixtures("planned")
def test_what_staging_raises_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise Sabotage("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(process_state().stores.budget, "reserve", fails)
        saving = begin(state_of(1), tmp_path / "second")
        with pytest.raises(Sabotage):
            saving.staging_completion.result(PATIENCE_SECONDS)
        with pytest.raises(errors.RankFailedError, match="on purpose"):
            finish(saving)
    assert file_names(tmp_path / "second") == set()
    finish(begin(state_of(2), tmp_path / "second"))
    assert_loads(tmp_path / "second", state_of(2))


@pytest.mark.usefixtures("planned")
def test_without_memory_the_state_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(segment: SharedSegment, start: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    process_state().shared.clear()
    monkeypatch.setattr(SharedSegment, "write", refuse)
    state = state_of(1)
    saving = begin(state, tmp_path / "second")
    state["w"].zero_()
    finish(saving)
    assert caplog.text.count("no memory for a copy of it") == 1
    assert_loads(tmp_path / "second", state_of(1))

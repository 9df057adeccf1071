"""async_save that copies the state, and has the copy encoded in the background by a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
import torch
from fsspec.registry import known_implementations

from benchmarks.sinks import LimitedFileSystem
from benchmarks.staging import Staged, staged_by
from dcp_nvcomp import AsyncSave, NvcompWriter, SaveStats, async_save, errors
from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import parse_codec
from dcp_nvcomp.saving.asynchronous.shared_memory import SharedSegment
from dcp_nvcomp.saving.process_state import forget_all, process_state
from dcp_nvcomp.saving.save import spare_core_count
from tests.checkpoints import assert_loads, file_names, save
from tests.conformance.sabotage import Sabotage
from tests.states import State, small_state

assert LimitedFileSystem.protocol == "limited"

PATIENCE_SECONDS = 120.0  # on a busy machine


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """The background process, which takes seconds to start, serves all tests that do not end it."""
    yield
    forget_all()


@pytest.fixture(autouse=True)
def like_a_new_process() -> None:
    """Instead of the fixture that forgets what is kept after each test."""


def begin(state: State, path: Path | str, **options: Any) -> AsyncSave:
    with staged_by("copy"):
        return async_save(state, path, no_dist=True, **options)


def finish(saving: AsyncSave) -> SaveStats:
    stats = SaveStats.of(saving.upload_completion.result(PATIENCE_SECONDS))
    assert stats is not None
    return stats


def many_kinds() -> State:
    generator = torch.Generator().manual_seed(3)
    return {
        **small_state(5),
        "large": torch.randn(700, 900, generator=generator),
        "half": torch.randn(300, 1000, generator=generator).bfloat16(),
        "transposed": torch.randn(40, 50, generator=generator).T,
        "strided": torch.arange(100)[::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "conjugate": torch.randn(9, dtype=torch.complex64, generator=generator).conj(),
        "bool": torch.arange(10) % 3 == 0,
        "byte": torch.arange(200).to(torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(5)),
        "nested": {"list": [1, "two", torch.ones(3)]},
    }


# --- what is saved ---------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("how", ["copy", "encode"])
@pytest.mark.parametrize(
    ("wait", "options"),
    [
        ("staged", {}),
        ("nothing", {}),
        ("staged", {"single_file_per_rank": False}),
        ("staged", {"codec": "none"}),
        ("nothing", {"codec": "zstd"}),
    ],
)
def test_the_checkpoint_is_that_of_save(tmp_path: Path, wait: str, options: dict[str, Any], how: Staged) -> None:
    state = many_kinds()
    expected = {**state, "parameter": torch.ones(5)}
    for number in range(2):  # into fresh memory, then into what is there
        with staged_by(how):
            stats = finish(async_save(state, tmp_path / str(number), no_dist=True, wait=wait, **options))
        assert_loads(tmp_path / str(number), expected, verify="full")
        assert stats.stall_seconds > 0 and (how == "encode" or stats.staged_nbytes > stats.uncompressed_nbytes * 0.99)
    like = save(tmp_path / "like", state, **options).last_save
    assert like is not None and like.totals == stats.totals and len(like.files) == len(stats.files)


def test_what_cannot_be_copied_is_encoded(tmp_path: Path) -> None:
    """A tensor without elements in memory is stored as `torch.save` has it."""
    finish(begin({"w": torch.ones(3), "sparse": torch.eye(3).to_sparse()}, tmp_path))
    assert_loads(tmp_path, {"w": torch.ones(3)})
    assert process_state().shared.nbytes == 0 or process_state().stores.plain.nbytes > 0


def test_a_state_beyond_the_budget_is_encoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(1 << 20)}
    stats = finish(begin(state, tmp_path, staging_budget_nbytes=1 << 20))
    assert "does not fit into staging_budget_nbytes" in caplog.text
    assert 0 < stats.staged_nbytes < 1 << 20
    assert_loads(tmp_path, state)


@pytest.mark.parametrize("wait", ["staged", "nothing"])
@pytest.mark.parametrize("is_planned", [False, True], ids=["first", "copied early"])
def test_memory_that_cannot_be_had(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_planned: bool,
    wait: Literal["staged", "nothing"],
) -> None:
    """Objects are those of the call all the same, which are asked for again."""
    changed = threading.Event()

    def refuse(segment: SharedSegment, start: int, data: memoryview) -> None:
        assert wait == "staged" or changed.wait(PATIENCE_SECONDS)
        raise OSError(28, "No space left on device")

    if is_planned:
        finish(begin({"first": {"of": [0]}, **state_of(0)}, tmp_path / "first"))
    process_state().shared.clear()
    monkeypatch.setattr(SharedSegment, "write", refuse)
    state = {"first": {"of": [1]}, **state_of(1), **({} if is_planned else many_kinds())}
    expected = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    saving = begin(state, tmp_path / "second", wait=wait)
    expected["first"], state["first"]["of"][0] = {"of": [1]}, 2
    changed.set()
    saving.staging_completion.result(PATIENCE_SECONDS)
    state["w"].zero_()
    finish(saving)
    assert caplog.text.count("no memory for a copy of it") == 1
    assert_loads(tmp_path / "second", expected)


# --- memory and processes --------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_memory_and_process_are_kept_until_close(tmp_path: Path) -> None:
    writers, pids, sizes = [], set(), set()
    for number in range(3):
        writers.append(NvcompWriter(tmp_path / str(number)))
        with staged_by("copy"):
            finish(async_save(many_kinds(), storage_writer=writers[-1], no_dist=True))
        pids.add(process_state().background().pid)
        sizes.add(process_state().shared.nbytes)
    (pid,), (size,) = pids, sizes
    assert size >= 4 * 700 * 900
    writers[0].close()
    assert process_state().shared.nbytes == 0
    assert not _is_running(pid)
    with staged_by("copy"):
        finish(async_save(many_kinds(), storage_writer=writers[0], no_dist=True))
    assert process_state().background().pid != pid


def test_states_of_other_sizes(tmp_path: Path) -> None:
    for number, size in enumerate((1000, 3_000_000, 10, 4_000_000, 1000)):
        state = {"w": torch.arange(size)}
        finish(begin(state, tmp_path / str(number)))
        assert_loads(tmp_path / str(number), state)
    maps = Path(f"/proc/{process_state().background().pid}/maps").read_text()
    assert maps.count("memfd:dcp_nvcomp") <= 2, "memory that is not used any more is freed in the process too"


def test_the_callback_runs_here(tmp_path: Path) -> None:
    told: list[SaveStats] = []
    finish(begin(small_state(), tmp_path, on_save=lambda stats: told.append(stats)))
    assert len(told) == 1 and told[0].files


@pytest.mark.parametrize("by_name", [True, False])
def test_a_filesystem_that_was_registered_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    """A class that fsspec knows by its name is found elsewhere; where another one keeps things is not known."""
    assert fsspec.get_filesystem_class("limited") is LimitedFileSystem  # from now on fsspec has the class itself
    if not by_name:
        monkeypatch.delitem(known_implementations, "limited")
    state = {"w": torch.zeros(1 << 20)}
    stats = finish(begin(state, f"limited://{tmp_path}", rate=1e9))
    assert (stats.staged_nbytes == 4 << 20) == by_name
    assert_loads(tmp_path, state)


class _Unpicklable:
    """A codec chooser that only this process has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def choose(self, element: Any, sample: Any, nbytes: int) -> CodecChain:
        chain = parse_codec("zstd").choose(element, sample, nbytes)
        assert isinstance(chain, CodecChain)
        return chain


def test_a_codec_that_only_this_process_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(begin(many_kinds(), tmp_path, codec=_Unpicklable()))
    assert "so training's process does" in caplog.text
    assert_loads(tmp_path, {**many_kinds(), "parameter": torch.ones(5)})


@pytest.mark.parametrize(
    ("count", "ranks", "threads", "spare"), [(2, 1, 1, 1), (2, 2, 1, 0), (96, 8, 1, 11), (8, 1, 8, 0), (2, 4, 1, -1)]
)
def test_spare_cores(count: int, ranks: int, threads: int, spare: int) -> None:
    assert spare_core_count(count, ranks, threads=threads) == spare


@pytest.mark.parametrize(("how", "copies"), [("copy", True), ("encode", False)])
def test_the_state_is_copied_if_a_core_is_spare(tmp_path: Path, how: Staged, copies: bool) -> None:
    state = {"w": torch.zeros(1 << 20)}
    with staged_by(how):
        stats = finish(async_save(state, tmp_path / "disk", no_dist=True))
        assert (stats.staged_nbytes == 4 << 20) == copies
        stats = finish(async_save(state, f"memory://{tmp_path}", no_dist=True))
    assert stats.staged_nbytes < 1 << 20


# --- what fails ------------------------------------------------------------------------------------------------------


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _stopped(path: Path) -> int:
    """Have a background process, and stop it."""
    finish(begin(small_state(), path))
    pid = process_state().background().pid
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.ci
def test_a_process_that_dies_fails_the_save(tmp_path: Path) -> None:
    pid = _stopped(tmp_path)
    saving = begin(many_kinds(), tmp_path)
    assert saving.staging_completion.done() and not saving.upload_completion.done()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(errors.CheckpointError, match=r"background process \d+ .* died \(exit status -9\)"):
        saving.upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, small_state())
    assert len(file_names(tmp_path)) == 3, ".metadata, its copy, one data file"
    finish(begin(many_kinds(), tmp_path))
    assert_loads(tmp_path, {**many_kinds(), "parameter": torch.ones(5)})


def test_a_process_that_died_between_saves(tmp_path: Path) -> None:
    os.kill(_stopped(tmp_path), signal.SIGKILL)
    for _ in range(2):  # whether it is noticed in time or not
        saving = begin(small_state(1), tmp_path)
        if saving.upload_completion.exception(PATIENCE_SECONDS) is None:
            break
    assert_loads(tmp_path, small_state(1))


def test_what_the_process_raises_is_raised(tmp_path: Path) -> None:
    pid = _stopped(tmp_path / "gone")
    saving = begin(many_kinds(), tmp_path / "gone")
    while not process_state().background()._waiting:  # it has come to the process, so the directory was made before
        time.sleep(0.01)
    shutil.rmtree(tmp_path / "gone")
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(errors.StorageError, match="No such file"):
        saving.upload_completion.result(PATIENCE_SECONDS)
    finish(begin(many_kinds(), tmp_path / "gone"))
    assert process_state().background().pid == pid


def _script(text: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


_SAVES = """
import os, sys, time, torch
from benchmarks.staging import staged_by
from dcp_nvcomp import async_save
from dcp_nvcomp.saving.process_state import process_state
state = {"w": torch.arange(1000000)}
def begin(path):
    with staged_by("copy"):
        return async_save(state, path, no_dist=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize("how", ["encode", "copy"])
def test_a_process_that_ends_finishes_its_save_first(tmp_path: Path, how: str) -> None:
    """And removes what it replaced."""
    script = """
import sys, torch
from benchmarks.staging import staged_by
from dcp_nvcomp import async_save
for seed in range(2):
    state = {f"w{n}": torch.full((1000,), float(n + seed)) for n in range(20)}
    with staged_by(sys.argv[2]):
        async_save(state, sys.argv[1], no_dist=True, single_file_per_rank=False)
"""
    process = _script(script, tmp_path, how)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0 and not said, said
    assert_loads(tmp_path, {f"w{n}": torch.full((1000,), float(n + 1)) for n in range(20)})
    assert len(file_names(tmp_path)) == 22


def test_a_save_that_fails_while_the_process_ends_says_so(tmp_path: Path) -> None:
    script = """
import sys, torch
from dcp_nvcomp import async_save
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
def publish(*arguments, **options): raise OSError(5, "on purpose")
PosixFilesystem.publish = publish
async_save({"w": torch.ones(1000)}, sys.argv[1], no_dist=True)
"""
    _, said = _script(script, tmp_path).communicate(timeout=PATIENCE_SECONDS)
    assert "An asynchronous save failed" in said and "on purpose" in said
    assert ".metadata" not in file_names(tmp_path)


def test_storage_works_while_the_interpreter_waits_for_a_save(tmp_path: Path) -> None:
    """No thread can be started any more then, and each file has to be removed or looked at all the same."""
    script = """
import sys, threading
from dcp_nvcomp.storage.open import open_filesystem
def late():
    threading.main_thread().join()
    print(open_filesystem(sys.argv[1]).map(str, range(3)))
threading.Thread(target=late).start()
"""
    out, said = _script(script, tmp_path).communicate(timeout=PATIENCE_SECONDS)
    assert out.strip() == "['0', '1', '2']" and not said, said


@pytest.mark.ci
def test_it_dies_with_training(tmp_path: Path) -> None:
    """Also if a process that training forked, as a data loader does, still has the socket."""
    fork = "if not os.fork():\n    time.sleep(20)\n    os._exit(0)\n"
    end = "print(process_state().background().pid, flush=True)\nsaving = begin(sys.argv[1])\ntime.sleep(60)\n"
    script = _script(_SAVES + "begin(sys.argv[1]).upload_completion.result()\n" + fork + end, tmp_path)
    assert script.stdout is not None and script.stderr is not None
    pid = int(script.stdout.readline())
    script.kill()
    script.wait()
    script.stdout.close()
    script.stderr.close()
    patience = time.monotonic() + PATIENCE_SECONDS
    while _is_running(pid):
        assert time.monotonic() < patience
        time.sleep(0.05)
    assert_loads(tmp_path, {"w": torch.arange(1_000_000)})


@pytest.mark.ci
def test_a_forked_child_saves_on_its_own(tmp_path: Path) -> None:
    finish(begin(small_state(1), tmp_path))
    pid, mine = process_state().background().pid, process_state()
    child = os.fork()
    if child == 0:
        try:
            with staged_by("encode"):
                finish(async_save(small_state(2), tmp_path / "child", no_dist=True))
            finish(begin(small_state(2), tmp_path / "child"))
            good = process_state().background().pid != pid and process_state() is not mine
            process_state().free()
            os._exit(0 if good else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert_loads(tmp_path / "child", small_state(2))
    finish(begin(small_state(3), tmp_path))
    assert process_state().background().pid == pid
    assert_loads(tmp_path, small_state(3))


def state_of(seed: int) -> State:
    return {"w": torch.full((1 << 18,), float(seed)), "nested": {"b": torch.full((1000,), -seed)}, "step": seed}


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

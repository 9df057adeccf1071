"""One manager writes to a run: who may take it over, and who is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp import CheckpointManager, RunInUseError
from dcp_nvcomp.runs.lease import Holder, Lease
from dcp_nvcomp.storage.base import FileInfo, Filesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem


def _own(path: Path) -> Callable[[], Filesystem]:
    return lambda: open_filesystem(path / ".run")


def _take(path: Path, *, run_id: str | None = None, seconds: float = 60.0, take_over: bool = False) -> Lease:
    return Lease.take(_own(path), run_id=run_id, lease_seconds=seconds, take_over=take_over)


def test_a_second_manager_is_told_who_holds_the_run(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path, run_id="first"),
        pytest.raises(RunInUseError, match=rf"job 'first', process {os.getpid()} on .*take_over=True"),
    ):
        CheckpointManager(tmp_path, run_id="second")
    CheckpointManager(tmp_path, run_id="second").close()
    assert len(list((tmp_path / ".run").glob("lease-*"))) == 2, "of the last one, given back, and the one before"


def test_the_same_job_takes_over_at_once_and_the_first_one_learns_of_it(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path, run_id="job", lease_seconds=0.2)
    second = CheckpointManager(tmp_path, run_id="job")
    with pytest.raises(RunInUseError, match=r"taken this run over \(job 'job'"):
        _until(lambda: [first.should_save(step) for step in range(3)])
    first.close()
    assert list((tmp_path / ".run").glob("lease-*")), "the second one's"
    second.close()


def _until(call: Callable[[], object]) -> None:
    for _ in range(2000):
        call()
        time.sleep(0.01)


def _taken_by(path: Path, count: int) -> Lease:
    """Let several threads take a run at once, of which one gets it."""

    def attempt(number: int) -> Lease | None:
        try:
            return _take(path, run_id=str(number))
        except RunInUseError:
            return None

    with ThreadPoolExecutor(count) as pool:
        (lease,) = (lease for lease in pool.map(attempt, range(count)) if lease is not None)
    return lease


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    for _ in range(40):
        _taken_by(tmp_path, 8).release()


def test_a_manager_that_lost_the_run_leaves_the_lease_alone(tmp_path: Path) -> None:
    first = _take(tmp_path, seconds=0.1, run_id="a")
    second = _take(tmp_path, run_id="a")
    until_lost(first)
    first.release()
    with pytest.raises(RunInUseError):
        _take(tmp_path, run_id="b")
    second.release()


def until_lost(lease: Lease) -> None:
    deadline = time.monotonic() + 30
    while not lease.is_lost and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_holder_that_slept_learns_that_others_came_and_went(tmp_path: Path) -> None:
    first = _take(tmp_path, run_id="a", seconds=0.2)
    for _ in range(2):  # one ends before the first looks
        _take(tmp_path, run_id="b", seconds=0.2, take_over=True).release()
    third = _take(tmp_path, run_id="c", seconds=0.2)
    until_lost(first)
    assert first.is_lost and not third.is_lost
    first.release()
    assert "job 'c'" in _refused_within(tmp_path, 10)
    third.release()


def test_a_listing_that_misses_the_own_lease_takes_no_run_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, own = _take(tmp_path), _own(tmp_path)()
    monkeypatch.setattr(PosixFilesystem, "list_files", lambda self: [])  # as of a directory that changes meanwhile
    assert lease._other(own) is None
    (tmp_path / ".run" / "lease-000001").unlink()
    assert lease._other(own) == "its lease was removed"
    lease.release()


# ---- clocks, and what is in the files


def _lease_file(path: Path, *, number: int = 1, data: bytes | None = None, age: float = 0.0, **values: object) -> Path:
    """Write a lease as a job that died has left it, renewed `age` seconds ago."""
    file = path / ".run" / f"lease-{number:06d}"
    file.parent.mkdir(exist_ok=True)
    said = {"run_id": "dead", "host": "there", "pid": 1, "lease_seconds": 0.4, "id": "0" * 32, **values}
    file.write_bytes(json.dumps(said).encode() if data is None else data)
    os.utime(file, times=(time.time() - age,) * 2)
    return file


def _refused_within(path: Path, seconds: float) -> str:
    start = time.monotonic()
    with pytest.raises(RunInUseError) as caught:
        _take(path, run_id="other")
    assert time.monotonic() - start < seconds
    return str(caught.value)


def _taken_after(path: Path, least: float, most: float, **options: Any) -> None:
    start = time.monotonic()
    _take(path, run_id="other", **options).release()
    assert least <= time.monotonic() - start < most


@pytest.mark.parametrize(("age", "least"), [(100, 0.2), (-3e7, 0.4)], ids=["dead", "renewed in the future"])
def test_a_lease_is_watched_for_half_of_its_time_or_all_of_it(tmp_path: Path, age: float, least: float) -> None:
    _lease_file(tmp_path, age=age)
    _taken_after(tmp_path, least, 10)


def test_one_that_looks_alive_is_refused_at_once(tmp_path: Path) -> None:
    _lease_file(tmp_path, age=-1, lease_seconds=60)
    assert "job 'dead', process 1 on there, renewed 0 s ago" in _refused_within(tmp_path, 10)


def test_no_watching_for_the_same_job_a_lease_given_back_and_take_over(tmp_path: Path) -> None:
    for values, options in (({"run_id": "other"}, {}), ({"released": True}, {}), ({}, {"take_over": True})):
        _lease_file(tmp_path, number=50, age=1e6, lease_seconds=3600, **values)
        _taken_after(tmp_path, 0, 10, **options)


@pytest.mark.parametrize("jump", [-3e7, 3e7])
def test_a_clock_that_jumps_gives_no_living_run_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    lease = _take(tmp_path, run_id="living", seconds=0.6)
    real = PosixFilesystem.now_seconds
    monkeypatch.setattr(PosixFilesystem, "now_seconds", lambda self: real(self) + jump)
    assert "job 'living'" in _refused_within(tmp_path, 10)
    assert not lease.is_lost
    lease.release()


def test_renewals_show_where_files_are_stamped_coarsely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _take(tmp_path, run_id="living", seconds=0.6)
    real = PosixFilesystem.list_files

    def without_times(self: PosixFilesystem) -> list[FileInfo]:
        return [dataclasses.replace(file, modified_seconds=None) for file in real(self)]

    monkeypatch.setattr(PosixFilesystem, "list_files", without_times)
    assert "renewed while this one watched" in _refused_within(tmp_path, 10)
    lease.release()
    _lease_file(tmp_path, number=100)
    _taken_after(tmp_path, 0.4, 10)


@pytest.mark.ci
def test_who_gives_it_back_while_it_is_watched_is_followed_at_once(tmp_path: Path) -> None:
    _lease_file(tmp_path, age=1e6, lease_seconds=600)
    giving_back = threading.Timer(0.3, lambda: _lease_file(tmp_path, age=1e6, released=True))
    giving_back.start()
    _taken_after(tmp_path, 0, 30)
    giving_back.join()


def test_of_those_that_watch_one_gets_it(tmp_path: Path) -> None:
    _lease_file(tmp_path, age=100)
    _taken_by(tmp_path, 4).release()


_DEEP = b"[" * 100_000
_LIMITLESS = '{"id": "x", "run_id": "dead", "lease_seconds": %s}'


@pytest.mark.ci
@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"no json", _DEEP, b"[1]", b'{"id": 7}', b"\xff\xfe{", b"1" * 5000, b" " * (1 << 17)]
    + [(_LIMITLESS % value).encode() for value in ("1e400", "NaN", "-Infinity")],
    ids=range(12),
)
@pytest.mark.parametrize("age", [0.0, -3e7])
def test_a_file_that_is_no_lease_keeps_nobody_out(tmp_path: Path, data: bytes, age: float) -> None:
    _lease_file(tmp_path, data=data, age=age)
    _taken_after(tmp_path, 0, 10, take_over=True)
    _lease_file(tmp_path, number=100, data=data, age=age)
    (tmp_path / ".run" / "lease-000002").unlink()
    _taken_after(tmp_path, 0.1, 10, seconds=0.2)


@pytest.mark.parametrize("seconds", ["true", '"60"', "null", "-5", "0", "1" + "0" * 400, "1e300", "[]"])
def test_times_that_are_none_are_not_believed(seconds: str) -> None:
    holder = Holder.of((_LIMITLESS % seconds).encode())
    assert holder is not None and 0 < holder.lease_seconds <= 3600


def test_a_file_that_is_no_lease_takes_no_run_away(tmp_path: Path) -> None:
    lease = _take(tmp_path, run_id="living", seconds=0.3)
    _lease_file(tmp_path, number=500, data=b"", age=1e6)
    (tmp_path / ".run" / "lease-000001").write_bytes(b"")
    time.sleep(0.5)
    assert not lease.is_lost
    assert "job 'living'" in _refused_within(tmp_path, 10)
    lease.release()


@pytest.mark.ci
@pytest.mark.parametrize("take_over", [True, False])
@pytest.mark.parametrize("data", [None, b""])
def test_the_last_number_keeps_nobody_out(tmp_path: Path, data: bytes | None, take_over: bool) -> None:
    _lease_file(tmp_path, number=10**12 - 1, data=data, age=100)
    lease = _take(tmp_path, run_id="a", seconds=0.2, take_over=take_over)
    assert "job 'a'" in _refused_within(tmp_path, 10)
    time.sleep(0.3)
    assert not lease.is_lost
    lease.release()
    _take(tmp_path, run_id="b").release()


def test_what_is_no_file_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / ".run" / "lease-000001").mkdir(parents=True)
    (tmp_path / ".run" / "lease-000002").symlink_to("nowhere")
    lease = _take(tmp_path, run_id="a")
    assert "job 'a'" in _refused_within(tmp_path, 10)
    lease.release()


def test_nothing_in_a_lease_is_obeyed_by_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {"host": "\x1b[2Jhost\r\n\u202e", "run_id": "\x9b1m\x07", "pid": "\x1b]0;title\x07"}
    _lease_file(tmp_path, lease_seconds=60, **names)
    words = _refused_within(tmp_path, 10)
    _lease_file(tmp_path, lease_seconds=0.2, age=100, **names)
    _take(tmp_path, run_id="other").release()
    for text in (words, *caplog.messages):
        assert text.isprintable(), text
    assert "\\x1b[2Jhost" in words and len(caplog.messages) == 1

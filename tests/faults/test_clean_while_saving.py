"""Saves, loads and cleanings of one path at the same time: nothing live is ever removed.

What protects a published checkpoint is that a root names it: its files count as old as soon as its save has returned.
What protects a save under way is its age: no test touches its files' times. Savers that are killed meanwhile are the
soak's (tests/soak).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter, tools
from dcp_nvcomp.errors import CheckpointReplacedError, ConcurrentSaveError
from dcp_nvcomp.maintenance import opening
from dcp_nvcomp.storage.base import FileInfo
from dcp_nvcomp.storage.open import open_filesystem
from tests.stores.kinds import parameters
from tests.stores.places import Place, error_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TWO_DAYS_SECONDS = 172_800.0


@dataclass
class Aging:
    """A checkpoint's place, and which of its files are said to be two days old."""

    place: Place
    old: set[str] = field(default_factory=set)

    def open(self, *arguments: Any, **options: Any) -> Any:
        """What a cleaning opens: the real thing, but for the ages."""
        filesystem = open_filesystem(*arguments, **options)
        real = filesystem.list_files
        filesystem.list_files = lambda: [self._aged(file) for file in real()]  # type: ignore[method-assign]
        return filesystem

    def _aged(self, file: FileInfo) -> FileInfo:
        assert file.modified_seconds is not None
        return replace(file, modified_seconds=file.modified_seconds - TWO_DAYS_SECONDS * (file.name in self.old))

    def save(self, number: int, writer: type[NvcompWriter] = NvcompWriter) -> Any:
        """Save; as soon as it has returned, all that it wrote counts as old."""
        one = writer(self.place.url, single_file_per_rank=False, **self.place.options)
        error = self.place.save(number, one)
        if one.last_save is not None:
            self.old |= {*one.last_save.files, f"__{one.last_save.save_id}.metadata", ".metadata"}
        return error

    def leave_orphan(self) -> None:
        name = f"__0_0_{uuid.uuid4().hex}.distcp"
        self.old.add(name)
        output = self.place.filesystem().open_output(name)
        output.write(b"of a save that was killed")
        output.close()

    def load(self) -> int | None:
        """Which state is there; None where a save replaced it during the load."""
        try:
            return self.place.loaded()
        except dcp.CheckpointException as failure:
            if isinstance(error_of(failure), CheckpointReplacedError):
                return None
            raise

    def clean(self) -> Any:
        return tools.clean(self.place.url, storage_options=self.place.options)


@pytest.fixture(params=parameters("disk", "moto", "ceph"))
def aging(
    request: pytest.FixtureRequest, kind_named: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Aging]:
    kind = kind_named(request.param)
    aging = Aging(Place(*kind.place()))
    monkeypatch.setattr(opening, "open_filesystem", aging.open)
    yield aging
    kind.remove(aging.place.url)


class Runner:
    """Threads that repeat something until all are to stop; the first error of any stops all."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []

    @contextmanager
    def repeating(self, work: Callable[[], Any]) -> Iterator[list[Any]]:
        """Meanwhile a thread does it again and again; gives the results so far."""
        results: list[Any] = []

        def loop() -> None:
            while not self.stop.is_set():
                try:
                    results.append(work())
                except BaseException as error:
                    self.errors.append(error)
                    self.stop.set()

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield results
        finally:
            self.stop.set()
            thread.join()

    def check(self) -> None:
        if self.errors:
            raise self.errors[0]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition() and not self.errors:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        self.check()


@pytest.mark.ci
@pytest.mark.parametrize("saves", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_saves_loads_and_cleanings_at_once(aging: Aging, saves: int) -> None:
    """Two savers replace each other's checkpoints, and leave orphans, under two cleanings and a load."""
    assert aging.save(0) is None
    runner, numbers, lock, saved = Runner(), iter(range(1, 1 << 30)), threading.Lock(), list[int]()

    def one_save() -> None:
        with lock:
            number = next(numbers)
            aging.leave_orphan()
        error = aging.save(number)
        if error is None:
            saved.append(number)
        else:  # Ceph answers the slower of two of the same moment with 500, after which it is not known what was done
            assert isinstance(error, ConcurrentSaveError) and error.outcome_unknown, error
            assert aging.place.url.startswith("s3://"), error

    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(runner.repeating(one_save))
        cleanings = [stack.enter_context(runner.repeating(aging.clean)) for _ in range(2)]
        loads = stack.enter_context(runner.repeating(aging.load))
        runner.wait_for(lambda: len(saved) >= saves and min(map(len, cleanings)) >= 3 and len(loads) >= 3)
    runner.check()
    assert sum(len(cleaning.orphans) for results in cleanings for cleaning in results) > 0
    assert aging.load() in saved
    aging.old |= aging.place.names()  # nothing is under way any more
    aging.clean()
    assert aging.place.left() == set()
    assert tools.verify(aging.place.url, storage_options=aging.place.options, full=True).findings == ()


def test_loads_always_succeed_while_cleaning(aging: Aging) -> None:
    """With no save under way nothing is replaced, so every load must go through."""
    aging.save(7)
    live, runner = aging.place.names(), Runner()
    with ExitStack() as stack:
        cleanings = stack.enter_context(runner.repeating(aging.clean))
        loads = stack.enter_context(runner.repeating(aging.load))
        stack.enter_context(runner.repeating(aging.leave_orphan))
        runner.wait_for(lambda: len(cleanings) >= 5 and len(loads) >= 5)
    runner.check()
    assert set(loads) == {7}
    aging.clean()
    assert aging.place.names() == live


class Pausing(NvcompWriter):
    """Some cleanings run when its data files are written, before it publishes, and after that."""

    pause: Callable[[], None]

    def write_data(self, *arguments: Any) -> Any:
        done = super().write_data(*arguments)
        type(self).pause()
        return done

    def finish(self, *arguments: Any, **options: Any) -> None:
        type(self).pause()
        super().finish(*arguments, **options)
        type(self).pause()


def test_age_protects_a_save_under_way(aging: Aging) -> None:
    """No root names its files, and several cleanings see them."""
    aging.save(1)
    runner, young = Runner(), []
    with runner.repeating(aging.clean) as cleanings:

        def pause() -> None:
            start = len(cleanings)
            runner.wait_for(lambda: len(cleanings) >= start + 2)  # the second one began after this
            young.append(cleanings[-1].young)

        Pausing.pause = staticmethod(pause)  # type: ignore[assignment]
        assert aging.save(2, Pausing) is None
    runner.check()
    written, before_publishing, after = young
    assert written == before_publishing >= 2
    assert after == 0
    assert aging.load() == 2

"""Where a save goes, and under which id: the constructor, `checkpoint_id=`, `reset` and `writer.path = ...`."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_nvcomp import NvcompReader, NvcompWriter
from tests.conformance.sabotage import FailingSavePlanner


def save(writer: NvcompWriter, value: float, place: Path | None = None, **options: Any) -> None:
    dcp.save({"w": torch.full((8,), float(value))}, storage_writer=writer, checkpoint_id=place, no_dist=True, **options)


def value_at(place: Path) -> float:
    state = {"w": torch.zeros(8)}
    dcp.load(state, storage_reader=NvcompReader(place), no_dist=True)
    return state["w"][0].item()


def on_another_thread(call: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(call).result(60)


Step = Callable[[NvcompWriter, Path], NvcompWriter | None]


def saves(value: float, place: str | None = None, *, how: str = "here") -> Step:
    def step(writer: NvcompWriter, at: Path) -> None:
        where = at / place if place else None
        if how == "another thread":
            on_another_thread(lambda: save(writer, value, where))
        elif how == "async_save":
            state = {"w": torch.full((8,), float(value))}
            dcp.async_save(state, storage_writer=writer, checkpoint_id=where, no_dist=True).result(60)
        elif how == "never began":
            with pytest.raises(CheckpointException, match="set_up_planner"):
                save(writer, value, where, planner=FailingSavePlanner("set_up_planner"))
        else:
            save(writer, value, where)
            assert writer.last_save is not None and where in (None, Path(writer.last_save.checkpoint_id))

    return step


def moves(place: str) -> Step:
    def step(writer: NvcompWriter, at: Path) -> None:
        writer.path = at / place  # a Path too
        assert writer.path == writer.checkpoint_id == str(at / place)

    return step


def resets(place: str) -> Step:
    def step(writer: NvcompWriter, at: Path) -> None:
        writer.reset(at / place)
        assert writer.path == writer.checkpoint_id == str(at / place)

    return step


def is_pickled(writer: NvcompWriter, at: Path) -> NvcompWriter:
    sent: NvcompWriter = pickle.loads(pickle.dumps(writer))
    return sent


# What is done with a writer, and what is then where.
STEPS: dict[str, tuple[list[Step], dict[str, float]]] = {
    "path after checkpoint_id": ([saves(1, "a"), moves("b"), saves(2)], {"a": 1, "b": 2}),
    "path after reset": ([resets("a"), moves("b"), saves(1)], {"b": 1}),
    "the last place holds, as with the stock writer": (
        [saves(1, "a"), saves(2), moves("b"), saves(3, "c")],
        {"a": 2, "c": 3},
    ),
    "path after a save that never began": (
        [saves(1, how="never began"), saves(1, "a", how="never began"), moves("b"), saves(2)],
        {"b": 2},
    ),
    "a checkpoint_id of a background thread does not move the next save": (
        [moves("b"), saves(1, "a", how="async_save"), saves(2)],
        {"a": 1, "b": 2},
    ),
    "a place given on the own thread is the latest word": (
        [moves("b"), saves(1, "c"), saves(2, "d", how="another thread"), saves(3)],
        {"c": 3, "d": 2},
    ),
    "path travels with a pickle": ([saves(1, "a"), moves("b"), is_pickled, saves(2)], {"a": 1, "b": 2}),
    "an explicit path stays explicit in a pickle": (
        [moves("b"), is_pickled, saves(1, "a", how="another thread"), saves(2)],
        {"a": 1, "b": 2},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_where_saves_go(tmp_path: Path, name: str) -> None:
    steps, expected = STEPS[name]
    writer = NvcompWriter(tmp_path / "unused")
    for step in steps:
        writer = step(writer, tmp_path) or writer
    assert {path.name: value_at(path) for path in tmp_path.iterdir()} == expected


def test_path_after_storage_meta(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path / "a")
    announced = writer.storage_meta()
    writer.path = str(tmp_path / "b")
    save(writer, 1)
    assert value_at(tmp_path / "b") == 1 and not (tmp_path / "a").exists()
    assert NvcompReader(tmp_path / "b").read_metadata().storage_meta.save_id == announced.save_id


def test_storage_meta_during_a_save(tmp_path: Path) -> None:
    """It describes the save under way, and does not move it."""
    writer, seen = NvcompWriter(tmp_path / "unused"), []

    class Asks(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            seen.append(writer.storage_meta())
            return super().create_local_plan()

    save(writer, 1, tmp_path / "a", planner=Asks())
    stored = NvcompReader(tmp_path / "a").read_metadata().storage_meta
    assert [(meta.checkpoint_id, meta.save_id) for meta in seen] == [(str(tmp_path / "a"), stored.save_id)]


def test_an_id_of_its_own_after_a_failed_save(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path)
    with pytest.raises(CheckpointException, match="resolve_data"):
        save(writer, 1, planner=FailingSavePlanner("resolve_data", survivors=0))
    failed = writer.save_id
    save(writer, 2)
    assert NvcompReader(tmp_path).read_metadata().storage_meta.save_id == writer.save_id != failed


def test_path_set_on_another_thread(tmp_path: Path) -> None:
    """An executor's thread saved before, to a `checkpoint_id`; then the main thread sets the path."""
    writer = NvcompWriter(tmp_path / "unused")
    may_go_on, saved = threading.Event(), threading.Event()

    def saves() -> None:
        save(writer, 1, tmp_path / "a")
        saved.set()
        assert may_go_on.wait(60)
        save(writer, 2)

    thread = threading.Thread(target=saves)
    thread.start()
    assert saved.wait(60)
    writer.path = str(tmp_path / "b")
    may_go_on.set()
    thread.join()
    assert (value_at(tmp_path / "a"), value_at(tmp_path / "b")) == (1, 2)


def test_a_place_given_in_the_background_holds_as_with_stock(tmp_path: Path) -> None:
    """As long as the path was never set explicitly."""
    state = {"w": torch.ones(8)}
    for writer in (FileSystemWriter(tmp_path / "stock"), NvcompWriter(tmp_path / "ours")):
        place = tmp_path / type(writer).__name__
        dcp.async_save(state, storage_writer=writer, checkpoint_id=place, no_dist=True).result(60)
        (place / ".metadata").unlink()
        dcp.async_save(state, storage_writer=writer, no_dist=True).result(60)
        assert (place / ".metadata").exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("is_explicit", [False, True])
def test_a_retry_goes_where_it_was_announced(tmp_path: Path, is_explicit: bool) -> None:
    """After a failed save on a thread that did not make the writer, without another `reset`."""
    writer = NvcompWriter(tmp_path / "a")
    if is_explicit:
        writer.path = str(tmp_path / "a")
    save(writer, 1)

    def fails_and_retries() -> None:
        writer.reset(tmp_path / "x")
        writer.set_up_storage_writer(True)  # begins, and then fails
        failed = writer.save_id
        announced = writer.storage_meta()
        assert announced is not None and announced.checkpoint_id == str(tmp_path / "x")
        writer.set_up_storage_writer(True)
        assert writer.checkpoint_id == str(tmp_path / "x")
        assert writer.save_id != failed
        plan = writer.prepare_local_plan(SavePlan([]))
        writer.prepare_global_plan([plan])
        writer.finish(Metadata({}, storage_meta=writer.storage_meta()), [])

    on_another_thread(fails_and_retries)
    assert value_at(tmp_path / "a") == 1
    assert (tmp_path / "x" / ".metadata").exists()


def test_an_asynchronous_save_keeps_its_place(tmp_path: Path) -> None:
    reached, may_go_on = threading.Event(), threading.Event()

    class Waits(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            reached.set()  # between `reset` and `set_up_storage_writer`
            assert may_go_on.wait(60)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer = NvcompWriter(tmp_path / "unused")
    upload = dcp.async_save(
        {"w": torch.ones(8)}, storage_writer=writer, checkpoint_id=tmp_path / "a", planner=Waits(), no_dist=True
    )
    assert reached.wait(60)
    writer.path = str(tmp_path / "b")
    may_go_on.set()
    upload.result(60)
    save(writer, 2)
    assert (value_at(tmp_path / "a"), value_at(tmp_path / "b")) == (1, 2)


def test_cached_plans_do_not_bring_the_old_place_back(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = f"test-{tmp_path}"  # the cache is the class's
    writer = NvcompWriter(tmp_path / "unused")
    save(writer, 1, tmp_path / "a", planner=planner)
    for value, name in enumerate("bcd", start=2):
        writer.path = str(tmp_path / name)
        save(writer, value, planner=planner)
    assert [value_at(tmp_path / name) for name in "abcd"] == [1, 2, 3, 4]


def test_a_copy_has_its_own_path(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path / "a")
    other = copy.copy(writer)
    other.path = str(tmp_path / "b")
    assert (writer.path, other.path) == (str(tmp_path / "a"), str(tmp_path / "b"))


def test_checkpoint_id_in_a_hook_is_that_of_the_save(tmp_path: Path) -> None:
    """A subclass that looks where it is, on a background thread."""

    class Looks(NvcompWriter):
        seen: str

        def finish(self, metadata: Any, results: Any) -> None:
            self.seen = self.checkpoint_id
            super().finish(metadata, results)

    writer = Looks(tmp_path / "unused")
    dcp.async_save({"w": torch.ones(8)}, storage_writer=writer, checkpoint_id=tmp_path / "a", no_dist=True).result(60)
    assert writer.seen == str(tmp_path / "a")


def test_path_set_in_on_save(tmp_path: Path) -> None:
    """The next place may be chosen when a save is done."""
    writer = NvcompWriter(tmp_path / "0", on_save=lambda stats: setattr(writer, "path", str(tmp_path / "1")))
    save(writer, 1)
    save(writer, 2)
    assert (value_at(tmp_path / "0"), value_at(tmp_path / "1")) == (1, 2)


def test_save_id_and_load_id_and_storage_data(tmp_path: Path) -> None:
    """The stock writer's and reader's public attributes."""
    writer, reader = NvcompWriter(tmp_path), NvcompReader(tmp_path)
    before = writer.save_id
    assert before == writer.save_id == writer.storage_meta().save_id
    save(writer, 1)
    assert writer.save_id == before == reader.read_metadata().storage_meta.save_id
    save(writer, 2)
    assert writer.save_id == reader.read_metadata().storage_meta.save_id != before
    writer.reset()
    assert writer.save_id not in (before, reader.read_metadata().storage_meta.save_id)
    dcp.async_save({"w": torch.ones(8)}, storage_writer=writer, checkpoint_id=tmp_path / "a", no_dist=True).result(60)

    assert reader.storage_data == {}
    assert reader.read_metadata().storage_meta.load_id == reader.load_id
    dcp.load({"w": torch.zeros(8)}, storage_reader=reader, no_dist=True)
    assert [index.fqn for index in reader.storage_data] == ["w"]
    before = reader.load_id
    reader.reset(tmp_path / "a")
    assert reader.load_id != before and reader.storage_data == {}


def test_save_id_of_an_asynchronous_save(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path)
    save(writer, 1)
    dcp.async_save({"w": torch.ones(8)}, storage_writer=writer, checkpoint_id=tmp_path / "a", no_dist=True).result(60)
    assert writer.save_id == NvcompReader(tmp_path / "a").read_metadata().storage_meta.save_id

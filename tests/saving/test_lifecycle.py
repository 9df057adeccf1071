"""One writer, many saves: whatever came before, no committed checkpoint is ever harmed."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.codecs import Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.format.metadata.roots import Root, read_root
from dcp_nvcomp.loading.job import LoadJob
from dcp_nvcomp.saving import commit, saves
from dcp_nvcomp.saving.commit import LastPublished
from dcp_nvcomp.saving.job import SaveJob
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, failure_of, file_names, save, save_stock
from tests.conformance.sabotage import FailingSavePlanner
from tests.effort import THOROUGH
from tests.states import constant_state


class FailsToFinish(NvcompWriter):
    fails = False

    def finish(self, metadata: Any, results: Any) -> None:
        if self.fails:
            raise RuntimeError("another rank failed")
        super().finish(metadata, results)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(12 if THOROUGH else 5))
def test_random_sequence_of_saves(tmp_path: Path, seed: int) -> None:
    """Paths, failures, plan caching, pickling: after each step every checkpoint that was committed still loads."""
    draw = random.Random(seed)
    caching = DefaultSavePlanner(enable_plan_caching=True)
    caching._cached_plans_key = f"test-{tmp_path}"  # the cache is the class's: keep it apart from other tests'
    writer = FailsToFinish(tmp_path / "p0")
    committed: dict[Path, dict[str, Any]] = {}
    for step in range(14):
        path = tmp_path / f"p{draw.randrange(4)}"
        content = constant_state(step, count=draw.choice([3, 3, 3, 4]))
        how = draw.choice(["plain", "plain", "caching", "pickled", "fails to finish", "fails to write"])
        if how == "pickled":
            writer = pickle.loads(pickle.dumps(writer))
        writer.fails = how == "fails to finish"
        planner = {"caching": caching, "fails to write": FailingSavePlanner("resolve_data", survivors=0)}.get(how)
        try:
            dcp.save(content, storage_writer=writer, checkpoint_id=path, planner=planner, no_dist=True)
        except CheckpointException:
            assert how.startswith("fails")
        else:
            committed[path] = content
        for place, expected in committed.items():
            assert_loads(place, expected)


def test_overlapping_saves_of_one_writer(tmp_path: Path) -> None:
    """Two asynchronous saves at once: each goes where it was sent."""
    first_is_writing, second_is_done = threading.Event(), threading.Event()

    class Waits(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            first_is_writing.set()
            assert second_is_done.wait(30)
            return super().resolve_data(write_item)

    writer = NvcompWriter(tmp_path / "unused")
    one = dcp.async_save(
        constant_state(1), storage_writer=writer, checkpoint_id=tmp_path / "one", planner=Waits(), no_dist=True
    )
    assert first_is_writing.wait(30)
    two = dcp.async_save(constant_state(2), storage_writer=writer, checkpoint_id=tmp_path / "two", no_dist=True)
    two.result()
    second_is_done.set()
    one.result()
    assert_loads(tmp_path / "one", constant_state(1))
    assert_loads(tmp_path / "two", constant_state(2))


def test_a_name_that_is_taken_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves.uuid, "uuid4", lambda: copy.copy(UUID))
    save(tmp_path, constant_state(1))
    assert isinstance(failure_of(lambda: save(tmp_path, constant_state(2))), errors.StorageError)
    assert_loads(tmp_path, constant_state(1))


class UUID:
    hex = "0123456789abcdef" * 2


def _failing_publish(real: Callable[..., None], *, before: bool) -> Callable[..., None]:
    def publish(self: Filesystem, name: str, data: bytes, *, overwrite: bool = True) -> None:
        if name == ".metadata" and before:
            raise errors.StorageError("lost", path=name)
        real(self, name, data, overwrite=overwrite)
        if name == ".metadata":
            raise errors.StorageError("the reply was lost", path=name)

    return publish


def test_published_but_not_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save counts; the old files stay, as the storage is not to be relied on."""
    save(tmp_path, constant_state(1))
    old = {path.name for path in tmp_path.glob("*.distcp")}
    monkeypatch.setattr(PosixFilesystem, "publish", _failing_publish(PosixFilesystem.publish, before=False))
    writer = save(tmp_path, constant_state(2))
    monkeypatch.undo()
    assert_loads(tmp_path, constant_state(2))
    assert old <= {path.name for path in tmp_path.glob("*.distcp")}
    dcp.save(constant_state(3), storage_writer=writer, checkpoint_id=tmp_path / "elsewhere", no_dist=True)
    assert_loads(tmp_path, constant_state(2))


def test_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, constant_state(1))
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(PosixFilesystem, "publish", _failing_publish(PosixFilesystem.publish, before=True))
    assert isinstance(failure_of(lambda: save(tmp_path, constant_state(2))), errors.StorageError)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == before
    assert_loads(tmp_path, constant_state(1))


def test_old_metadata_can_not_have_anything_removed(tmp_path: Path) -> None:

    save_stock(tmp_path, constant_state(1))
    mine = [tmp_path / "notes.txt", tmp_path / "best" / "__0_0.distcp"]
    mine[1].parent.mkdir()
    for file in mine:
        file.write_text("mine")
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    named = [".metadata", "notes.txt", "best/__0_0.distcp"]
    for name, info in zip(named, metadata.storage_data.values(), strict=True):
        info.relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.warns(UserWarning, match="an existing checkpoint of stock DCP"):
        save(tmp_path, constant_state(2))
    assert [file.read_text() for file in mine] == ["mine"] * 2
    assert_loads(tmp_path, constant_state(2))


def test_overwrite_false_sees_rank_local_metadata(tmp_path: Path) -> None:
    dcp.save(constant_state(1), storage_writer=NvcompWriter(tmp_path), no_dist=True, use_collectives=False)
    error = failure_of(lambda: save(tmp_path, constant_state(2), overwrite=False))
    assert isinstance(error, errors.CheckpointExistsError)
    assert_loads(tmp_path, constant_state(1))


def test_on_save_that_raises_is_a_warning(tmp_path: Path) -> None:
    def boom(stats: Any) -> None:
        raise ValueError("no mail server")

    with pytest.warns(RuntimeWarning, match="is saved, but on_save raised ValueError: no mail server"):
        save(tmp_path, constant_state(1), on_save=boom)
    assert_loads(tmp_path, constant_state(1))


def test_metadata_and_footer_must_agree_on_shapes(tmp_path: Path) -> None:
    """Rows that `.metadata` does not know of would stay as they were in the destination."""
    save(tmp_path, {"w": torch.ones(6, 50)})
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["w"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.size = tensor.chunks[0].sizes = torch.Size([4, 50])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of(lambda: assert_loads(tmp_path, {"w": torch.ones(4, 50)}))
    assert isinstance(error, errors.FileMismatchError)
    assert "disagrees" in str(error)


@pytest.mark.parametrize("columns", [4, 1 << 18])  # whose rows are a block each
def test_expanded_destination_is_refused(tmp_path: Path, columns: int) -> None:
    save(tmp_path, {"w": torch.arange(3.0 * columns).reshape(3, columns)})
    into = {"w": torch.zeros(columns).expand(3, columns)}
    with pytest.raises(CheckpointException, match="share their memory"):
        dcp.load(into, storage_reader=NvcompReader(tmp_path), no_dist=True)


class OwnCoder(Zstd):
    name = "own"


class Chooses:
    def __init__(self, chain: CodecChain) -> None:
        self.chain = chain

    def choose(self, element: Any, sample: Any, nbytes: int) -> CodecChain:
        return self.chain


@pytest.mark.parametrize(
    "codec",
    [
        CodecChain(Bytes(), OwnCoder()),
        Chooses(CodecChain(Bytes(), OwnCoder())),
        Chooses(CodecChain(Planes(2), Zstd())),
        CodecChain(Planes(4)),
    ],
)
def test_codec_that_could_not_be_read_again(tmp_path: Path, codec: Any) -> None:
    error = failure_of(lambda: save(tmp_path, {"w": torch.randn(1000)}, codec=codec))
    assert isinstance(error, errors.ConfigurationError) and "codec=" in str(error)
    assert not list(tmp_path.glob("*.distcp"))


@pytest.mark.parametrize("direction", ["save", "load"])
@pytest.mark.usefixtures("keyboard_interrupts")
def test_interrupt_while_waiting_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """Ctrl-C while the calling thread waits for the last file or read: it is passed on, after all threads ended."""
    content = {"w": torch.randn(1 << 20)}
    save(tmp_path / "old", content)
    main, interrupted = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt_main(*_: Any) -> None:
        if threading.current_thread().name.startswith("dcp-") and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(main, signal.SIGINT)
            threading.Event().wait(0.3)  # long enough for the main thread to be inside join

    into = {"w": torch.zeros(1 << 20)}
    if direction == "save":
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (interrupt_main(), real(fd))[1])
        run = lambda: save(tmp_path / "new", content)  # noqa: E731
    else:
        real_read = PosixFilesystem.read_into
        monkeypatch.setattr(PosixFilesystem, "read_into", lambda *a: (interrupt_main(), real_read(*a))[1])
        run = lambda: dcp.load(into, storage_reader=NvcompReader(tmp_path / "old"), no_dist=True)  # noqa: E731
    assert isinstance(failure_of(run), KeyboardInterrupt)
    assert interrupted.is_set()
    assert not [t for t in threading.enumerate() if t.name.startswith("dcp-") and t.is_alive()]
    if direction == "save":
        assert not list((tmp_path / "new").glob("*"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_jobs_are_freed_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[weakref.ref[Any]] = []
    for kind in (SaveJob, LoadJob):

        def remembered(job: Any, *arguments: Any, _real: Any = kind.run) -> Any:
            jobs.append(weakref.ref(job))
            return _real(job, *arguments)

        monkeypatch.setattr(kind, "run", remembered)
    state = {"w": torch.randn(1 << 20), "small": torch.randn(3), "object": {"a", "b"}}
    dcp.save(state, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    dcp.load(state, storage_reader=NvcompReader(tmp_path), no_dist=True)
    assert len(jobs) == 2 and [job() for job in jobs] == [None, None]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the metadata files that a commit parses."""
    found: list[str] = []

    def reading(filesystem: Filesystem, name: str) -> Root:
        found.append(name)
        return read_root(filesystem, name)

    monkeypatch.setattr(commit, "read_root", reading)
    return found


def save_again(writer: NvcompWriter, seed: int) -> None:
    dcp.save(constant_state(seed), storage_writer=writer, no_dist=True)


def assert_alone(path: Path, seed: int) -> None:
    """Only the files of this save are left, and it loads."""
    assert_loads(path, constant_state(seed))
    assert file_names(path) == read_root(open_filesystem(path), ".metadata").names()


def test_its_own_checkpoint_is_not_parsed(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    for seed in range(3):
        save_again(writer, seed)
        assert_alone(tmp_path, seed)
    assert parsed == []


def test_what_another_writer_published_is_parsed(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    save_again(writer, 1)
    save(tmp_path, constant_state(2))
    save_again(writer, 3)
    assert parsed == [".metadata"] * 2  # of the same size, as the saves are alike
    assert_alone(tmp_path, 3)


def test_a_copy_of_a_writer_knows_nothing(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    save_again(writer, 1)
    save_again(pickle.loads(pickle.dumps(writer)), 2)
    assert parsed == [".metadata"]
    assert_alone(tmp_path, 2)


def test_each_of_two_places_is_looked_at(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path / "a")
    for seed, place in enumerate("abab"):
        dcp.save(constant_state(seed), checkpoint_id=tmp_path / place, storage_writer=writer, no_dist=True)
    assert parsed == [".metadata"] * 2
    assert_alone(tmp_path / "a", 2)
    assert_alone(tmp_path / "b", 3)


def test_changed_bytes_of_the_same_size_are_parsed(tmp_path: Path, parsed: list[str]) -> None:
    """They can't be, so their files are kept, as always."""
    writer = NvcompWriter(tmp_path)
    save_again(writer, 1)
    kept = {name for name in os.listdir(tmp_path) if name.endswith(".distcp")}
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    save_again(writer, 2)
    assert parsed == [".metadata"]
    assert kept <= file_names(tmp_path)
    assert_loads(tmp_path, constant_state(2))


def test_a_checkpoint_that_was_removed_is_forgotten(tmp_path: Path, parsed: list[str]) -> None:
    writer = NvcompWriter(tmp_path)
    save_again(writer, 1)
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    save_again(writer, 2)
    assert parsed == []
    assert_alone(tmp_path, 2)


def test_it_is_known_by_its_bytes_wherever_they_are(tmp_path: Path) -> None:
    save(tmp_path, constant_state(1))
    filesystem, last = open_filesystem(tmp_path), LastPublished()
    data = (tmp_path / ".metadata").read_bytes()
    assert last.names_if_current(filesystem, len(data)) is None
    last.note(data, ["a"])
    assert last.names_if_current(filesystem, len(data)) == {"a"}
    assert last.names_if_current(filesystem, len(data) - 1) is None
    last.note(data[:-1] + b"?", ["a"])
    assert last.names_if_current(filesystem, len(data)) is None

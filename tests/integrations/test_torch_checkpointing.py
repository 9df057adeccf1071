"""torch_checkpointing: its manager through our storage, and the storage's promises one by one."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import load_compressed_checkpoint
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptDataError,
    FormatError,
)
from tests.checkpoints import flip
from tests.conftest import S3Store
from tests.effort import sampled
from tests.faults.intercept import WRITING, Counted, Fault, FaultyCalls, intercept_system_calls
from tests.integrations.launch import check_resumed, needs, start
from tests.states import assert_same, blank

SAVED, LAST = 3, 5


@pytest.fixture(autouse=True)
def torch_checkpointing() -> None:
    needs("torch_checkpointing", "torch-checkpointing==0.1.1")


@pytest.fixture(
    params=[
        "disk",
        "memory",
        "s3",
        pytest.param("real_s3", marks=pytest.mark.ci),
        pytest.param("azure", marks=pytest.mark.ci),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Return a directory of some storage, and its options."""
    if request.param == "disk":
        return str(tmp_path), {}
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}", {}
    store: S3Store = request.getfixturevalue(f"{request.param}_store")
    return f"{store[0]}/checkpoints", store[1]


def storage_of(place: tuple[str, dict[str, Any]], **options: Any) -> Any:
    """Return a storage as another job would make it."""
    from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig

    config = NvcompStorageConfig(place[0], storage_options=place[1], **options)
    return pickle.loads(pickle.dumps(config)).create_storage()


def state(seed: int = 0) -> dict[str, Any]:
    """Return a small state with a tensor that is compressed."""
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 200, generator=generator), "b": torch.randn(3, generator=generator), "step": seed}


def put(storage: Any, path: str, value: Any) -> None:
    """Write a file as torch_checkpointing's writer does."""
    storage.mkdir(Path(path).parent)
    with storage.get_write_stream(Path(path), value) as stream:
        torch.save(value, stream)


def get(storage: Any, path: str) -> Any:
    """Read a file as its reader does."""
    from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

    return load_torch_serialized_from_storage(Path(path), storage)


def commit(storage: Any, name: str = "step-1", seed: int = 0) -> dict[str, Any]:
    """Write a checkpoint of two ranks and commit it."""
    for rank in range(2):
        put(storage, f"tmp_{name}/model_{rank}.pt", state(seed + rank))
    storage.write(Path(f"tmp_{name}/parts/config.json"), b'{"a": 1}')
    assert storage.exists(Path(f"tmp_{name}"))
    assert not storage.exists(Path(name))
    storage.rename(Path(f"tmp_{name}"), Path(name), is_directory=True)
    return state(seed)


def test_a_checkpoint_is_there_once_it_is_committed(place: tuple[str, dict[str, Any]]) -> None:
    expected = commit(storage_of(place))
    reader = storage_of(place)
    assert_same(get(reader, "step-1/model_0.pt"), expected)
    assert_same(get(reader, "step-1/model_1.pt"), state(1))
    assert reader.read(Path("step-1/parts/config.json")) == b'{"a": 1}'
    assert reader.ls(Path("step-1")) == ["model_0.pt", "model_1.pt", "parts"]
    assert reader.ls(Path("step-1/parts")) == ["config.json"]
    assert reader.isdir(Path("step-1")) and reader.isdir(Path("step-1/parts"))
    assert not reader.isdir(Path("step-1/model_0.pt")) and reader.exists(Path("step-1/model_0.pt"))
    assert not reader.exists(Path("step-1/model_2.pt")) and not reader.exists(Path("step-2"))
    data = io.BytesIO()
    torch.save(expected, data)
    assert reader.getsize(Path("step-1/model_0.pt")) == len(data.getvalue())
    with pytest.raises(FileNotFoundError):
        reader.stream_read(Path("step-1/model_2.pt"))
    with pytest.raises(OSError, match="can't be removed"):
        reader.delete(Path("step-1/model_0.pt"))
    reader.rmdir(Path("step-1"))
    assert not reader.exists(Path("step-1")) and not storage_of(place).exists(Path("step-1"))


def test_what_was_committed_is_never_overwritten(place: tuple[str, dict[str, Any]]) -> None:
    storage = storage_of(place)
    late = storage_of(place)
    put(late, "tmp_step-1/model_0.pt", state(9))  # another job, which is slower
    expected = commit(storage)
    for other in (storage, storage_of(place)):
        with pytest.raises(FileExistsError):
            other.mkdir(Path("tmp_step-1"))
    with pytest.raises(FileExistsError):
        late.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    assert_same(get(storage_of(place), "step-1/model_0.pt"), expected)


def test_a_load_sees_what_was_committed_since(place: tuple[str, dict[str, Any]]) -> None:
    storage, reader = storage_of(place), storage_of(place)
    for seed in (0, 5):
        expected = commit(storage, seed=seed)
        assert reader.exists(Path("step-1"))  # as each load asks first
        assert_same(get(reader, "step-1/model_0.pt"), expected)
        storage.rmdir(Path("step-1"))
    assert not reader.exists(Path("step-1"))


def test_what_a_killed_save_left_is_no_part_of_the_next(place: tuple[str, dict[str, Any]]) -> None:
    killed = storage_of(place)
    for rank in range(4):  # of four ranks, the next save has two
        put(killed, f"tmp_step-1/model_{rank}.pt", state(50 + rank))
    reader = storage_of(place)
    assert not reader.exists(Path("step-1")) and not reader.exists(Path("tmp_step-1"))
    commit(storage_of(place))
    assert storage_of(place).ls(Path("step-1")) == ["model_0.pt", "model_1.pt", "parts"]
    assert_same(get(storage_of(place), "step-1/model_0.pt"), state(0))
    assert not killed.ls(Path("tmp_step-1")), "its files were removed"


@pytest.mark.parametrize("what", ["missing", "short"])
def test_a_checkpoint_with_a_missing_file_is_refused_by_all_ranks(tmp_path: Path, what: str) -> None:
    commit(storage_of((str(tmp_path), {})))
    (file,) = (tmp_path / "step-1").glob(".data-*/model_1.pt")
    if what == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointNotFoundError, match=r"model_1\.pt"):
        storage_of((str(tmp_path), {})).exists(Path("step-1"))


def test_every_flip_is_found(tmp_path: Path) -> None:
    expected = commit(storage_of((str(tmp_path), {})))
    (file,) = (tmp_path / "step-1").glob(".data-*/model_0.pt")
    nbytes = file.stat().st_size
    for position in range(0, nbytes, nbytes // 40):
        flip(file, position)
        with contextlib.suppress(CheckpointError):  # zeros between blocks belong to nothing
            assert_same(get(storage_of((str(tmp_path), {})), "step-1/model_0.pt"), expected)
        flip(file, position)


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    storage = storage_of((str(tmp_path), {}))
    commit(storage, "a")
    commit(storage, "b", seed=2)
    (mine,), (other,) = ((tmp_path / name).glob(".data-*/model_0.pt") for name in "ab")
    described = json.loads((tmp_path / "a" / ".commit.json").read_text())
    described["files"]["model_0.pt"][0] = other.stat().st_size
    mine.write_bytes(other.read_bytes())
    (tmp_path / "a" / ".commit.json").write_text(json.dumps(described))
    with pytest.raises(FormatError, match="swapped or mixed"):
        get(storage_of((str(tmp_path), {})), "a/model_0.pt")


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda described: [],
    "another directory": lambda described: described | {"data": "../other"},
    "no name": lambda described: described | {"data": 5},
    "files as a list": lambda described: described | {"files": ["a"]},
    "a row that is short": lambda described: described | {"files": {"model_0.pt": [1, 2]}},
    "a size below zero": lambda described: described | {"files": {"model_0.pt": [-1, 2, 3]}},
    "a size that is text": lambda described: described | {"files": {"model_0.pt": ["1", 2, 3]}},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_an_invalid_commit_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    commit(storage_of((str(tmp_path), {})))
    file = tmp_path / "step-1" / ".commit.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(FormatError, match="not what a commit writes"):
        storage_of((str(tmp_path), {})).exists(Path("step-1"))


def test_names_that_lead_elsewhere_are_names_of_files(tmp_path: Path) -> None:
    commit(storage_of((str(tmp_path), {})))
    (tmp_path / "secret").write_bytes(b"x" * 10)
    file = tmp_path / "step-1" / ".commit.json"
    described = json.loads(file.read_text())
    described["files"]["../../secret"] = [10, 1, 1]
    file.write_text(json.dumps(described))
    with pytest.raises(CheckpointNotFoundError, match="secret"):
        storage_of((str(tmp_path), {})).exists(Path("step-1"))


def occupied(kind: str, storage: Any, path: str) -> None:
    """Put something at a path."""
    if kind == "file":
        storage.write(Path(path), b"old")
    elif kind == "empty directory":
        storage.mkdir(Path(path))
    elif kind == "populated directory":
        storage.mkdir(Path(path))
        storage.write(Path(path) / "a", b"old")


@pytest.mark.parametrize(
    ("source", "target", "is_done"),
    [
        ("directory", "absent", True),
        ("directory", "empty directory", True),
        ("directory", "populated directory", False),
        ("directory", "file", False),
        ("file", "absent", True),
        ("file", "file", True),
        ("file", "populated directory", False),
    ],
)
def test_the_table_of_rename(place: tuple[str, dict[str, Any]], source: str, target: str, is_done: bool) -> None:
    storage = storage_of(place)
    occupied(target, storage, "new")
    path = "tmp_new" if source == "directory" else "old"
    try:
        if source == "directory":
            put(storage, "tmp_new/a", state())
        else:
            storage.write(Path("old"), b"new")
        storage.rename(Path(path), Path("new"), is_directory=source == "directory")
    except OSError:
        assert not is_done
        if target == "file":
            assert storage.read(Path("new")) == b"old"
        else:
            assert storage.read(Path("new/a")) == b"old"
        return
    assert is_done
    if source == "directory":
        assert_same(get(storage, "new/a"), state())
    else:
        assert storage.read(Path("new")) == b"new" and not storage.exists(Path("old"))


def test_renames_that_are_no_commit_are_refused(place: tuple[str, dict[str, Any]]) -> None:
    storage = storage_of(place)
    put(storage, "tmp_a/x", state())
    with pytest.raises(OSError, match="temp_dir_prefix"):
        storage.rename(Path("a"), Path("b"), is_directory=True)
    with pytest.raises(OSError, match="can only be renamed to"):
        storage.rename(Path("tmp_a"), Path("b"), is_directory=True)
    with pytest.raises(FileNotFoundError):
        storage.rename(Path("tmp_c"), Path("c"), is_directory=True)
    with pytest.raises(FileNotFoundError):
        storage.rename(Path("c"), Path("d"))
    with pytest.raises(FileNotFoundError):
        storage.delete(Path("c"))


def test_paths_as_pathlib_leaves_them(place: tuple[str, dict[str, Any]]) -> None:
    storage = storage_of(place)
    put(storage, f"{place[0]}/tmp_step-1/model_0.pt", state())
    root = Path(place[0])
    storage.rename(root / "tmp_step-1", root / "step-1", is_directory=True)
    assert_same(get(storage, f"{place[0]}/step-1/model_0.pt"), state())
    assert_same(get(storage, "step-1/model_0.pt"), state())
    assert storage.remap_path(root / "step-1").startswith(place[0])
    with pytest.raises(ConfigurationError, match="not below"):
        storage.exists(Path("/elsewhere/step-1"))


def test_safetensors_are_compressed_by_their_dtypes(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save
    tensors = {name: torch.randn(200, 300) for name in ("a", "b")} | {"h": torch.randn(50_000).bfloat16()}
    data = save(tensors)
    storage = storage_of((str(tmp_path), {}))
    storage.write(Path("x.safetensors"), data)
    storage.write(Path("broken.safetensors"), data[: len(data) // 2])
    assert storage.read(Path("x.safetensors")) == data
    assert storage.read(Path("broken.safetensors")) == data[: len(data) // 2]
    assert (tmp_path / "x.safetensors").stat().st_size < 0.85 * len(data)


def test_its_own_checkpoints_load(tmp_path: Path) -> None:
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    plain = LocalFileSystemStorageConfig(use_direct_io=False).create_storage()
    (tmp_path / "step-1").mkdir()
    with plain.get_write_stream(tmp_path / "step-1" / "model_0.pt", None) as stream:
        torch.save(state(), stream)
    storage = storage_of((str(tmp_path), {}))
    assert storage.exists(Path("step-1")) and storage.ls(Path("step-1")) == ["model_0.pt"]
    assert_same(get(storage, "step-1/model_0.pt"), state())
    with storage.stream_read(Path("step-1/model_0.pt")) as stream:
        assert stream.seek(5) == 5
        assert stream.read(7) == (tmp_path / "step-1" / "model_0.pt").read_bytes()[5:12]


def test_one_file_of_a_checkpoint_is_a_compressed_checkpoint(tmp_path: Path) -> None:
    expected = commit(storage_of((str(tmp_path), {})))
    (file,) = (tmp_path / "step-1").glob(".data-*/model_0.pt")
    assert_same(load_compressed_checkpoint(file), expected)


def test_the_config_is_made_by_all_ranks_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="init_process_group"):
        storage_of((str(tmp_path), {}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigurationError, match="codec"):
        storage_of((str(tmp_path), {}), codec="zip")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make managers of one rank, and close them."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, CheckpointLoaderConfig
    from torch_checkpointing.staging import CheckpointStagerConfig

    from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig

    made: list[Any] = []

    def make(**options: Any) -> Any:
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            storage_config=NvcompStorageConfig(tmp_path),
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            load=CheckpointLoaderConfig(**options),
        )
        made.append(CheckpointManager(config))
        return made[-1]

    yield make
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.close(), made))


@pytest.mark.ci
def test_the_manager(tmp_path: Path, manager: Callable[..., Any]) -> None:
    mine = manager()
    for number in (1, 2):
        mine.save(f"step-{number}", {"model": state(number), "step": number}).result()
    for number in (1, 2):
        into = blank({"model": state(number), "step": number})
        assert_same(dict(mine.load(f"step-{number}", into=into)), {"model": state(number), "step": number})
    (file,) = (tmp_path / "step-1").glob(".data-*/model_0.pt")
    flip(file, file.stat().st_size // 3)
    with pytest.raises(CorruptDataError):
        mine.load("step-1", into=blank({"model": state(1)}))
    with pytest.raises(FileNotFoundError):
        mine.load("step-3", into=blank({"model": state(1)}))


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_and_resumed(tmp_path: Path, ranks: int) -> None:
    start("torch_checkpointing", tmp_path, "train", killed=True, ranks=ranks)
    assert sorted(path.name for path in (tmp_path / "run").glob("*/.commit.json")) == [".commit.json"]
    start("torch_checkpointing", tmp_path, "resume", ranks=ranks)
    check_resumed(tmp_path, SAVED, LAST)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_other_ranks_and_placements(tmp_path: Path, saved: int, loaded: int) -> None:
    """From rows to columns, too."""
    start("torch_checkpointing", tmp_path, "save", ranks=saved)
    output = start("torch_checkpointing", tmp_path, "reshard", ranks=loaded)
    assert output.count("resharded exactly") == 2 * loaded


class Killing(Counted):
    """A hook under which the process kills itself at one call."""

    def __init__(self, fatal: int) -> None:
        super().__init__()
        self._fatal = fatal

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if at == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)


def commit_until_killed(path: str, at: int) -> None:
    """Do what a rank that writes does, up to a call."""
    intercept_system_calls(setattr, Killing(at))
    commit(storage_of((path, {})), seed=1)


def check_after_failure(path: Path, where: str) -> bool:
    """Check that what was committed before is there, and the new checkpoint wholly or not at all."""
    reader = storage_of((str(path), {}))
    assert_same(get(reader, "old/model_0.pt"), state(7))
    is_there: bool = reader.exists(Path("step-1"))
    if is_there:
        for rank in range(2):
            assert_same(get(reader, f"step-1/model_{rank}.pt"), state(1 + rank))
    else:  # and a save goes on from there
        commit(storage_of((str(path), {})), seed=3)
        assert_same(get(storage_of((str(path), {})), "step-1/model_0.pt"), state(3))
        assert len(list((path / "step-1").iterdir())) == 2, where
    return is_there


def calls_of_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the calls that writing and committing a checkpoint makes."""
    calls = Counted()
    with monkeypatch.context() as patch:
        intercept_system_calls(patch.setattr, calls)
        commit(storage_of((str(path), {})), seed=1)
    return calls.names


@pytest.mark.ci
def test_killed_at_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = calls_of_a_commit(tmp_path / "count", monkeypatch)
    commit(storage_of((str(tmp_path / "old"), {})), "old", seed=7)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", __name__])
    found = []
    for at in sampled(range(len(names)), 4):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", path)
        child = context.Process(target=commit_until_killed, args=(str(path), at))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, f"call {at}, {names[at]}"
        found.append(check_after_failure(path, f"killed at call {at}, {names[at]}"))
        shutil.rmtree(path)
    assert found == sorted(found) and set(found) == {False, True}, "from the commit on it is there"


@pytest.mark.ci
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC from then on"])
def test_each_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    names = calls_of_a_commit(tmp_path / "count", monkeypatch)
    commit(storage_of((str(tmp_path / "old"), {})), "old", seed=7)
    lasting = WRITING if number == errno.ENOSPC else frozenset()
    for at in sampled(range(len(names)), 3):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", path)
        failed = False
        with monkeypatch.context() as patch:
            intercept_system_calls(patch.setattr, FaultyCalls(Fault(at, number, lasting=lasting)))
            try:
                commit(storage_of((str(path), {})), seed=1)
            except (CheckpointError, AssertionError):  # or a storage that does not see what it should
                failed = True
        is_there = check_after_failure(path, f"call {at}, {names[at]}")
        assert failed or is_there, f"call {at}, {names[at]}: a save that did not work succeeded"
        shutil.rmtree(path)

"""torch_checkpointing's storage: its promises one by one, on several kinds of storage."""

from __future__ import annotations

import contextlib
import io
import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import load_compressed_checkpoint
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    FormatError,
)
from dcp_nvcomp.streams.reader import StreamIndex
from tests.checkpoints import flip
from tests.conftest import S3Store
from tests.integrations.launch import needs
from tests.integrations.torch_checkpointing_storage import commit, get, put, state, storage_of
from tests.states import assert_same


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
    reader.rmdir(Path("step-1"))
    assert not reader.exists(Path("step-1")) and not storage_of(place).exists(Path("step-1"))


def test_torch_saves_without_crcs_of_its_own_while_a_stream_is_open_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have theirs. Other threads, and whatever comes afterwards, are as they were."""
    storage, expected = storage_of((str(tmp_path), {})), state(0)
    with ThreadPoolExecutor() as other:
        with storage.get_write_stream(Path("saved.pt"), expected) as stream:
            assert not torch.serialization.get_crc32_options()
            assert other.submit(torch.serialization.get_crc32_options).result()
            torch.save(expected, stream)
        assert torch.serialization.get_crc32_options()
        with pytest.raises(KeyError), storage.get_write_stream(Path("failed.pt"), expected):
            raise KeyError
        assert torch.serialization.get_crc32_options()
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")  # where that setting was for the whole process
    with storage.get_write_stream(Path("older.pt"), expected) as stream:
        assert torch.serialization.get_crc32_options()
        torch.save(expected, stream)
    assert_same(torch.load(io.BytesIO(storage.read(Path("saved.pt")))), expected)
    assert_same(load_compressed_checkpoint(tmp_path / "saved.pt"), expected)


def test_a_file_is_described_once_for_many_streams_and_anew_if_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    described = StreamIndex.read

    def counted(*arguments: Any) -> StreamIndex:
        read.append(arguments)
        return described(*arguments)

    monkeypatch.setattr(StreamIndex, "read", counted)
    storage, path = storage_of((str(tmp_path), {})), Path("saved.pt")
    for value in (1, 2):
        put(storage, str(path), state(value))
        for _ in range(3):
            assert_same(get(storage, str(path)), state(value))
        assert len(read) == value
    for number in range(20):  # more than are remembered
        put(storage, f"{number}.pt", state(number))
        assert_same(get(storage, f"{number}.pt"), state(number))
    assert len(read) == 22


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


def test_nothing_changes_what_was_committed(place: tuple[str, dict[str, Any]]) -> None:
    """Neither by its name nor by the one that it was written under."""
    storage = storage_of(place)
    expected = commit(storage)
    storage.write(Path("other"), b"x")
    for path in (Path("step-1"), Path("tmp_step-1")):
        changes: list[Callable[[], Any]] = [
            partial(storage.write, path / "model_0.pt", b"x"),
            partial(storage.write, path / "more.json", b"x"),
            partial(storage.stream_write, path / "model_0.pt"),
            partial(storage.delete, path / "model_0.pt"),
            partial(storage.rename, path / "model_0.pt", Path("elsewhere")),
            partial(storage.rename, Path("other"), path / "model_0.pt"),
            partial(storage.mkdir, path / "more"),
        ]
        for change in changes:
            with pytest.raises(FileExistsError):
                change()
    with pytest.raises(FileExistsError):
        storage.rmdir(Path("tmp_step-1"))
    assert not storage.exists(Path("tmp_step-1")) and storage.ls(Path("tmp_step-1")) == []
    assert not storage.exists(Path("tmp_step-1/model_0.pt"))
    assert storage.ls(Path("step-1")) == ["model_0.pt", "model_1.pt", "parts"]
    assert_same(get(storage, "step-1/model_0.pt"), expected)


def test_an_id_is_saved_once_in_a_job(tmp_path: Path) -> None:
    """A rank whose save has ended may be in the next one before rank 0 commits the first."""
    first, other = storage_of((str(tmp_path), {})), storage_of((str(tmp_path), {}))
    for storage in (first, other):
        put(storage, "tmp_step-1/model_0.pt", state())
        with pytest.raises(FileExistsError, match="begun to save here before"):
            storage.mkdir(Path("tmp_step-1"))


def test_what_is_in_a_directory_that_is_written(place: tuple[str, dict[str, Any]]) -> None:
    storage = storage_of(place)
    storage.mkdir(Path("tmp_a"))
    assert storage.exists(Path("tmp_a")) and storage.ls(Path("tmp_a")) == []
    storage.write(Path("tmp_a/parts/config.json"), b"{}")
    storage.write(Path("tmp_a/new"), b"x")
    assert storage.ls(Path("tmp_a")) == ["new", "parts"] and storage.ls(Path("tmp_a/parts")) == ["config.json"]
    assert storage.isdir(Path("tmp_a/parts")) and not storage.isdir(Path("tmp_a/new"))
    assert storage.exists(Path("tmp_a/new")) and not storage.exists(Path("tmp_a/old"))
    storage.rename(Path("tmp_a/new"), Path("tmp_a/old"))
    storage.rename(Path("tmp_a/old"), Path("tmp_a/old"))
    assert storage.read(Path("tmp_a/old")) == b"x" and not storage.exists(Path("tmp_a/new"))
    assert storage.glob(f"{place[0]}/tmp_a/o*") == [f"{place[0]}/tmp_a/old"]
    storage.delete(Path("tmp_a/old"))
    storage.rmdir(Path("tmp_a"))
    assert storage.ls(Path("tmp_a")) == []


def test_ids_in_directories_of_any_name(place: tuple[str, dict[str, Any]]) -> None:
    storage = storage_of(place)
    put(storage, "tmp_runs/tmp_step-1/model_0.pt", state())
    storage.rename(Path("tmp_runs/tmp_step-1"), Path("tmp_runs/step-1"), is_directory=True)
    assert_same(get(storage, "tmp_runs/step-1/model_0.pt"), state())
    storage.mkdir(Path("x/y/z"))
    storage.rmdir(Path("x"))
    assert not storage.exists(Path("x"))


def test_a_load_sees_what_was_committed_since(place: tuple[str, dict[str, Any]]) -> None:
    reader = storage_of(place)
    for seed in (0, 5):
        storage = storage_of(place)
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

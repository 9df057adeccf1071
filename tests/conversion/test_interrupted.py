"""Conversions that replace something, are interrupted, or go on: what is there afterwards is of one source, whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_safetensors

from dcp_nvcomp import convert, errors, open_checkpoint, save, tools
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import file_names, save_stock
from tests.states import assert_same

KEYS = "abc"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
PROGRESS = ".dcp_nvcomp_conversion.json"


class Stop(BaseException):
    """As of Ctrl-C."""


def stop_after(nbytes: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > nbytes:
            raise Stop

    return progress


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Two checkpoints of a run: the same keys, shapes and dtypes."""
    paths = [tmp_path / f"step-{number}" for number in (1, 2)]
    for number, path in enumerate(paths, 1):
        save({key: torch.full((1000,), float(number)) for key in KEYS}, path, no_dist=True)
    return paths


def into_files(source: Path, to: Path, **options: Any) -> None:
    convert(source, to, to="safetensors", max_shard_nbytes=4000, **options)


def values(directory: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= {key: float(value[0]) for key, value in load_file(file).items()}
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_conversion_that_was_cut_off_goes_on_with_its_own_source_only(
    steps: list[Path], tmp_path: Path, overwrite: bool
) -> None:
    to = tmp_path / "hf"
    with pytest.raises(Stop):
        into_files(steps[0], to, progress=stop_after(4000))
    assert file_names(to) == {SHARDS[0], PROGRESS}
    with pytest.raises(errors.IncompleteCheckpointError, match="repeat it"):
        convert(to, tmp_path / "back")
    os.utime(to / SHARDS[0], (1, 1))
    into_files(steps[0], to, overwrite=overwrite)
    assert ((to / SHARDS[0]).stat().st_mtime == 1) is not overwrite
    assert values(to) == dict.fromkeys(KEYS, 1.0)
    assert file_names(to) == {*SHARDS, INDEX}


@pytest.mark.parametrize("change", ["source", "saved again", "prefix", "dtype"])
def test_a_conversion_that_was_cut_off_does_not_go_on_with_another(
    steps: list[Path], tmp_path: Path, change: str
) -> None:
    to, source = tmp_path / "hf", tmp_path / "both"
    state = {
        f"{prefix}.{key}": torch.full((1000,), value) for prefix, value in (("x", 1.0), ("y", 2.0)) for key in KEYS
    }
    save(state, source, no_dist=True)
    with pytest.raises(Stop):
        into_files(source, to, prefix="x.", progress=stop_after(4000))
    options: dict[str, Any] = {"prefix": "x."}
    if change == "source":
        options, source = {}, steps[1]
    elif change == "saved again":
        save({key: torch.full((1000,), 2.0) for key in state}, source, no_dist=True)
    elif change == "prefix":
        options["prefix"] = "y."
    else:
        options |= {"prefix": "y.", "dtype": torch.bfloat16}
    into_files(source, to, **options)
    assert values(to) == dict.fromkeys(KEYS, 2.0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_from_one_file_to_several_and_back(steps: list[Path], tmp_path: Path, overwrite: bool) -> None:
    to = tmp_path / "hf"
    convert(steps[0], to, to="safetensors")
    if not overwrite:
        with pytest.raises(errors.CheckpointExistsError):
            into_files(steps[1], to)
        assert file_names(to) == {"model.safetensors"}
        return
    into_files(steps[1], to, overwrite=True)
    assert file_names(to) == {*SHARDS, INDEX}
    with pytest.raises(errors.CheckpointExistsError):
        convert(steps[0], to, to="safetensors")
    (to / "config.json").write_text("{}")
    convert(steps[0], to, to="safetensors", overwrite=True)
    assert file_names(to) == {"model.safetensors", "config.json"}
    assert values(to) == dict.fromkeys(KEYS, 1.0)


def test_files_of_an_unknown_source_are_left(steps: list[Path], tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / SHARDS[0]).write_bytes(to_safetensors({"a": torch.zeros(1000)}))
    with pytest.raises(errors.CheckpointExistsError):
        into_files(steps[0], tmp_path / "hf")
    assert values(tmp_path / "hf") == {"a": 0.0}


def test_two_conversions_into_one_directory(steps: list[Path], tmp_path: Path) -> None:
    to = tmp_path / "hf"

    def other(done: int, total: int) -> None:
        if done == 8000:
            (to / PROGRESS).write_text('{"another"}')

    with pytest.raises(errors.ConcurrentSaveError):
        into_files(steps[0], to, progress=other)
    assert INDEX not in file_names(to)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_a_killed_conversion_leaves_nothing_under_the_name(steps: list[Path], tmp_path: Path, name: str) -> None:
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            convert(steps[0], tmp_path / name, progress=lambda done, _: done > 4000 and os.kill(os.getpid(), 9))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / name).exists()
    convert(steps[0], tmp_path / name)


def stock_values(path: Path) -> dict[str, list[float]]:
    into = {key: torch.zeros(1000) for key in KEYS}
    dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return {key: tensor.unique().tolist() for key, tensor in into.items()}


def test_what_a_killed_conversion_to_stock_dcp_left_can_be_cleaned(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_nvcomp.conversion.checkpoints._STOCK_FILE_NBYTES", 4000)
    convert(steps[0], tmp_path / "stock", to="dcp")
    before = file_names(tmp_path / "stock")
    monkeypatch.setattr("dcp_nvcomp.conversion.checkpoints.remove_files", lambda *_: None)  # as if it were killed
    with pytest.raises(Stop):
        convert(steps[1], tmp_path / "stock", to="dcp", overwrite=True, progress=stop_after(4000))
    assert file_names(tmp_path / "stock") > before
    for file in (tmp_path / "stock").iterdir():
        os.utime(file, (1, 1))
    tools.clean(tmp_path / "stock")
    assert file_names(tmp_path / "stock") == before
    assert stock_values(tmp_path / "stock") == {key: [1.0] for key in KEYS}


# --- the source itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_published", [True, False])
def test_an_interrupt_while_stock_dcp_s_metadata_is_published(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """How far the storage got is not known: what may be named stays."""
    publish = PosixFilesystem.publish

    def interrupted(self: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
        if is_published:
            publish(self, name, data, **options)
        raise Stop

    monkeypatch.setattr(PosixFilesystem, "publish", interrupted)
    with pytest.raises(Stop):
        convert(steps[0], tmp_path / "stock", to="dcp")
    assert any(name.endswith(".distcp") for name in file_names(tmp_path / "stock"))
    if is_published:
        assert_same(dict(open_checkpoint(tmp_path / "stock").stream()), dict(open_checkpoint(steps[0]).stream()))


def test_a_source_is_not_written_over(tmp_path: Path) -> None:
    state = {"a": torch.ones(1000)}
    save_stock(tmp_path / "stock", state)
    (tmp_path / "link").symlink_to("stock")
    with pytest.raises(errors.ConfigurationError, match="same place"):
        convert(tmp_path / "link", tmp_path / "stock", to="dcp", overwrite=True)
    with pytest.raises(errors.ConfigurationError, match="that it reads"):
        convert(tmp_path / "link", tmp_path / "stock" / ".metadata", to="torch", overwrite=True)
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(state, hf / "model.safetensors")
    (tmp_path / "elsewhere").symlink_to("hf")
    for destination in (hf, tmp_path / "elsewhere"):
        with pytest.raises(errors.ConfigurationError, match="that it reads"):
            convert(hf / "model.safetensors", destination, to="safetensors", dtype=torch.bfloat16, overwrite=True)
    with pytest.raises(errors.ConfigurationError, match="that it reads"):
        convert(hf, tmp_path / "elsewhere" / "model.safetensors", overwrite=True)
    assert load_file(hf / "model.safetensors")["a"].dtype == torch.float32
    torch.save(state, hf / "pytorch_model.bin")
    convert(hf / "pytorch_model.bin", hf, to="safetensors", overwrite=True)  # not the same files
    assert load_file(hf / "model.safetensors")["a"].sum() == 1000


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("name", "to"), [("m.safetensors", None), ("m.pt", None), ("hf", "safetensors"), ("stock", "dcp")]
)
def test_the_old_one_is_there_until_the_new_one_is(
    steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: Any, remote: bool
) -> None:
    monkeypatch.setattr("dcp_nvcomp.conversion.checkpoints._STOCK_FILE_NBYTES", 4000)
    place = f"memory://interrupted{id(steps)}" if remote else str(tmp_path / "place")
    filesystem, url = fsspec.filesystem("memory" if remote else "file"), f"{place}/{name}"
    options: dict[str, Any] = {"to": to, "source_options": {}}
    convert(steps[0], url, **options)
    before = filesystem.find(place)
    with pytest.raises(errors.CheckpointExistsError):
        convert(steps[1], url, **options)
    for nbytes in (0, 4000, 8000):
        with pytest.raises(Stop):
            convert(steps[1], url, overwrite=True, progress=stop_after(nbytes), **options)
        assert filesystem.find(place) == before
    convert(url, tmp_path / "old")
    convert(steps[1], url, overwrite=True, **options)
    convert(url, tmp_path / "new")
    for number, path in enumerate(("old", "new"), 1):
        with open_checkpoint(tmp_path / path) as checkpoint:
            assert {float(checkpoint[key][0]) for key in KEYS} == {float(number)}
    assert len(filesystem.find(place)) == len(before)


@pytest.mark.parametrize("destination", ["memory://self", "memory:///self", "memory://self/model.safetensors"])
def test_a_remote_source_is_not_written_over(destination: str) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/self/model.safetensors", to_safetensors({"a": torch.ones(1000)}))
    for source in ("memory://self/model.safetensors", "memory:///self"):
        with pytest.raises(errors.ConfigurationError, match="same place|that it reads"):
            convert(source, destination, to="safetensors", dtype=torch.bfloat16, overwrite=True)
    assert filesystem.find("/self") == ["/self/model.safetensors"]
    filesystem.rm("/self", recursive=True)

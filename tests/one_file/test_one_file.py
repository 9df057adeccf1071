"""`save_compressed_checkpoint` and `load_compressed_checkpoint`: what comes back is what torch.load would return."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_nvcomp import errors, load_compressed_checkpoint, save, save_compressed_checkpoint
from dcp_nvcomp.saving.data_files import DataFileWriter
from dcp_nvcomp.streams.writer import StreamWriter
from tests.checkpoints import data_file, flip
from tests.conftest import S3Store
from tests.faults.disk_model import Recorder, crash_states, make_tree, read_tree
from tests.faults.intercept import intercept_system_calls
from tests.states import assert_same


class Opaque:
    """Needs code."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = object.__hash__


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": OrderedDict(w=torch.randn(700, 900, generator=generator).bfloat16(), b=torch.zeros(5)),
        "optimizer": {"state": {0: {"exp_avg": torch.randn(300, 200, generator=generator), "step": torch.tensor(3.0)}}},
        "lists": [torch.arange(4), (torch.ones(2, dtype=torch.bool), "text"), []],
        "empty": {},
        "none": None,
        "number": 0.1,
        "zero": torch.zeros(0, 3),
        "strange": torch.randn(4, 5, generator=generator).t(),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        1: "one",
        "1": torch.ones(1),
        ".stream": torch.ones(2),
        ".skeleton": torch.ones(3),
    }


@pytest.mark.parametrize("codec", ["auto", "zstd", "none"])
def test_a_state_comes_back(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "new" / "state.nvc"
    save_compressed_checkpoint(state(), path, codec=codec)
    assert [file.name for file in path.parent.iterdir()] == ["state.nvc"]
    found = load_compressed_checkpoint(path)
    torch.save(state(), tmp_path / "state.pt")
    expected = torch.load(tmp_path / "state.pt")
    assert list(found) == list(expected)
    assert type(found["model"]) is OrderedDict and type(found["lists"][1]) is tuple
    assert_same(found, expected)
    if codec == "auto":
        assert path.stat().st_size < 0.9 * (tmp_path / "state.pt").stat().st_size


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3)], 5, None, (), {}])
def test_anything_may_be_the_state(tmp_path: Path, value: Any) -> None:
    save_compressed_checkpoint(value, tmp_path / "x")
    assert_same(load_compressed_checkpoint(tmp_path / "x"), value)


def test_ties_and_parameters(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    grown = torch.ones(2, requires_grad=True)
    save_compressed_checkpoint({"a": weight, "b": weight, "c": frozen, "d": grown}, tmp_path / "x")
    found = load_compressed_checkpoint(tmp_path / "x")
    assert found["a"] is found["b"]
    assert isinstance(found["a"], nn.Parameter) and found["a"].requires_grad
    assert isinstance(found["c"], nn.Parameter) and not found["c"].requires_grad
    assert found["d"].requires_grad and not isinstance(found["d"], nn.Parameter)
    assert torch.equal(found["a"], weight)


def test_tied_weights_of_a_state_dict(tmp_path: Path) -> None:
    model = nn.ModuleDict({"e": nn.Embedding(100, 30), "h": nn.Linear(30, 100, bias=False)})
    model["h"].weight = model["e"].weight
    state = {**model.state_dict(), "rows": model["e"].weight.detach()[:3], "turned": torch.zeros(3, 3).t()}
    state["parameter"] = model["h"].weight
    save_compressed_checkpoint(state, tmp_path / "x", codec="none")
    assert (tmp_path / "x").stat().st_size < 20_000
    found = load_compressed_checkpoint(tmp_path / "x")
    assert_same(
        {**found, "parameter": found["parameter"].detach()}, {**state, "parameter": state["parameter"].detach()}
    )
    assert found["e.weight"].data_ptr() == found["h.weight"].data_ptr() == found["parameter"].data_ptr()
    assert found["rows"].data_ptr() != found["e.weight"].data_ptr()
    assert found["parameter"].requires_grad and not found["e.weight"].requires_grad


def test_states_that_are_nested_too_deeply(tmp_path: Path) -> None:
    deep: Any = torch.ones(1)
    for _ in range(3000):
        deep = {"a": deep}
    itself: list[Any] = [torch.ones(1)]
    itself.append(itself)
    for value in (deep, itself):
        with pytest.raises(errors.CheckpointError, match="nested too deeply, or contains itself"):
            save_compressed_checkpoint(value, tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old", [False, True], ids=["in new directories", "over an older file"])
def test_the_power_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    disk, recorder = tmp_path / "disk", Recorder(tmp_path / "disk")
    disk.mkdir()
    if old:
        (disk / "a").mkdir()
        save_compressed_checkpoint({"w": torch.ones(300)}, disk / "a" / "x")
    before = read_tree(disk)
    with monkeypatch.context() as patch:
        intercept_system_calls(patch.setattr, recorder)
        save_compressed_checkpoint({"w": torch.zeros(300)}, disk / "a" / "x")
    found = set()
    for taken, tree in crash_states(before, recorder.steps):
        make_tree(tmp_path / "after", tree)
        value = None
        if (tmp_path / "after" / "a" / "x").exists():
            value = load_compressed_checkpoint(tmp_path / "after" / "a" / "x")["w"].sum().item()
        assert value in ((0.0,) if taken == len(recorder.steps) else (300.0 if old else None, 0.0)), recorder.steps[
            taken
        ]
        found.add(value)
    assert len(found) == 2


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    save_compressed_checkpoint({"w": torch.ones(3)}, path)
    with pytest.raises(errors.CheckpointError, match="can't be pickled"):
        save_compressed_checkpoint({"w": torch.zeros(3), "f": lambda: None}, path)
    with pytest.raises(errors.CheckpointExistsError):
        save_compressed_checkpoint({"w": torch.zeros(3)}, path, overwrite=False)

    def failing(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(errors.StorageError, match="No space left"):
        save_compressed_checkpoint({"w": torch.zeros(3)}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert torch.equal(load_compressed_checkpoint(path)["w"], torch.ones(3))


def test_damage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_compressed_checkpoint({"w": torch.randn(1000)}, path)
    size = path.stat().st_size
    for position in (100, size // 2, size - 60, size - 5):
        flip(path, position)
        with pytest.raises(errors.CheckpointError):
            load_compressed_checkpoint(path)
        flip(path, position)
    load_compressed_checkpoint(path)
    os.truncate(path, size - 1)
    with pytest.raises(errors.CheckpointError):
        load_compressed_checkpoint(path)


def test_code_is_not_run_unless_trusted(tmp_path: Path) -> None:
    save_compressed_checkpoint({"o": Opaque()}, tmp_path / "x")
    with pytest.raises(errors.UnsafeObjectError):
        load_compressed_checkpoint(tmp_path / "x")
    found = load_compressed_checkpoint(tmp_path / "x", trusted_globals=["tests.one_file.test_one_file.Opaque"])
    assert found == {"o": Opaque()}


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError, match="no such file"):
        load_compressed_checkpoint(tmp_path / "nothing")
    (tmp_path / "junk").write_bytes(b"x" * 500)
    with pytest.raises(errors.FormatError):
        load_compressed_checkpoint(tmp_path / "junk")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(errors.FormatError):
        load_compressed_checkpoint(tmp_path / "short")
    save({"w": torch.ones(3), "step": 1}, tmp_path / "checkpoint", no_dist=True)
    with pytest.raises(
        errors.FormatError, match="a data file of a checkpoint, not a file of save_compressed_checkpoint"
    ):
        load_compressed_checkpoint(data_file(tmp_path / "checkpoint"))
    with pytest.raises(errors.ConfigurationError, match="names a directory"):
        load_compressed_checkpoint(f"{tmp_path}/")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("on purpose")


def _fails(*_: Any) -> None:
    raise errors.StorageError("on purpose")


def assert_a_failed_save_leaves_the_old_file(path: str, **options: Any) -> None:
    save_compressed_checkpoint({"w": torch.ones(3)}, path, **options)
    large = torch.zeros(3 << 20)
    with pytest.raises(errors.CheckpointError):
        save_compressed_checkpoint({"w": large, "object": Unpicklable()}, path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataFileWriter, "finish", _fails)
        with pytest.raises(errors.StorageError, match="on purpose"):
            save_compressed_checkpoint({"w": large}, path, **options)
    with pytest.raises(RuntimeError, match="on purpose"), StreamWriter(path, **options) as stream:
        torch.save({"w": large, "object": Unpicklable()}, stream)
    assert torch.equal(load_compressed_checkpoint(path, **options)["w"], torch.ones(3))
    save_compressed_checkpoint({"w": torch.zeros(3)}, path, **options)
    assert torch.equal(load_compressed_checkpoint(path, **options)["w"], torch.zeros(3))


def test_a_failed_save_in_memory_leaves_the_old_file() -> None:
    assert_a_failed_save_leaves_the_old_file(f"memory://{uuid.uuid4().hex}/state.nvc")


@pytest.mark.s3
def test_on_s3(s3_store: S3Store) -> None:
    url, options = s3_store
    assert_a_failed_save_leaves_the_old_file(f"{url}/other.nvc", **options)
    save_compressed_checkpoint(state(), f"{url}/state.nvc", **options)
    assert_same(load_compressed_checkpoint(f"{url}/state.nvc", **options), state())

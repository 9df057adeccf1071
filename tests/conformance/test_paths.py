"""Which checkpoint is meant: overwriting, one writer for many saves, `checkpoint_id`, URLs and storage options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import errors
from tests.checkpoints import assert_holds, file_names
from tests.states import assert_same_bits

from .plugins import OURS, Plugin, cause_of, on_every_plugin, quiet_stock
from .values import trained_state

pytestmark = quiet_stock

PATTERN = re.compile(r"\.metadata|__[0-9a-f]{32}\.metadata|__0_\d+_[0-9a-f]+\.distcp")


@on_every_plugin
@pytest.mark.parametrize("kind", [str, Path])
def test_path_may_be_str_or_path(tmp_path: Path, plugin: Plugin, kind: type) -> None:
    dcp.save(trained_state("one"), storage_writer=plugin.writer(kind(tmp_path / "a" / "b c" / "ü")))
    assert_holds(plugin.reader(kind(tmp_path / "a" / "b c" / "ü")), trained_state("one"))


@on_every_plugin
def test_relative_path(tmp_path: Path, plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save(trained_state("one"), storage_writer=plugin.writer("run/step-1"))
    assert_holds(plugin.reader("run/step-1"), trained_state("one"))
    assert (tmp_path / "run" / "step-1" / ".metadata").is_file()


@on_every_plugin
def test_overwrite_by_another_state(tmp_path: Path, plugin: Plugin) -> None:
    """What the new checkpoint does not have is gone, and other shapes are fine."""
    dcp.save({**trained_state("one"), "old": 1}, storage_writer=plugin.writer(tmp_path))
    dcp.save({"w": torch.ones(3)}, storage_writer=plugin.writer(tmp_path))
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same_bits(state["w"], torch.ones(3))
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        dcp.load({"old": None}, storage_reader=plugin.reader(tmp_path))


@on_every_plugin
def test_one_writer_and_one_reader_for_many_saves_to_one_path(tmp_path: Path, plugin: Plugin) -> None:
    writer, reader = plugin.writer(tmp_path), plugin.reader(tmp_path)
    for seed in ("one", "two", "three"):
        dcp.save(trained_state(seed), storage_writer=writer)
        assert_holds(reader, trained_state(seed))


@on_every_plugin
def test_one_writer_and_one_reader_for_many_checkpoint_ids(tmp_path: Path, plugin: Plugin) -> None:
    writer, reader = plugin.writer(tmp_path / "default"), plugin.reader(tmp_path / "default")
    for seed in ("one", "two"):
        dcp.save(trained_state(seed), storage_writer=writer, checkpoint_id=tmp_path / seed)
    dcp.save(trained_state("three"), storage_writer=writer, checkpoint_id=str(tmp_path / "three"))
    for seed in ("two", "one", "three"):
        assert_holds(reader, trained_state(seed), checkpoint_id=tmp_path / seed)
    assert not (tmp_path / "default").exists()
    assert file_names(tmp_path) == {"one", "two", "three"}


@on_every_plugin
def test_checkpoint_id_stays_until_the_next_one(tmp_path: Path, plugin: Plugin) -> None:
    writer, reader = plugin.writer(tmp_path / "a"), plugin.reader(tmp_path / "a")
    dcp.save(trained_state("one"), storage_writer=writer, checkpoint_id=tmp_path / "b")
    dcp.save(trained_state("two"), storage_writer=writer)
    assert_holds(reader, trained_state("two"), checkpoint_id=tmp_path / "b")
    assert_holds(reader, trained_state("two"))
    assert file_names(tmp_path) == {"b"}


@on_every_plugin
def test_checkpoint_id_property(tmp_path: Path, plugin: Plugin) -> None:
    """DCP's logging asks writers and readers for it."""
    for storage in (plugin.writer(tmp_path / "a"), plugin.reader(tmp_path / "a")):
        assert str(storage.checkpoint_id) == str(tmp_path / "a")
        storage.reset(tmp_path / "b")
        assert str(storage.checkpoint_id) == str(tmp_path / "b")


@on_every_plugin
def test_valid_checkpoint_ids(tmp_path: Path, plugin: Plugin) -> None:
    for kind in (type(plugin.writer(tmp_path)), type(plugin.reader(tmp_path))):
        assert all(kind.validate_checkpoint_id(name) for name in ("file:///tmp/x", "memory://x", "/tmp/x"))
        assert not kind.validate_checkpoint_id("nosuchprotocol://x")


@on_every_plugin
def test_overwrite_may_be_forbidden(tmp_path: Path, plugin: Plugin) -> None:
    writer = plugin.writer(tmp_path / "c", overwrite=False)
    dcp.save(trained_state("one"), storage_writer=writer)
    before = file_names(tmp_path / "c")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(trained_state("two"), storage_writer=writer)
    assert file_names(tmp_path / "c") == before
    assert_holds(plugin.reader(tmp_path / "c"), trained_state("one"))
    if plugin == OURS:
        assert isinstance(cause_of(caught.value), errors.CheckpointExistsError)
        assert str(tmp_path / "c") in str(cause_of(caught.value))


@on_every_plugin
@pytest.mark.parametrize("url", ["file://{path}/c", "memory://{name}/c"])
def test_urls(tmp_path: Path, plugin: Plugin, url: str) -> None:
    url = url.format(path=tmp_path, name=tmp_path.name)
    for seed in ("one", "two"):
        dcp.save(trained_state(seed), storage_writer=plugin.writer(url))
        assert_holds(plugin.reader(url), trained_state(seed))


def test_what_lies_on_disk(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path, single_file_per_rank=False)
    dcp.save(trained_state("one"), storage_writer=writer)
    assert all(PATTERN.fullmatch(name) for name in file_names(tmp_path)), file_names(tmp_path)
    save_id = writer.last_save.save_id
    copy = tmp_path / f"__{save_id}.metadata"
    assert copy.read_bytes() == (tmp_path / ".metadata").read_bytes()


def test_files_of_an_earlier_save_are_never_written_again(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    dcp.save(trained_state("one"), storage_writer=writer)
    first = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path) - {".metadata"}}
    dcp.save(trained_state("two"), storage_writer=writer)
    for name in first.keys() & file_names(tmp_path):
        assert (tmp_path / name).read_bytes() == first[name], name
    assert not set(writer.last_save.files) & first.keys()


@on_every_plugin
def test_reader_sees_a_checkpoint_that_came_later(tmp_path: Path, plugin: Plugin) -> None:
    reader = plugin.reader(tmp_path / "c")
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"seed": None}, storage_reader=reader)
    dcp.save(trained_state("one"), storage_writer=plugin.writer(tmp_path / "c"))
    assert_holds(reader, trained_state("one"))


def test_checkpoint_may_be_moved(tmp_path: Path) -> None:
    dcp.save(trained_state("one"), storage_writer=OURS.writer(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert_holds(OURS.reader(tmp_path / "b"), trained_state("one"))

"""Saves with a reference: what is the same there is not written again, and what needs it keeps it."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from dcp_nvcomp import (
    ConfigurationError,
    CorruptDataError,
    Keep,
    NvcompReader,
    NvcompWriter,
    SaveStats,
    StorageError,
    async_save,
    convert,
    open_checkpoint,
    save,
    tools,
)
from dcp_nvcomp.errors import CheckpointNotFoundError, CheckpointReplacedError, IncompleteCheckpointError
from dcp_nvcomp.format.data_file import read_footer
from dcp_nvcomp.format.metadata.roots import read_current
from dcp_nvcomp.format.metadata.shares import leave_marks, needed_by_others
from dcp_nvcomp.format.metadata.summary import summary_at_end
from dcp_nvcomp.format.names import METADATA_NAME, REMOVING, mark_name
from dcp_nvcomp.maintenance import consolidation
from dcp_nvcomp.maintenance.run_listing import list_run
from dcp_nvcomp.runs import prune_run
from dcp_nvcomp.saving import references as references_module
from dcp_nvcomp.saving import writer as writer_module
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.saving.references import hash_of
from dcp_nvcomp.storage.base import BESIDE
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, flip

State = dict[str, Any]


@pytest.fixture(params=[False, True], ids=["same process", "another process"])
def restart(request: pytest.FixtureRequest) -> Any:
    """What may happen between two saves: a new process knows what footers say."""
    return forget_all if request.param else lambda: None


def _state() -> State:
    torch.manual_seed(0)
    return {
        "base": {"a": torch.randn(256, 512), "b": torch.randn(300, 300, dtype=torch.float64).to(torch.bfloat16)},
        "head": torch.randn(96, 300),
        "small": torch.randn(100),
        "step": 7,
    }


def _data_nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def _save(state: State, path: Path, reference: Any, **options: Any) -> SaveStats:
    return save(state, path, no_dist=True, reference=reference, **options)


def test_what_is_the_same_is_not_written(tmp_path: Path, restart: Any) -> None:
    state = _state()
    first = _save(state, tmp_path / "step-1", ())
    assert "shared" not in first.by_codec
    restart()
    state["head"] += 1
    second = _save(state, tmp_path / "step-2", tmp_path / "step-1")
    assert second.by_codec["shared"].records == 2
    assert second.uncompressed_nbytes == first.uncompressed_nbytes
    assert second.by_codec["shared"].uncompressed_nbytes == 256 * 512 * 4 + 300 * 300 * 2
    assert _data_nbytes(tmp_path / "step-2") == second.stored_nbytes < 0.2 * first.stored_nbytes
    restart()
    state["step"] = 8
    third = _save(state, tmp_path / "step-3", str(tmp_path / "step-2"))
    assert third.by_codec["shared"].records == 3
    names = read_current(open_filesystem(tmp_path / "step-3")).files()
    directories = {name.split("/")[1] for name in names if name.startswith("../")}
    assert directories == {"step-1", "step-2"}, "one step away, and not two"
    assert_loads(tmp_path / "step-3", state)
    assert tools.verify(tmp_path / "step-3", full=True).is_sound
    assert_loads(tmp_path / "step-1", _state())


def test_stock_tools_see_the_keys(tmp_path: Path) -> None:
    _save(_state(), tmp_path / "a", ())
    _save(_state(), tmp_path / "b", tmp_path / "a")
    metadata = dcp.FileSystemReader(tmp_path / "b").read_metadata()
    assert set(metadata.state_dict_metadata) == {"base.a", "base.b", "head", "small", "step"}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(head=state["head"].reshape(300, 96)),
        lambda state: state.update(head=state["head"].view(torch.int32)),
        lambda state: state.update(tail=state.pop("head")),
        lambda state: state["head"][-1, -1:].neg_(),
    ],
    ids=["shape", "dtype", "key", "one bit"],
)
def test_what_is_another_is_written(tmp_path: Path, change: Any, restart: Any) -> None:
    state = _state()
    _save(state, tmp_path / "a", ())
    change(state)
    restart()
    assert _save(state, tmp_path / "b", tmp_path / "a").by_codec["shared"].records == 2
    assert_loads(tmp_path / "b", state)


@pytest.mark.parametrize(
    "same",
    [
        lambda tensor: tensor.t().contiguous().t(),
        lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
        lambda tensor: tensor.neg()._neg_view(),
        lambda tensor: tensor.clone().requires_grad_(),
    ],
    ids=["transposed", "a part", "negative view", "gradient"],
)
def test_a_hash_is_of_the_elements_however_they_lie(same: Any) -> None:
    tensor = torch.randn(700, 801)
    pieces = [tensor.numpy().tobytes()[start : start + (1 << 20)] for start in range(0, tensor.nbytes, 1 << 20)]
    digests = b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces)
    assert hash_of(same(tensor)) == hash_of(tensor) == xxhash.xxh3_128_hexdigest(digests)
    assert hash_of(torch.zeros(3, dtype=torch.complex64).conj()) == hash_of(
        torch.complex(torch.zeros(3), -torch.zeros(3))
    )


def test_small_parts_of_a_checkpoint_are_written_again(tmp_path: Path) -> None:
    """A checkpoint that has to stay costs more than a tenth of one."""
    state = {"large": torch.randn(1000, 1000), "little": torch.randn(160, 160)}
    _save(state, tmp_path / "1", ())
    state["large"] += 1
    assert "shared" not in _save(state, tmp_path / "2", tmp_path / "1").by_codec
    assert_loads(tmp_path / "2", state)


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 1}, {"codec": "zstd"}])
def test_other_options(tmp_path: Path, options: Any, restart: Any) -> None:
    state = _state()
    _save(state, tmp_path / "a", (), **options)
    restart()
    state["head"] += 1
    assert _save(state, tmp_path / "b", tmp_path / "a", **options).by_codec["shared"].records == 2
    assert_loads(tmp_path / "b", state)


def test_an_asynchronous_save_copies_only_what_has_changed(tmp_path: Path) -> None:
    state = _state()
    for number, reference in enumerate([(), tmp_path / "0", tmp_path / "1"]):
        expected = {**state, "base": {key: value.clone() for key, value in state["base"].items()}}
        expected["head"] = state["head"].clone()
        saving = async_save(state, tmp_path / str(number), no_dist=True, reference=reference)
        state["head"].zero_()
        stats = SaveStats.of(saving.upload_completion.result())
        assert stats is not None and ("shared" in stats.by_codec) == (number > 0)
        assert_loads(tmp_path / str(number), expected)
        state["head"].copy_(torch.randn(96, 300))


def test_dcp_save_takes_the_option_too(tmp_path: Path) -> None:
    state = {"w": torch.randn(256, 256)}
    for path, reference in ((tmp_path / "a", ()), (tmp_path / "b", tmp_path / "a")):
        writer = NvcompWriter(path, reference=reference)
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.last_save is not None and writer.last_save.by_codec["shared"].records == 1
    assert not list((tmp_path / "b").glob("*.distcp"))
    loaded = {"w": torch.zeros(256, 256)}
    dcp.load(loaded, storage_reader=NvcompReader(tmp_path / "b"), no_dist=True)
    assert torch.equal(loaded["w"], state["w"])


@pytest.mark.parametrize("prepare", ["nothing", "not complete", "no hashes", "corrupt"])
def test_without_a_usable_reference_all_is_written(
    tmp_path: Path, prepare: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, path = _state(), tmp_path / "a"
    if prepare != "nothing":
        _save(state, path, None if prepare == "no hashes" else ())
    if prepare == "not complete":
        (path / METADATA_NAME).unlink()
    if prepare == "corrupt":
        forget_all()
        flip(path / METADATA_NAME, 50)
    with caplog.at_level(logging.INFO):
        stats = _save(state, tmp_path / "b", path)
    assert "shared" not in stats.by_codec
    assert ("all of the state is written" in caplog.text) == (prepare != "no hashes")
    assert_loads(tmp_path / "b", state)
    assert _save(state, tmp_path / "c", [path / "none", tmp_path / "b"][1:]).by_codec["shared"].records == 3


def test_a_file_that_is_gone_is_not_shared(tmp_path: Path) -> None:
    state = _state()
    _save(state, tmp_path / "a", ())
    for file in (tmp_path / "a").glob("*.distcp"):
        file.unlink()
    assert "shared" not in _save(state, tmp_path / "b", tmp_path / "a").by_codec
    assert_loads(tmp_path / "b", state)


@pytest.mark.parametrize(
    ("place", "reference", "says"),
    [
        ("run/b", "other/a", "same directory"),
        ("run/b", "run/a/deeper", "same directory"),
        ("run/b", "run/b", "same checkpoint"),
        ("run/b", "a" * 201, "same directory"),
        ("run/b", "run/" + "a" * 201, "longer than 200"),
        ("run/" + "b" * 201, "run/a", "longer than 200"),
        ("run/b", "run/" + "\u691c" * 67, "longer than 200"),
        ("run/b", "run/a\\b", "backslash"),
    ],
)
def test_references_that_can_not_work(tmp_path: Path, place: str, reference: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        _save({"w": torch.zeros(3)}, tmp_path / place, tmp_path / reference)
    assert not (tmp_path / place).exists()


@pytest.mark.parametrize("reference", ["", [""], [3], 3.5])
def test_what_is_no_reference(tmp_path: Path, reference: Any) -> None:
    with pytest.raises(ConfigurationError):
        NvcompWriter(tmp_path / "x", reference=reference)


def test_a_bucket_is_no_directory() -> None:
    with pytest.raises(ConfigurationError, match="same directory"):
        _save({"w": torch.zeros(3)}, "memory://b", "memory://a")  # type: ignore[arg-type]


def test_without_its_reference_the_error_names_it(tmp_path: Path) -> None:
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(StorageError, match="shares this file with 'a', beside it, and it is not there") as caught:
        open_checkpoint(tmp_path / "b")["head"][:]
    assert caught.value.path is not None and re.search(r"/a/__0_0_[0-9a-f]{32}\.distcp$", caught.value.path)
    found = tools.verify(tmp_path / "b")
    assert not found.is_sound and "beside it" in found.findings[0].what
    assert open_checkpoint(tmp_path / "b")["small"][:].shape == (100,), "what it has itself can be read"


def test_a_flipped_bit_of_what_is_shared_is_found(tmp_path: Path) -> None:
    state = {"w": torch.randn(256, 256)}
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    flip(file, 20_000)
    with pytest.raises(CorruptDataError) as caught:
        open_checkpoint(tmp_path / "b")["w"][:]
    assert caught.value.path == str(file)
    assert [one.file for one in tools.verify(tmp_path / "b").findings] == [f"../a/{file.name}"]
    with pytest.raises(CorruptDataError):
        tools.consolidate(tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").glob("*")} >= {METADATA_NAME}
    assert not list((tmp_path / "b").glob("*.distcp"))


def test_to_save_again_leaves_what_others_share(tmp_path: Path) -> None:
    state, path = _state(), tmp_path / "a"
    _save(state, path, ())
    (old,) = path.glob("*.distcp")
    _save(state, tmp_path / "b", path)
    other = {**state, "head": torch.zeros(96, 300)}
    _save(other, path, None)
    assert old.exists()
    assert_loads(tmp_path / "b", state)
    assert_loads(path, other)
    _age(path)
    assert [orphan.name for orphan in tools.clean(path, older_than_seconds=3600.0).orphans] == [], "b needs them"
    shutil.rmtree(tmp_path / "b")
    removed = {orphan.name for orphan in tools.clean(path, older_than_seconds=3600.0).orphans}
    assert removed == {old.name, mark_name("b")}
    assert not old.exists()
    assert_loads(path, other)


def test_a_checkpoint_shares_nothing_with_itself(tmp_path: Path, restart: Any) -> None:
    """Its reference has from it what is the same: that would be lost if it were not written again."""
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    restart()
    assert "shared" not in _save(state, tmp_path / "a", tmp_path / "b").by_codec
    assert_loads(tmp_path / "a", state)
    assert_loads(tmp_path / "b", state)


def test_a_writer_leaves_what_it_shared_when_it_saves_again(tmp_path: Path) -> None:
    """It knows which files the checkpoint that it replaces has, and those of others are none of them."""
    state = _state()
    _save(state, tmp_path / "a", ())
    writer = NvcompWriter(tmp_path / "b", reference=tmp_path / "a")
    dcp.save(state, storage_writer=writer, no_dist=True)
    changed = {"base": {key: value + 1 for key, value in state["base"].items()}, "head": state["head"] + 1}
    dcp.save({**state, **changed}, storage_writer=writer, no_dist=True)
    assert writer.last_save is not None and "shared" not in writer.last_save.by_codec
    assert_loads(tmp_path / "a", _state())


def test_all_of_a_state_is_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.randn(300, 300)}
    _save(state, tmp_path / "a", ())
    with caplog.at_level(logging.INFO):
        stats = _save(state, tmp_path / "b", tmp_path / "a")
    assert (
        stats.ratio == 1.0 and stats.stored_nbytes == 0 and stats.shared_nbytes == stats.uncompressed_nbytes == 360_000
    )
    assert "beside 360.0 kB that it shares" in str(stats) and "beside 360.0 kB" in caplog.text
    assert stats.to_dict()["ratio"] == 1.0 and list(stats.shown())
    (step,) = [step for step in list_run(tmp_path).steps if step.name == "b"]
    assert step.ratio is None and step.shares == ("a",) and step.shared_nbytes == 360_000
    assert_loads(tmp_path / "b", state)


@pytest.mark.parametrize("to", ["dcp-nvcomp", "dcp"])
def test_a_conversion_leaves_what_others_share(tmp_path: Path, to: Any) -> None:
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    _save({"x": torch.zeros(3)}, tmp_path / "other", None)
    convert(tmp_path / "other", tmp_path / "a", to=to, overwrite=True)
    assert_loads(tmp_path / "b", state)


def test_a_checkpoint_that_is_being_removed_is_not_shared(tmp_path: Path, restart: Any) -> None:
    """A removal may have been cut short: what it left must not fail each save that could share with it."""
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    (tmp_path / "a" / REMOVING).touch()
    restart()
    assert "shared" not in _save(state, tmp_path / "c", tmp_path / "b").by_codec
    assert not (tmp_path / "a" / mark_name("c")).exists()
    assert_loads(tmp_path / "c", state)


def test_a_checkpoint_whose_removal_begins_meanwhile_is_not_shared(tmp_path: Path, monkeypatch: Any) -> None:
    _save(_state(), tmp_path / "a", ())
    publish = PosixFilesystem.publish

    def as_it_begins(filesystem: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name == f"{BESIDE}a/{mark_name('b')}":
            (tmp_path / "a" / REMOVING).touch()
        return publish(filesystem, name, *arguments, **options)

    monkeypatch.setattr(PosixFilesystem, "publish", as_it_begins)
    with pytest.raises(CheckpointReplacedError, match="is being removed: try again"):
        _save(_state(), tmp_path / "b", tmp_path / "a")
    assert not list((tmp_path / "b").glob("*.distcp")) and not (tmp_path / "b" / METADATA_NAME).exists()


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (errno.ENOENT, CheckpointReplacedError, "'a', whose files this one was to share, was removed: try again"),
        (errno.EACCES, StorageError, "directory 'a', whose files .* has to be writable"),
        (errno.EROFS, StorageError, "directory 'a', whose files .* has to be writable"),
    ],
)
def test_a_mark_that_can_not_be_left(
    tmp_path: Path, monkeypatch: Any, number: int, error: type[Exception], says: str
) -> None:
    _save(_state(), tmp_path / "a", ())
    publish = PosixFilesystem.publish

    def refusing(filesystem: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name == f"{BESIDE}a/{mark_name('b')}":
            raise StorageError("Could not write.", path=filesystem.path, errno=number)
        return publish(filesystem, name, *arguments, **options)

    monkeypatch.setattr(PosixFilesystem, "publish", refusing)
    with pytest.raises(error, match=says):
        _save(_state(), tmp_path / "b", tmp_path / "a")
    assert not list((tmp_path / "b").glob("*.distcp")) and not (tmp_path / "b" / METADATA_NAME).exists()


def test_what_changed_before_it_was_encoded_is_not_shared_by_its_hash(tmp_path: Path, monkeypatch: Any) -> None:
    """With `wait="nothing"` a checkpoint may mix values; those that refer to it must not."""
    state = {"w": torch.randn(512, 512)}
    right, hashed, may_go_on = state["w"].clone(), threading.Event(), threading.Event()

    def early(tensor: torch.Tensor) -> str:
        found = hash_of(tensor)
        hashed.set()
        assert may_go_on.wait(60)
        return found

    monkeypatch.setattr(references_module, "hash_of", early)
    saving = async_save(state, tmp_path / "a", no_dist=True, wait="nothing", reference=())
    assert hashed.wait(60)
    state["w"].zero_()
    may_go_on.set()
    saving.upload_completion.result()
    monkeypatch.undo()
    state["w"].copy_(right)
    for process in ("this", "another"):
        _save(state, tmp_path / process, tmp_path / "a")
        assert_loads(tmp_path / process, state)
        forget_all()


def test_what_is_recovered_keeps_what_it_shares(tmp_path: Path) -> None:
    _save(_state(), tmp_path / "a", ())
    _save(_state(), tmp_path / "b", tmp_path / "a")
    (tmp_path / "b" / METADATA_NAME).unlink()
    (tmp_path / "a" / mark_name("b")).unlink()  # as `clean` does, an hour after that
    assert tools.recover(tmp_path / "b").outcome == "recovered"
    assert tools.verify(tmp_path / "b").findings == ()
    save({"x": torch.zeros(3)}, tmp_path / "a", no_dist=True)
    assert_loads(tmp_path / "b", _state())


def test_what_could_be_recovered_is_kept(tmp_path: Path) -> None:
    """However long ago its metadata was lost: there is a copy of it."""
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    (tmp_path / "b" / METADATA_NAME).unlink()
    _age(tmp_path / "a")
    save({"x": torch.zeros(3)}, tmp_path / "a", no_dist=True)
    _age(tmp_path / "a")
    tools.clean(tmp_path / "a")
    assert (tmp_path / "a" / mark_name("b")).exists()
    assert tools.recover(tmp_path / "b").outcome == "recovered"
    assert_loads(tmp_path / "b", state)


def test_recovering_beside_a_removal_that_was_cut_short(tmp_path: Path) -> None:
    state = _state()
    _save(state, tmp_path / "step-1", ())
    _save(state, tmp_path / "step-2", tmp_path / "step-1")
    (tmp_path / "step-2" / METADATA_NAME).unlink()
    (tmp_path / "step-1" / REMOVING).touch()
    with pytest.raises(CheckpointReplacedError, match="was cut short, `dcp-nvcomp prune` ends it"):
        tools.recover(tmp_path / "step-2")
    assert prune_run(tmp_path, Keep(last=1)).removed == ()
    assert tools.recover(tmp_path / "step-2").outcome == "recovered"
    assert_loads(tmp_path / "step-2", state)


def test_a_reference_that_is_replaced_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    """By a save that has looked for marks before this one left its own."""
    state, leave_marks = _state(), writer_module.leave_marks
    _save(state, tmp_path / "a", ())

    def late(filesystem: Any, directory: str, names: Any, save_id: str) -> None:
        if directory == "b":
            _save({"x": torch.zeros(3)}, tmp_path / "a", None)
        leave_marks(filesystem, directory, names, save_id)

    monkeypatch.setattr(writer_module, "leave_marks", late)
    with pytest.raises(CheckpointReplacedError, match="'a' was replaced or removed during the save"):
        _save(state, tmp_path / "b", tmp_path / "a")
    assert not (tmp_path / "b" / METADATA_NAME).exists()


@pytest.mark.parametrize("what", ["saved again", "removed"])
def test_what_is_made_whole_is_what_it_was(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    state, publish = _state(), consolidation._publish
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    newer = {**state, "head": state["head"] + 1}

    def late(*arguments: Any) -> Any:
        if what == "saved again":
            _save(newer, tmp_path / "b", tmp_path / "a")
        else:
            (tmp_path / "b" / REMOVING).touch()
        return publish(*arguments)

    monkeypatch.setattr(consolidation, "_publish", late)
    with pytest.raises(CheckpointReplacedError, match="while it was made whole"):
        tools.consolidate(tmp_path / "b")
    assert_loads(tmp_path / "b", newer if what == "saved again" else state)
    assert (tmp_path / "a" / mark_name("b")).exists()
    assert tools.verify(tmp_path / "b").is_sound


@pytest.mark.parametrize("how", ["refused", "unknown", "interrupted", "interrupted, and published"])
def test_made_whole_in_vain(tmp_path: Path, monkeypatch: Any, how: str) -> None:
    """What `.metadata` names, or may name soon, is there, and the copy from which it could be recovered is sound."""
    state = _state()
    _save(state, tmp_path / "a", ())
    state["head"] += 1
    _save(state, tmp_path / "b", tmp_path / "a")
    before, publish = set(os.listdir(tmp_path / "b")), PosixFilesystem.publish
    late: list[Any] = []

    def failing(self: Any, name: str, data: bytes, **options: Any) -> None:
        if name != METADATA_NAME:
            return publish(self, name, data, **options)
        if how.endswith("published"):
            publish(self, name, data, **options)
        if how.startswith("interrupted"):
            raise KeyboardInterrupt
        error = StorageError("no answer", path=name, errno=errno.ENOSPC if how == "refused" else errno.ETIMEDOUT)
        error.outcome_unknown = how == "unknown"
        late.append((self, name, data))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PosixFilesystem, "publish", failing)
        with pytest.raises((StorageError, KeyboardInterrupt)):
            tools.consolidate(tmp_path / "b")
    assert (set(os.listdir(tmp_path / "b")) == before) == (how == "refused")
    assert_loads(tmp_path / "b", state)
    found = tools.verify(tmp_path / "b")
    assert found.is_sound and bool(found.findings) == (how in ("unknown", "interrupted"))
    if how == "unknown":
        publish(*late[0])
        assert_loads(tmp_path / "b", state)
        assert tools.verify(tmp_path / "b").findings == ()
    assert tools.recover(tmp_path / "b").outcome == "intact"
    assert tools.verify(tmp_path / "b").findings == ()
    (tmp_path / "b" / METADATA_NAME).unlink()
    assert tools.recover(tmp_path / "b").outcome == "recovered"
    assert_loads(tmp_path / "b", state)


def test_verify_warns_of_a_copy(tmp_path: Path) -> None:
    _save(_state(), tmp_path / "a", ())
    _save(_state(), tmp_path / "b", tmp_path / "a")
    assert tools.verify(tmp_path / "b").findings == ()
    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    found = tools.verify(tmp_path / "copy")
    assert found.is_sound and "no mark of 'copy'" in found.findings[0].what
    tools.consolidate(tmp_path / "copy")
    assert tools.verify(tmp_path / "copy").findings == ()


def _age(path: Path) -> None:
    then = time.time() - 7200.0
    for file in path.iterdir():
        os.utime(file, (then, then))


def test_a_mark_alone_keeps_files_for_an_hour(tmp_path: Path) -> None:
    """Its save is about to publish, or has died before it did."""
    _save(_state(), tmp_path / "a", ())
    (file,) = (tmp_path / "a").glob("*.distcp")
    (tmp_path / "a" / mark_name("b")).touch()
    filesystem = open_filesystem(tmp_path / "a")
    assert file.name in needed_by_others(filesystem, filesystem.list_files())
    _age(tmp_path / "a")
    assert not needed_by_others(filesystem, filesystem.list_files())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / METADATA_NAME).write_bytes(b"torn")
    assert file.name in needed_by_others(filesystem, filesystem.list_files()), "it is not known what it names"


def test_a_mark_of_another_save_than_the_published_one(tmp_path: Path) -> None:
    """A save over a checkpoint that shares nothing yet: it is not known what it will name."""
    _save(_state(), tmp_path / "a", ())
    _save(_state(), tmp_path / "b", ())
    (file,) = (tmp_path / "a").glob("*.distcp")
    filesystem = open_filesystem(tmp_path / "a")
    leave_marks(filesystem, "b", [f"../a/{file.name}"], uuid.uuid4().hex)
    assert file.name in needed_by_others(filesystem, filesystem.list_files())
    _age(tmp_path / "a")
    assert not needed_by_others(filesystem, filesystem.list_files()), "its save has died"
    _save(_state(), tmp_path / "b", tmp_path / "a")
    needed = needed_by_others(filesystem, filesystem.list_files())
    assert file.name in needed and not needed.everything


def test_credentials_that_may_not_ask_for_the_time(tmp_path: Path, monkeypatch: Any) -> None:
    """What others share stays all the same."""
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")

    def denied(_: Any) -> float:
        raise StorageError("forbidden", errno=errno.EACCES)

    monkeypatch.setattr(PosixFilesystem, "now_seconds", denied)
    leave_marks(open_filesystem(tmp_path / "a"), "c", [f"../a/{file.name}"], uuid.uuid4().hex)
    _save({"x": torch.zeros(3)}, tmp_path / "a", None)
    assert file.exists()
    assert_loads(tmp_path / "b", state)
    _save(state, tmp_path / "d", ())
    (file,) = (tmp_path / "d").glob("*.distcp")
    leave_marks(open_filesystem(tmp_path / "d"), "b", [f"../d/{file.name}"], uuid.uuid4().hex)
    _save({"x": torch.zeros(3)}, tmp_path / "d", None)
    assert file.exists(), "a save over b may be about to publish that it needs it"


def test_the_summary_says_what_is_shared(tmp_path: Path) -> None:
    state = _state()
    _save(state, tmp_path / "a", ())
    _save(state, tmp_path / "b", tmp_path / "a")
    summary = summary_at_end((tmp_path / "b" / METADATA_NAME).read_bytes()[-4096:])
    assert summary is not None and summary.shares == ("a",)
    assert summary.shared_nbytes == 256 * 512 * 4 + 300 * 300 * 2 + 96 * 300 * 4 and 0 < summary.ratio < 10
    assert summary.sharing_with((), 0).shares == () and summary.sharing_with((), 0).shared_nbytes == 0
    many = summary.sharing_with([f"step-{number}" for number in range(1000)], 5)
    assert many.shares is None and many.shared_nbytes == 5 and many.to_text() is not None
    for bad in (["../x"], ["a/b"], [3], "a", True):
        assert replace(summary, more={"shares": bad}).shares is None


def test_nothing_to_make_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no `\.metadata` was found"):
        tools.consolidate(tmp_path)
    path = tmp_path / "of ranks"
    dcp.save(_state(), storage_writer=NvcompWriter(path), no_dist=True, use_collectives=False)
    (metadata,) = path.glob("*.metadata")
    metadata.write_bytes(b"damaged")  # which is not read to find that out
    assert tools.consolidate(path).shared_with == ()
    metadata.unlink()
    with pytest.raises(IncompleteCheckpointError, match="never finished"):
        tools.consolidate(path)


@pytest.mark.parametrize("stage", ["new", "shares"])
def test_made_whole(tmp_path: Path, stage: str) -> None:
    state = _state()
    _save(state, tmp_path / "a", ())
    if stage == "shares":
        state["head"] += 1
        _save(state, tmp_path / "b", tmp_path / "a")
    path = tmp_path / ("a" if stage == "new" else "b")
    before = read_current(open_filesystem(path))
    found = tools.consolidate(path)
    assert found.shared_with == (() if stage == "new" else ("a",))
    shutil.rmtree(tmp_path / "a") if stage == "shares" else None
    after = read_current(open_filesystem(path))
    assert after.save_id == before.save_id
    assert_loads(path, state)
    assert tools.verify(path, full=True).is_sound
    assert tools.consolidate(path).shards == 0
    again = tools.inspect(path)
    assert again.shared == {} and again.file_nbytes == _data_nbytes(path)
    if stage == "shares":
        assert not (tmp_path / "a" / mark_name("b")).exists()
        summary = summary_at_end((path / METADATA_NAME).read_bytes()[-4096:])
        assert summary is not None and summary.stored_nbytes == _data_nbytes(path) and summary.shares == ()
        forget_all()
        assert _save(state, tmp_path / "c", path).by_codec["shared"].records == 3, "hashes are copied too"


def test_only_tensors_with_blocks_of_their_own_have_a_hash(tmp_path: Path) -> None:
    _save(_state(), tmp_path / "a", ())
    filesystem = open_filesystem(tmp_path / "a")
    (file,) = read_current(filesystem).files().values()
    assert file is not None
    hashes = {record.fqn: record.content_hash for record in read_footer(filesystem, file).records}
    assert {fqn for fqn, own in hashes.items() if own} == {"base.a", "base.b", "head"}
    assert hashes["head"] == hash_of(_state()["head"])
    _save(_state(), tmp_path / "b", None)
    filesystem = open_filesystem(tmp_path / "b")
    (file,) = read_current(filesystem).files().values()
    assert file is not None
    assert not any(record.content_hash for record in read_footer(filesystem, file).records)

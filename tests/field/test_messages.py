"""Messages that lead on: what is at a path and which call takes it, the nearest names, the call's own options."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from typer.testing import CliRunner

import dcp_nvcomp as ckpt
from dcp_nvcomp.cli.app import app
from tests.checkpoints import data_file
from tests.conftest import S3Store

STATE = {"model": {"weight": torch.ones(40, 30), "bias": torch.zeros(30)}, "step": 3}


def save(path: object, state: Any = STATE, **options: Any) -> None:
    ckpt.save(state, path, no_dist=True, **options)  # type: ignore[arg-type]


def load(path: object, state: Any = None, **options: Any) -> None:
    ckpt.load(dict(STATE) if state is None else state, path, no_dist=True, **options)  # type: ignore[arg-type]


def message_of(do: Callable[[], Any]) -> str:
    with pytest.raises(ckpt.CheckpointError) as caught:
        do()
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- files and directories of another kind ----------------------------------------------------------------------------

CONVERT = "`dcp_nvcomp.convert` (or `dcp-nvcomp convert`) makes a checkpoint of"


def _torch_file(at: Path) -> Path:
    torch.save(STATE, at / "x.pt")
    return at / "x.pt"


def _link_to_a_torch_file(at: Path) -> Path:
    (at / "link").symlink_to(_torch_file(at))
    return at / "link"


def _old_torch_file(at: Path) -> Path:
    torch.save(STATE, at / "x.pt", _use_new_zipfile_serialization=False)
    return at / "x.pt"


def _safetensors(at: Path) -> Path:
    save(at / "step")
    ckpt.convert(at / "step", at / "x.safetensors", prefix="model.")
    return (at / "x.safetensors").rename(at / "weights")  # its bytes say what it is


def _safetensors_files(at: Path) -> Path:
    save(at / "step")
    ckpt.convert(at / "step", at / "hub", prefix="model.", to="safetensors")
    return at / "hub"


def _torch_files(at: Path) -> Path:
    torch.save(STATE, at / "pytorch_model.bin")
    return at


def _one_file(at: Path) -> Path:
    ckpt.save_compressed_checkpoint(STATE, at / "x.nvc")
    return at / "x.nvc"


def _data_file(at: Path) -> Path:
    save(at / "step")
    return data_file(at / "step")


def _metadata(at: Path) -> Path:
    save(at / "step")
    return at / "step" / ".metadata"


def _run(at: Path) -> Path:
    for step in (9, 10):
        save(at / "run" / f"step-{step}")
    return at / "run"


def _zip(at: Path) -> Path:
    with zipfile.ZipFile(at / "x.zip", "w") as archive:
        archive.writestr("step/.metadata", "x")
    return at / "x.zip"


def _tar(at: Path) -> Path:
    save(at / "step")
    with tarfile.open(at / "x.tar", "w") as archive:
        archive.add(at / "step", "step")
    return at / "x.tar"


def _empty(at: Path) -> Path:
    (at / "x").write_bytes(b"")
    return at / "x"


def _junk(at: Path) -> Path:
    (at / "x").write_bytes(b"junk")
    return at / "x"


TORCH = ("a file of torch.save", f"torch.load reads it, and {CONVERT} it")
OTHER_KINDS: list[tuple[Callable[[Path], Path], str, str]] = [
    (_torch_file, *TORCH),
    (_link_to_a_torch_file, *TORCH),
    (_old_torch_file, "a file of torch.save in its format before PyTorch 1.6", "torch.load reads it; what torch.save"),
    (_safetensors, "a safetensors file", f"{CONVERT} it"),
    (_safetensors_files, "a directory of safetensors files", f"{CONVERT} them"),
    (_torch_files, "a directory of files of torch.save", f"{CONVERT} each, such as 'pytorch_model.bin'"),
    (_one_file, "a file of save_compressed_checkpoint", "`load_compressed_checkpoint` reads it"),
    (_data_file, "a data file of a checkpoint", "give the directory that it is in, '"),
    (_metadata, "the metadata of a checkpoint", "give the directory that it is in, '"),
    (_run, "a directory with checkpoints below it", "give one of them, such as '"),
    (_zip, "a zip archive", "unpack it"),
    (_tar, "a tar archive", "unpack it"),
    (_empty, "an empty file", "a directory with `.metadata` in it"),
    (_junk, "a file of another format", "no call of this package reads it"),
]
kinds = pytest.mark.parametrize(
    ("make", "what", "advice"), OTHER_KINDS, ids=[make.__name__.strip("_") for make, _, _ in OTHER_KINDS]
)

READERS: list[Callable[[Any], Any]] = [
    load,
    ckpt.open_checkpoint,
    ckpt.inspect_checkpoint,
    ckpt.verify_checkpoint,
    ckpt.recover_checkpoint,
    lambda path: ckpt.compare_checkpoints(path, path),
    lambda path: ckpt.NvcompReader(path).read_metadata(),
]


@kinds
def test_each_reader_says_what_is_there(tmp_path: Path, make: Callable[[Path], Path], what: str, advice: str) -> None:
    path = make(tmp_path)
    for read in READERS:
        text = message_of(lambda read=read: read(path))  # type: ignore[misc]
        assert text.startswith(f"This is {what}, not a checkpoint: "), text
        assert advice in text
        assert text.endswith(f"(file {os.fspath(path)!r})")


@kinds
def test_commands_say_the_same(tmp_path: Path, make: Callable[[Path], Path], what: str, advice: str) -> None:
    path = os.fspath(make(tmp_path))
    commands = [["verify", path], ["cat", path, "w"], ["diff", path, path], ["recover", path]]
    if make is not _run:
        commands += [["inspect", path], ["clean", path]]
        for command in ("ls", "clean"):
            result = CliRunner().invoke(app, [command, path, *(["--recursive"] if command == "clean" else [])])
            assert f"This is {what}, not the directory of a run or a checkpoint: " in result.stderr, result.stderr
    for arguments in commands:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: This is {what}, not a checkpoint: "), result.stderr
        assert advice in result.stderr


@pytest.mark.parametrize(
    "make",
    [_one_file, _data_file, _metadata, _run, _torch_files, _zip, _tar, _empty, _junk],
    ids=lambda make: make.__name__,
)
def test_convert_says_what_it_can_not_take(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    what = next(what for one, what, _ in OTHER_KINDS if one is make)
    text = message_of(lambda: ckpt.convert(path, tmp_path / "made"))
    assert text.startswith(f"This is {what}, not a checkpoint, safetensors files or a file of torch.save: "), text


def test_convert_looks_at_what_a_file_is_and_not_at_its_name(tmp_path: Path) -> None:
    assert ckpt.convert(_safetensors(tmp_path), tmp_path / "a").tensors == 2
    torch.save(STATE, tmp_path / "misnamed.json")
    assert ckpt.convert(tmp_path / "misnamed.json", tmp_path / "b").objects == 1


@kinds
def test_the_reader_of_single_files_says_it_too(
    tmp_path: Path, make: Callable[[Path], Path], what: str, advice: str
) -> None:
    if make in (_one_file, _link_to_a_torch_file):
        return
    path = make(tmp_path)
    text = message_of(lambda: ckpt.load_compressed_checkpoint(path))
    assert text.startswith(f"This is {what}, not a file of save_compressed_checkpoint: "), text
    assert advice in text


def test_a_checkpoint_is_no_single_file(tmp_path: Path) -> None:
    save(tmp_path / "step")
    text = message_of(lambda: ckpt.load_compressed_checkpoint(tmp_path / "step"))
    assert "a checkpoint, which is a directory" in text and "`load` or `open_checkpoint` reads it" in text


def test_a_damaged_single_file_is_not_renamed(tmp_path: Path) -> None:
    path = _one_file(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert "This is" not in message_of(lambda: ckpt.load_compressed_checkpoint(path))


def test_the_newest_step_of_a_run_is_named(tmp_path: Path) -> None:
    path = _run(tmp_path)
    for step in range(1000, 1040):
        (path / f"step-{step}").mkdir()
        if step == 1030:
            save(path / "step-1030")
    assert f"such as '{path}/step-1030'" in message_of(lambda: load(path))


def test_clean_of_a_run_leads_to_recursive(tmp_path: Path) -> None:
    path = _run(tmp_path)
    result = CliRunner().invoke(app, ["clean", os.fspath(path)])
    assert result.exit_code == 1 and "`dcp-nvcomp clean --recursive`, or `clean_run`" in result.stderr
    assert CliRunner().invoke(app, ["clean", "--recursive", os.fspath(path)]).exit_code == 0


def _put_everywhere(at: Path, url: str, **options: Any) -> None:
    """Put a file of torch.save, a run and a single file below a URL."""
    save(f"{url}/run/step-1", **options)
    ckpt.save_compressed_checkpoint(STATE, f"{url}/x.nvc", **options)
    fs, root = fsspec.url_to_fs(url, **options)
    fs.pipe_file(f"{root}/x.pt", _torch_file(at).read_bytes())


def _check_everywhere(url: str, **options: Any) -> None:
    for name, says in (
        ("x.pt", "This is a file of torch.save"),
        ("x.nvc", "This is a file of save_compressed_checkpoint"),
        ("run", f"give one of them, such as '{url}/run/step-1'"),
        ("run/step-1/.metadata", f"give the directory that it is in, '{url}/run/step-1'"),
        ("nothing", "no `.metadata` was found"),
    ):
        for read in (load, ckpt.open_checkpoint):
            text = message_of(lambda read=read, name=name: read(f"{url}/{name}", **options))  # type: ignore[misc]
            assert says in text, text


def test_in_memory(tmp_path: Path) -> None:
    _put_everywhere(tmp_path, "memory://kinds")
    _check_everywhere("memory://kinds")


@pytest.mark.s3
def test_on_s3(tmp_path: Path, s3_store: S3Store) -> None:
    url, options = s3_store
    _put_everywhere(tmp_path, url, **options)
    _check_everywhere(url, **options)
    assert "no `.metadata` was found" in message_of(lambda: load(url.rpartition("/")[0], **options))

"""A run's id belongs to its root: a run that was moved keeps it, a copy gets one of its own."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, ConfigurationError
from dcp_nvcomp.runs.own_files import run_id
from dcp_nvcomp.storage.open import open_filesystem
from tests.conftest import S3Store


def _saved(run: Path, *steps: int, fast: Path | None = None) -> str:
    """Save steps, and return the run's id."""
    options: dict[str, Any] = {} if fast is None else {"fast": fast, "fast_every": 1, "every": 100}
    with CheckpointManager(run, run_id="job", **options) as manager:
        for step in steps:
            manager.save(step, {"w": torch.full((100,), float(step))})
    return _id(run)[0]


def _restored(run: Path, fast: Path) -> int | None:
    with CheckpointManager(run, run_id="job", fast=fast, fast_every=1, every=100) as manager:
        restored = manager.restore({"w": torch.zeros(100)})
        return None if restored is None else restored.step


def _id(run: Path) -> list[str]:
    return os.fsdecode((run / ".run" / "id").read_bytes()).split("\n")


def test_the_root_stands_beside_the_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = _saved(run, 1)
    assert _id(run) == [first, str(run)]
    (run / ".run" / "id").write_text(first)  # as older versions wrote it
    assert _saved(run) == first and _id(run) == [first, str(run)]


def test_a_directory_whose_name_is_no_utf8(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"r\xe9sultats")
    first = _saved(run, 1)
    assert _saved(run, 2) == first
    assert (run / ".run" / "id").read_bytes() == os.fsencode(f"{first}\n{run}")


def test_a_copy_has_an_id_of_its_own_and_is_refused_the_fast_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, copy, fast = tmp_path / "run", tmp_path / "copy", tmp_path / "fast"
    first = _saved(run, 1, 2, fast=fast)
    shutil.copytree(run, copy)
    with pytest.raises(ConfigurationError, match="another run"):
        _restored(copy, fast)
    assert "is a copy" in caplog.text and str(run) in caplog.text
    second = _id(copy)[0]
    assert second != first and _id(copy)[1] == str(copy) and _id(run) == [first, str(run)]
    assert _restored(run, fast) == 2
    assert _saved(copy) == second, "it keeps that one"
    assert not [*(run / ".run").glob("here-*"), *(copy / ".run").glob("here-*")]


def test_a_run_that_was_moved_keeps_its_id(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    first = _saved(run, 1, 2, fast=fast)
    run.rename(tmp_path / "moved")
    assert _restored(tmp_path / "moved", fast) == 2
    assert _id(tmp_path / "moved") == [first, str(tmp_path / "moved")]


def test_where_the_old_root_is_another_run_by_now_it_was_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = _saved(run, 1)
    run.rename(tmp_path / "moved")
    assert _saved(run, 1) != first
    assert _saved(tmp_path / "moved") == first


def test_a_run_that_is_reached_by_another_path_keeps_its_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = _saved(run, 1)
    (tmp_path / "link").symlink_to(run)
    (run / ".run" / "id").write_text(f"{first}\n{tmp_path / 'link'}")  # as of a mount elsewhere
    assert _saved(run) == first and _id(run) == [first, str(run)]
    assert not list((run / ".run").glob("here-*"))


@pytest.mark.parametrize("old", ["sftp://user@elsewhere.invalid/run", "az://other/run", "nonsense://x", "\x00", "/"])
def test_a_root_that_must_not_or_cannot_be_opened_counts_as_gone(tmp_path: Path, old: str) -> None:
    run = tmp_path / "run"
    first = _saved(run, 1)
    (run / ".run" / "id").write_text(f"{first}\n{old}")
    assert _saved(run) == first and _id(run)[1] == str(run)


@pytest.mark.s3
def test_a_copy_on_s3(s3_store: S3Store) -> None:
    url, options = s3_store
    run, copy = (f"{url}/{name}-{uuid.uuid4().hex}" for name in ("run", "copy"))

    def id_of(root: str) -> str:
        own = open_filesystem(f"{root}/.run", storage_options=options)
        own.create_directory()
        return run_id(own, root, options)

    first = id_of(run)
    data = open_filesystem(f"{run}/.run", storage_options=options).read_all("id", limit_nbytes=1 << 14)
    open_filesystem(f"{copy}/.run", storage_options=options).publish("id", data)
    assert id_of(copy) not in ("", first)
    assert id_of(run) == first


def test_who_copies_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    _saved(run, 1)
    shutil.copytree(run, copy)
    with caplog.at_level(logging.WARNING):
        _saved(copy)
        _saved(copy)
    assert caplog.text.count("is a copy") == 1

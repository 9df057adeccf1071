"""Azure from a process that was forked from one that has used it, as DataLoader's workers are."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dcp_nvcomp import open_checkpoint
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.integrations.async_writer import NvcompAsyncWriter
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, save
from tests.integrations.test_async_writer import plan

from .suite import Place, write_file

pytestmark = pytest.mark.azure

STATE = {"w": torch.arange(3 << 20), "b": torch.ones(5)}
LIMIT_SECONDS = 60.0  # ends what hangs


def in_child(do: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child."""
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sending.send(do()))
    child.start()
    sending.close()
    try:
        assert receiving.poll(LIMIT_SECONDS), "the child hangs"
        return receiving.recv()
    finally:
        child.kill()
        child.join()


def use(filesystem: Filesystem, name: str) -> bytes:
    """Read, write, publish, list and remove."""
    write_file(filesystem, f"{name}-large", bytes(20 << 20))
    write_file(filesystem, name, name.encode())
    filesystem.publish(".metadata", name.encode())
    assert filesystem.file_nbytes(f"{name}-large") == 20 << 20
    filesystem.remove([f"{name}-large"])
    assert name in filesystem.list_names() and f"{name}-large" not in filesystem.list_names()
    assert filesystem.now_seconds() > 0
    return filesystem.read(name, 0, len(name))


def test_children_and_theirs(azure_store: Place) -> None:
    """With a filesystem from before the fork, and with one of their own; and the parent goes on."""
    url, options = azure_store
    filesystem = open_filesystem(url, storage_options=options)
    unfinished = filesystem.open_output("unfinished")
    unfinished.write(bytes(40 << 20))
    assert use(filesystem, "parent") == b"parent"
    assert in_child(lambda: use(filesystem, "inherited")) == b"inherited"
    assert in_child(lambda: use(open_filesystem(url, storage_options=options), "fresh")) == b"fresh"
    assert in_child(lambda: (use(filesystem, "child"), in_child(lambda: use(filesystem, "theirs")))) == (
        b"child",
        b"theirs",
    )
    unfinished.close()
    assert filesystem.file_nbytes("unfinished") == 40 << 20
    assert filesystem.list_names() == sorted(
        [".metadata", "child", "fresh", "inherited", "parent", "theirs", "unfinished"]
    )


def test_the_workers_of_a_data_loader(azure_store: Place) -> None:
    url, options = azure_store
    save(url, STATE, **options)
    with open_checkpoint(url, **options) as checkpoint:
        assert torch.equal(checkpoint["b"][:], STATE["b"])
        loader: Any = DataLoader(
            checkpoint.dataset(),
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
            timeout=LIMIT_SECONDS,
        )
        found = dict(loader)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], STATE[key]) for key in STATE)


def test_an_asynchronous_writer(azure_store: Place) -> None:
    url, options = azure_store
    writer = NvcompAsyncWriter(url, **options)
    own, planner, metadata = plan(writer, STATE)
    writer.prepare_write_data(own, planner)
    write, copy, arguments = writer.get_save_function_and_args()
    arguments[1] = copy()
    in_child(lambda: write(*arguments))
    results = writer.retrieve_write_results()
    assert isinstance(results, list)
    writer.finish(metadata, [results])
    assert_loads(url, STATE, **options)


def test_a_child_without_room_for_the_copy(azure_store: Place, tmp_path: Path) -> None:
    url, options = azure_store
    filesystem = open_filesystem(url, storage_options=options)
    filesystem.publish("a", b"x")

    def child() -> bytes:
        tempfile.tempdir = os.fspath(tmp_path / "missing")
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="forkserver"):
                filesystem.read("a", 0, 1)
        tempfile.tempdir = os.fspath(tmp_path)
        return filesystem.read("a", 0, 1)

    assert in_child(child) == b"x"
    assert list(tmp_path.iterdir()) == []

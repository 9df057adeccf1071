"""`install`: stock DCP's calls and classes save and load through this package, for good or for a while."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_nvcomp import ConfigurationError, NvcompReader, NvcompWriter
from dcp_nvcomp.integrations import install, stock_classes
from dcp_nvcomp.integrations.installing import install_here
from tests.distributed.launch import RankPool, ranks  # noqa: F401

STATE = {"w": torch.arange(1000.0), "n": 3}


@pytest.fixture(autouse=True)
def nothing_is_left_installed() -> Iterator[None]:
    before = list(stock_classes._makers)
    yield
    assert stock_classes._makers == before


def is_ours(path: Path) -> bool:
    return bool(list(path.glob("__*.metadata")))


def check(path: Path, reader: Any = None) -> None:
    state = {"w": torch.zeros(1000), "n": 0}
    dcp.load(state, checkpoint_id=None if reader else path, storage_reader=reader, no_dist=True)
    assert torch.equal(state["w"], STATE["w"]) and state["n"] == 3


def test_by_checkpoint_id(tmp_path: Path) -> None:
    with install(writer={"codec": "zstd"}):
        dcp.save(STATE, checkpoint_id=tmp_path / "a", no_dist=True)
        check(tmp_path / "a")
        dcp.save(STATE, checkpoint_id=f"file://{tmp_path}/url", no_dist=True)
        check(tmp_path / "url")
    dcp.save(STATE, checkpoint_id=tmp_path / "b", no_dist=True)
    assert is_ours(tmp_path / "a") and is_ours(tmp_path / "url") and not is_ours(tmp_path / "b")
    check(tmp_path / "b")


def test_by_a_hard_coded_class(tmp_path: Path) -> None:
    for context in (install(), contextlib.nullcontext(install())):  # for a while, and for good
        with context as installation:
            parameters = inspect.signature(FileSystemWriter).parameters  # what inspects a class sees what it takes
            writer: Any = FileSystemWriter(tmp_path, single_file_per_rank=False, thread_count=16)
            assert type(writer) is NvcompWriter
            assert writer.options.single_file_per_rank and writer.options.thread_count <= 8
            dcp.save(STATE, storage_writer=writer, no_dist=True)
            reader: Any = FileSystemReader(tmp_path)
            assert type(reader) is NvcompReader
            check(tmp_path, reader)
    installation.uninstall()
    installation.uninstall()  # once is enough
    assert type(FileSystemWriter(tmp_path)) is FileSystemWriter
    assert {"path", "single_file_per_rank", "thread_count"} <= parameters.keys()
    assert inspect.signature(FileSystemWriter).parameters == parameters
    assert "path" in inspect.signature(FileSystemReader).parameters


def test_options_and_overwrite(tmp_path: Path) -> None:
    with install(writer={"codec": "none"}, reader={"verify": "full"}):
        writer: Any = FileSystemWriter(path=tmp_path, overwrite=False)
        assert writer.options.codec == "none" and not writer.options.overwrite
        reader: Any = FileSystemReader(tmp_path)
        assert reader.load_options.verify == "full"
        with install(writer={"overwrite": True}):
            assert FileSystemWriter(tmp_path, overwrite=False).options.overwrite  # type: ignore[attr-defined]  # the inner one's options win
        assert FileSystemWriter(tmp_path).options.codec == "none"  # type: ignore[attr-defined]


def test_asynchronous_saves_outlast_the_block(tmp_path: Path, ranks: RankPool) -> None:  # noqa: F811
    assert ranks.run(_save_asynchronously, tmp_path, world_size=2) == [None, None]
    for kind in ("thread", "process"):
        assert is_ours(tmp_path / kind)
        check(tmp_path / kind, NvcompReader(tmp_path / kind))


def _save_asynchronously(path: Path) -> None:
    with install():
        thread: Any = dcp.async_save(STATE, checkpoint_id=path / "thread")
    thread.result()
    with install():
        process: Any = dcp.async_save(
            STATE, checkpoint_id=path / "process", async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
    process.result()


def test_subclasses_copies_and_pickles_are_left_alone(tmp_path: Path) -> None:
    class Own(FileSystemWriter):
        pass

    before = FileSystemWriter(tmp_path / "before")
    with install():
        assert type(Own(tmp_path)) is Own
        assert type(copy.copy(before)) is FileSystemWriter
        assert type(pickle.loads(pickle.dumps(before))) is FileSystemWriter
        with pytest.raises(TypeError, match="nonsense"):
            FileSystemWriter(tmp_path, nonsense=1)  # type: ignore[call-arg]
    # options of the storage show with its first URL
    with (
        install(writer={"endpoint_url": "http://127.0.0.1:1"}),
        pytest.raises(ConfigurationError, match="endpoint_url"),
    ):
        FileSystemWriter(tmp_path)


@pytest.mark.parametrize(
    ("stock", "arguments"),
    [
        (FileSystemWriter, {"serialization_format": SerializationFormat.SAFETENSORS}),
        (FileSystemWriter, {"_extensions": [ZStandard()]}),
        (FileSystemReader, {"_extension_registry": ExtensionRegistry()}),
    ],
)
def test_what_only_stock_dcp_can_do_stays_with_it(stock: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    with install():
        assert type(stock(tmp_path, **arguments)) is stock


def test_a_block_of_a_framework_is_for_its_thread_alone(tmp_path: Path) -> None:
    def made() -> type:
        return type(FileSystemWriter(tmp_path))

    with ThreadPoolExecutor(1) as pool:
        with install_here({"codec": "zstd"}, None):
            assert made() is NvcompWriter and pool.submit(made).result() is FileSystemWriter
            with install_here(None, None):
                assert FileSystemWriter(tmp_path).options.codec == "auto"  # type: ignore[attr-defined]
            assert FileSystemWriter(tmp_path).options.codec == "zstd"  # type: ignore[attr-defined]
            with install():
                assert pool.submit(made).result() is NvcompWriter
        assert made() is FileSystemWriter
    with pytest.raises(ConfigurationError, match="did you mean"), install_here({"codek": "zstd"}, None):
        raise AssertionError


@pytest.mark.parametrize(
    ("writer", "reader", "named"),
    [
        ({"codec": "nosuch"}, None, "nosuch"),
        ({"path": "x"}, None, "path"),
        (3, None, "not 3"),
        ({"codek": "auto"}, None, "'codek': did you mean 'codec'"),
        ({"thread_counts": 3}, None, "did you mean 'thread_count'"),
        ({"_extensions": [3]}, None, "codec="),
        (None, {"verify_": "full"}, "did you mean 'verify'"),
        (None, {"verify": "nosuch"}, "nosuch"),
    ],
)
def test_wrong_options_fail_at_once(writer: Any, reader: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        install(writer=writer, reader=reader)


def test_a_torch_without_these_names_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = FileSystemWriter.__new__
    monkeypatch.setattr(stock_classes, "_EXECUTORS", (("_gone", "Executor"),))
    with pytest.raises(ConfigurationError, match=r"has no .*_gone.Executor.* storage_writer="):
        stock_classes._hook.__wrapped__()  # as the first time in a process
    assert FileSystemWriter.__new__ is before

"""Constructor arguments of stock DCP's writers and readers: taken if they change nothing, else explained."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.errors import ConfigurationError
from tests.checkpoints import assert_loads


def defaults(stock: type) -> dict[str, Any]:
    parameters = inspect.signature(stock).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "path"}


@pytest.mark.parametrize("path", ["{}", "memory://stock-arguments"])
def test_every_default_of_stock_dcp(tmp_path: Path, path: str) -> None:
    writer = NvcompWriter(path.format(tmp_path), **defaults(FileSystemWriter))
    reader = NvcompReader(path.format(tmp_path), **defaults(FileSystemReader))
    options = writer.options
    assert (options.single_file_per_rank, options.sync_files, options.thread_count) == (True, True, 1)
    assert options.storage_options == reader.storage_options == {}
    into = {"w": torch.zeros(5)}
    dcp.save({"w": torch.ones(5)}, storage_writer=writer, no_dist=True)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(into["w"], torch.ones(5))


@pytest.mark.parametrize(
    ("kind", "options", "advice"),
    [
        (NvcompWriter, {"per_thread_copy_ahead": 1 << 20}, "host_memory_budget="),
        (NvcompWriter, {"cache_staged_state_dict": True}, "async_stager="),
        (NvcompWriter, {"_extensions": [object()]}, "codec="),
        (NvcompWriter, {"serialization_format": SerializationFormat.SAFETENSORS}, "leave the argument out"),
        (NvcompReader, {"_extension_registry": object()}, "FileSystemReader"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, kind: Any, options: dict[str, Any], advice: str) -> None:
    stock = "FileSystemWriter" if kind is NvcompWriter else "FileSystemReader"
    with pytest.raises(ConfigurationError, match=f"is an argument of stock DCP's {stock}") as caught:
        kind(tmp_path, **options)
    assert next(iter(options)) in str(caught.value) and advice in str(caught.value)


def test_positional_arguments_in_the_order_of_stock_dcp(tmp_path: Path) -> None:
    ours, theirs = NvcompWriter(tmp_path, False, False, 3), FileSystemWriter(tmp_path, False, False, 3)
    for name in ("single_file_per_rank", "sync_files", "thread_count"):
        assert getattr(ours.options, name) == getattr(theirs, name)


@pytest.mark.parametrize("arguments", [("zstd",), (True, "zstd"), (True, True, "zstd")])
def test_a_positional_argument_in_the_wrong_place(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="'zstd' must be"):
        NvcompWriter(tmp_path, *arguments)


@pytest.mark.parametrize("option", ["single_file_per_rankk", "thread_counts", "per_thread_copy_aheads"])
def test_mistyped_options_are_still_found(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Unknown option '{option}'"):
        NvcompWriter(tmp_path, **{option: 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: it stages to page-locked memory")
def test_the_advice_for_cached_staging(tmp_path: Path) -> None:
    stager, writer = BlockingAsyncStager(cache_staged_state_dict=True), NvcompWriter(tmp_path)
    for seed in (1.0, 2.0):
        state = {"w": torch.full((1000,), seed)}
        upload = dcp.async_save(
            state, storage_writer=writer, checkpoint_id=tmp_path / str(seed), async_stager=stager, no_dist=True
        )
        state["w"].zero_()
        upload.result(60)
        assert_loads(tmp_path / str(seed), {"w": torch.full((1000,), seed)})

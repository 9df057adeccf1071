"""A checkpoint of the real writer, decoded by the independent reader alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from tests.format.independent_reader import read_data_file


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "weight": torch.randn(700, 1000, generator=generator).bfloat16(),
        "moment": torch.randn(900, 700, generator=generator).square(),  # one sign: packed
        "minus": -torch.rand(300, 700, generator=generator, dtype=torch.float64) - 1,
        "transposed": torch.randn(300, 500, generator=generator).T,
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(3, 0, dtype=torch.int16),
        "object": {"lr": 1e-3, "steps": [1, 2, 3]},
    }
    for name in ELEMENT_TYPES:
        dtype = getattr(torch, name, None)  # older releases lack some
        if dtype is not None:
            nbytes = torch.randint(0, 2, (2 * 3 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            tensors[f"small.{name}"] = nbytes.view(dtype).reshape(2, 3)
    return tensors


@pytest.mark.parametrize("codec", ["auto", "planes-zstd", "planes-deflate", "zstd", "none"])
@pytest.mark.parametrize("single_file_per_rank", [True, False])
def test_the_independent_reader_reads_a_checkpoint(codec: str, single_file_per_rank: bool, tmp_path: Path) -> None:
    saved = state()
    writer = NvcompWriter(tmp_path, codec=codec, single_file_per_rank=single_file_per_rank, thread_count=2)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    found: dict[str, Any] = {}
    for path in tmp_path.glob("*.distcp"):
        found |= {fqn: value for (fqn, _), value in read_data_file(path.read_bytes()).items()}
    for fqn, tensor in saved.items():
        if isinstance(tensor, torch.Tensor):
            shape = tuple(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert found.pop(fqn) == ("tensor", dtype, shape, shape, raw(tensor)), fqn
    for fqn, value in {"object.lr": 1e-3, "object.steps": [1, 2, 3]}.items():
        kind, dtype, _, _, payload = found.pop(fqn)
        assert (kind, dtype) == ("bytes", "uint8")
        assert torch.load(io.BytesIO(payload), weights_only=True) == value
    assert not found

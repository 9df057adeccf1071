"""`inspect`, `verify` and `convert` on files that stand alone: those of one call, and streams."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import convert, load, save_compressed_checkpoint
from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError
from dcp_nvcomp.streams.writer import StreamWriter
from dcp_nvcomp.tools import inspect, verify
from tests.checkpoints import flip
from tests.states import assert_same, blank

STATE = {
    "model": {"w": torch.randn(300, 200), "zeros": torch.zeros(1 << 20)},
    "small": torch.arange(3),
    "layers": [torch.ones(7), 5],
    "step": 7,
}


def write(kind: str, path: str, state: Any = STATE) -> None:
    if kind == "one file":
        save_compressed_checkpoint(state, path)
    else:
        with StreamWriter(path, state) as stream:
            torch.save(state, stream)


@pytest.fixture(params=["one file", "stream"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_inspect_and_verify(tmp_path: Path, kind: str, place: str) -> None:
    path = str(tmp_path / "a.pt") if place == "disk" else f"memory://{uuid.uuid4().hex}/a.pt"
    write(kind, path)
    found = inspect(path)
    keys = {item.fqn: (item.dtype, item.shape) for item in found.items}
    (large,) = (key for key, (_, shape) in keys.items() if shape == (300, 200))
    assert keys[large][0] == "float32" and "w" in large
    assert found.layout == "one file" and found.headline.startswith(f"{path} is a compressed file: ")
    assert found.totals.uncompressed_nbytes >= 300 * 200 * 4 + (4 << 20) and found.ratio > 15
    for full in (False, True):
        checked = verify(path, full=full)
        assert checked.is_sound and not checked.findings and checked.path == path and checked.blocks >= 6


def test_each_byte_that_changed_is_found(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pt"
    write(kind, str(path))
    nbytes = path.stat().st_size
    for position in [*range(0, nbytes, nbytes // 12), *range(nbytes - 40, nbytes, 7)]:
        flip(path, position)
        try:
            checked = verify(path)
            assert not checked.is_sound, position
            assert all(one.file == "a.pt" for one in checked.findings)
        except CheckpointError:
            pass  # it says nothing more than that
        flip(path, position)
    assert verify(path).is_sound


@pytest.mark.parametrize("to", ["dcp-nvcomp", "dcp", "torch"])
def test_convert(tmp_path: Path, kind: str, to: Any) -> None:
    path = tmp_path / "a.pt"
    write(kind, str(path))
    done = convert(path, tmp_path / "out", to=to)
    assert (done.tensors, done.objects) == (4, 2)
    if to == "torch":
        assert_same(torch.load(tmp_path / "out"), STATE)
        return
    loaded = blank(STATE)
    load(loaded, tmp_path / "out", no_dist=True)
    assert_same(loaded, STATE)


def test_convert_to_safetensors(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    write(kind, str(tmp_path / "a.pt"))
    convert(tmp_path / "a.pt", tmp_path / "model.safetensors", prefix="model.")
    assert_same(load_file(tmp_path / "model.safetensors"), STATE["model"])


def test_what_is_expanded_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Zeros are 4,000 times as small as they were, and it was memory that they were saved from."""
    save_compressed_checkpoint({"w": torch.zeros(1 << 28)}, tmp_path / "a")
    assert convert(tmp_path / "a", tmp_path / "out").nbytes == 1 << 30


def test_a_part_of_a_checkpoint_is_none(tmp_path: Path, kind: str) -> None:
    from dcp_nvcomp import save

    save(STATE, tmp_path / "step")
    (data,) = (tmp_path / "step").glob("*.distcp")
    for act in (inspect, verify):
        with pytest.raises(CheckpointNotFoundError, match="a data file of a checkpoint"):
            act(data)

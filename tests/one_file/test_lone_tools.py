"""`inspect`, `verify` and `convert` on files that stand alone: those of one call, and streams."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dcp_nvcomp import convert, load, save_compressed_checkpoint
from dcp_nvcomp.cli.app import app
from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError, CheckpointReplacedError
from dcp_nvcomp.streams.writer import StreamWriter
from dcp_nvcomp.tools import inspect, verify
from tests.checkpoints import flip
from tests.effort import sampled
from tests.states import assert_same, blank

STATE = {
    "model": {"w": torch.randn(300, 200), "zeros": torch.zeros(1 << 20)},
    "small": torch.arange(3),
    "layers": [torch.ones(7), 5],
    "step": 7,
}


class Unknown:
    """A class that no one allows."""


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


@pytest.mark.timeout(3600)  # under the profile `all` it takes minutes
def test_each_byte_that_changed_is_found(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pt"
    write(kind, str(path))
    nbytes = path.stat().st_size
    for position in sampled(range(8, nbytes), nbytes // 40):
        flip(path, position)
        checked = verify(path)
        assert not checked.is_sound and checked.layout == "one file", position
        assert all(one.file == "a.pt" for one in checked.findings)
        flip(path, position)
    assert verify(path).is_sound
    flip(path, 0)  # a file of another kind
    with pytest.raises(CheckpointNotFoundError, match="This is a file of another format"):
        verify(path)


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


def test_a_file_that_is_replaced_while_it_is_verified_is_not_called_damaged(kind: str) -> None:
    path = f"memory://{uuid.uuid4().hex}/a.pt"
    write(kind, path)
    replaced: list[int] = []

    def replace(nbytes: int, _: int) -> None:
        if not replaced:
            replaced.append(nbytes)
            write(kind, path, {"w": torch.randn(500)})

    with pytest.raises(CheckpointReplacedError):
        verify(path, progress=replace)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_has_no_memory_of_its_own_is_an_object(tmp_path: Path, kind: str, layout: Any) -> None:
    write(kind, str(tmp_path / "a.pt"), {"s": torch.eye(50).to_sparse(layout=layout), "w": torch.ones(40_000)})
    done = convert(tmp_path / "a.pt", tmp_path / "out")
    assert (done.tensors, done.objects) == (1, 1)


@pytest.mark.parametrize("says", ["add_safe_globals", "contains itself", "no file of torch.save"])
def test_what_can_not_be_converted(tmp_path: Path, says: str) -> None:
    path, itself = tmp_path / "a.pt", list[Any]()
    itself.append(itself)
    if says == "no file of torch.save":
        with StreamWriter(path) as stream:
            stream.write(b'{"a": 1}')
        assert verify(path).is_sound
    else:
        write("stream", str(path), itself if says == "contains itself" else {"path": Unknown()})
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "out")
    assert "a.pt" in str(caught.value) and says in str(caught.value)


def test_a_run_with_a_link_to_its_newest_step(tmp_path: Path) -> None:
    """What can't be looked at is no reason for another error than that there is no checkpoint."""
    from dcp_nvcomp import save

    for step in (1, 2):
        save({"w": torch.ones(3)}, tmp_path / "run" / f"step-{step}", no_dist=True)
    (tmp_path / "run" / "latest").symlink_to("step-2")
    for act in (inspect, verify):
        with pytest.raises(CheckpointNotFoundError):
            act(tmp_path / "run")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "run")])
    assert result.exit_code == 0 and "step-2" in result.stdout


def test_a_part_of_a_checkpoint_is_none(tmp_path: Path, kind: str) -> None:
    from dcp_nvcomp import save

    save(STATE, tmp_path / "step")
    (data,) = (tmp_path / "step").glob("*.distcp")
    for act in (inspect, verify):
        with pytest.raises(CheckpointNotFoundError, match="a data file of a checkpoint"):
            act(data)

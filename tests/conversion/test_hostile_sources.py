"""Files to convert that would become huge, or whose tensors share bytes: refused, as their own libraries do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from dcp_nvcomp import CheckpointError, CorruptDataError, convert, open_checkpoint


def _torch_file(path: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, path / "a.pt")
    return path / "a.pt"


def test_a_small_file_of_a_huge_expanded_tensor_is_refused(tmp_path: Path) -> None:
    source = _torch_file(tmp_path, w=torch.ones(4), huge=torch.ones(1).expand(1 << 38))
    with pytest.raises(CheckpointError, match=rf"has \d+ bytes, .* this one {1 << 40}: .*\(file '.*a\.pt', key 'huge'"):
        convert(source, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def test_so_are_many_large_ones(tmp_path: Path) -> None:
    base = torch.ones(1)
    source = _torch_file(tmp_path, **{f"w{i}": base.expand(1 << 20, 256) for i in range(2)})
    with pytest.raises(CheckpointError, match="their elements overlap"):
        convert(source, tmp_path / "b.safetensors")


def test_windows_of_one_tensor_are_refused_too(tmp_path: Path) -> None:
    source = _torch_file(tmp_path, w=torch.ones(1 << 16).as_strided((1 << 15, 1 << 15), (1, 1)))
    with pytest.raises(CheckpointError, match="their elements overlap"):
        convert(source, tmp_path / "b")


@pytest.mark.parametrize("to", ["dcp-nvcomp", "dcp", "safetensors", "torch"])
def test_expanded_tensors_of_usual_sizes_are_converted(tmp_path: Path, to: Any) -> None:
    w = torch.arange(5.0).reshape(5, 1).expand(5, 100_000)
    convert(_torch_file(tmp_path, w=w), tmp_path / "b", to=to)
    if to == "torch":
        found = torch.load(tmp_path / "b")["w"]
    elif to == "safetensors":
        found = load_file(tmp_path / "b" / "model.safetensors")["w"]
    else:
        with open_checkpoint(tmp_path / "b") as checkpoint:
            found = checkpoint["w"][:]
    assert torch.equal(found, w)


def _safetensors(path: Path, spans: dict[str, tuple[int, int]], nbytes: int) -> Path:
    described = {
        key: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for key, (start, stop) in spans.items()
    }
    text = json.dumps(described).encode()
    (path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(nbytes)))
    return path / "a.safetensors"


@pytest.mark.parametrize(
    ("spans", "nbytes", "words"),
    [
        ({"a": (0, 4), "b": (0, 4)}, 4, "overlaps"),
        ({"a": (0, 4), "b": (2, 6)}, 6, "overlaps"),
        ({"a": (0, 8), "b": (2, 6)}, 8, "overlaps"),
        ({"a": (0, 4), "b": (5, 8)}, 8, "gap"),
        ({"a": (1, 4)}, 4, "gap"),
        ({"a": (0, 4)}, 5, "the last tensor ends at"),
        ({}, 1, "the last tensor ends at"),
        ({"a": (0, 4), "empty": (2, 2)}, 4, "overlaps"),
    ],
)
def test_tensors_must_follow_each_other(
    tmp_path: Path, spans: dict[str, tuple[int, int]], nbytes: int, words: str
) -> None:
    source = _safetensors(tmp_path, spans, nbytes)
    with pytest.raises(safetensors.SafetensorError):
        load_file(source)
    with pytest.raises(CorruptDataError, match=words):
        convert(source, tmp_path / "b")


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4), "b": torch.empty(0), "c": torch.empty(3, 0), "d": torch.ones(2, dtype=torch.int8)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert convert(tmp_path / "a.safetensors", tmp_path / "b").tensors == 4
    source = _safetensors(tmp_path, {"z": (0, 0), "a": (0, 4), "b": (4, 4), "c": (4, 6)}, 6)
    load_file(source)
    assert convert(source, tmp_path / "c").tensors == 4


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": 1e400}', b"1" * 5000, b"\xff{"])
def test_headers_and_indices_that_are_no_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CorruptDataError):
        convert(tmp_path / "a.safetensors", tmp_path / "b")
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CorruptDataError):
        convert(tmp_path, tmp_path.parent / "c")

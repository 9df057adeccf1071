"""There and back: values keep their bits in every format that can hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dcp_nvcomp import convert, errors, open_checkpoint, save
from dcp_nvcomp.conversion.safetensors_format import DTYPES
from tests.checkpoints import assert_holds, assert_loads, save_stock
from tests.conftest import S3Store
from tests.states import State, assert_same, assert_same_bits

ALL_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + dtype.itemsize)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def tensors(dtypes: list[torch.dtype]) -> State:
    found: State = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        found[f"{name}.matrix"] = random_bits((70, 50), dtype)
        found[f"{name}.scalar"] = random_bits((), dtype)
        found[f"{name}.empty"] = torch.empty((0, 3), dtype=dtype)
    return found


def nested_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(30, 20), "blocks": [{"b": torch.ones(3)}, {"b": torch.zeros(3)}]},
        "step": 7,
        "config": {"lr": 0.1, "names": ["a", "b"]},
    }


@pytest.mark.parametrize("to", ["dcp", "torch", "dcp-nvcomp"])
def test_every_dtype_there_and_back(tmp_path: Path, to: Any) -> None:
    state = tensors(ALL_DTYPES)
    save(state, tmp_path / "a", no_dist=True)
    there = tmp_path / ("b.pt" if to == "torch" else "b")
    found = convert(tmp_path / "a", there, to=to)
    assert (found.format, found.tensors, found.objects) == (to, len(state), 0)
    convert(there, tmp_path / "c")
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.keys() == state.keys()
        for key, tensor in state.items():
            assert_same_bits(checkpoint[key][...], tensor)


def test_every_dtype_that_safetensors_has(tmp_path: Path) -> None:
    state = tensors(list(DTYPES))
    save(state, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c")
    assert_loads(tmp_path / "c", state)
    for dtype in set(ALL_DTYPES) - set(DTYPES):
        save(tensors([dtype]), tmp_path / "d", no_dist=True)
        with pytest.raises(errors.ConfigurationError, match="safetensors has no"):
            convert(tmp_path / "d", tmp_path / "d.safetensors")
        assert not (tmp_path / "d.safetensors").exists()


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    state = tensors([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
    save(state, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b.safetensors")
    read = load_file(tmp_path / "b.safetensors")
    assert read.keys() == state.keys()
    for key, tensor in state.items():
        assert_same_bits(read[key], tensor)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(state, tmp_path / "theirs.safetensors", {"note": "x"})
    convert(tmp_path / "theirs.safetensors", tmp_path / "c")
    assert_loads(tmp_path / "c", state)


def test_torch_reads_what_is_written_for_stock_dcp(tmp_path: Path) -> None:
    state = nested_state()
    save(state, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert_holds(dcp.FileSystemReader(tmp_path / "b"), state, no_dist=True)


def test_a_nested_state_keeps_its_form(tmp_path: Path) -> None:
    state = nested_state()
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b")
    assert_loads(tmp_path / "b", state)
    convert(tmp_path / "b", tmp_path / "c.pt")
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert_same(back, state)
    save_stock(tmp_path / "d", state)
    convert(tmp_path / "d", tmp_path / "e")
    assert_loads(tmp_path / "e", state)


def test_prefix_and_dtype(tmp_path: Path) -> None:
    state = nested_state()
    save(state, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b.safetensors", prefix="model.", dtype=torch.bfloat16)
    read = load_file(tmp_path / "b.safetensors")
    assert read.keys() == {"w", "blocks.0.b", "blocks.1.b"}
    assert_same_bits(read["w"], state["model"]["w"].bfloat16())
    convert(tmp_path / "a", tmp_path / "c.pt", prefix="model.")
    assert_same(torch.load(tmp_path / "c.pt"), state["model"])
    with pytest.raises(errors.ConfigurationError, match="No key begins with 'x.'"):
        convert(tmp_path / "a", tmp_path / "d", prefix="x.")
    with pytest.raises(errors.ConfigurationError, match=r"3 keys are Python objects, such as .*prefix="):
        convert(tmp_path / "a", tmp_path / "d.safetensors")


def test_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layer.{number}": torch.randn(100, 100) for number in range(10)}
    save(state, tmp_path / "a", no_dist=True)
    to = tmp_path / "hf"
    convert(tmp_path / "a", to, to="safetensors", max_shard_nbytes=100_000)
    names = sorted(file.name for file in to.iterdir())
    assert names == [
        *(f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)),
        "model.safetensors.index.json",
    ]
    index = json.loads((to / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 400_000
    assert index["weight_map"].keys() == state.keys()
    convert(to, tmp_path / "b")
    with open_checkpoint(tmp_path / "b") as checkpoint:
        assert_same(checkpoint.read(state), state)


@pytest.mark.parametrize("name", ["b", "b.pt", "b.safetensors", "hf"])
def test_nothing_is_replaced_unless_asked(tmp_path: Path, name: str) -> None:
    save({"w": torch.ones(3)}, tmp_path / "a", no_dist=True)
    save({"w": torch.zeros(3)}, tmp_path / "a2", no_dist=True)
    to: Any = "safetensors" if name == "hf" else None
    convert(tmp_path / "a", tmp_path / name, to=to)
    with pytest.raises(errors.CheckpointExistsError):
        convert(tmp_path / "a2", tmp_path / name, to=to)
    convert(tmp_path / "a2", tmp_path / name, to=to, overwrite=True)
    convert(tmp_path / name, tmp_path / "c")
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert float(checkpoint["w"][0]) == 0.0


class Opaque:
    """Needs code to be loaded."""


def test_objects_are_carried_over_without_being_run(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "opaque": Opaque()}, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    into = {"w": torch.zeros(2), "opaque": None}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "b"), no_dist=True)
    assert isinstance(into["opaque"], Opaque)
    with pytest.raises(errors.UnsafeObjectError):
        convert(tmp_path / "a", tmp_path / "c.pt")
    assert not (tmp_path / "c.pt").exists()
    torch.save({"opaque": Opaque()}, tmp_path / "d.pt")
    with pytest.raises(errors.UnsafeObjectError, match="weights_only"):
        convert(tmp_path / "d.pt", tmp_path / "e")


def test_mistakes(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "a", no_dist=True)
    with pytest.raises(errors.ConfigurationError, match="same place"):
        convert(tmp_path / "a", f"{tmp_path}/a/")
    with pytest.raises(errors.CheckpointNotFoundError, match="nothing to convert"):
        convert(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(errors.ConfigurationError, match="one of 'dcp-nvcomp', 'dcp', 'safetensors', 'torch'"):
        convert(tmp_path / "a", tmp_path / "b", to="onnx")  # type: ignore[arg-type]
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    with pytest.raises(errors.CheckpointError, match="this name"):
        convert(tmp_path / "twice.pt", tmp_path / "b")


def test_progress_reaches_all_of_it(tmp_path: Path) -> None:
    state = tensors([torch.float32])
    save(state, tmp_path / "a", no_dist=True)
    for name in ("b", "b.pt", "b.safetensors"):
        calls: list[tuple[int, int]] = []
        convert(tmp_path / "a", tmp_path / name, progress=lambda done, total: calls.append((done, total)))
        assert calls[-1] == (14_004, 14_004)


@pytest.mark.s3
def test_from_and_to_s3(tmp_path: Path, s3_store: S3Store) -> None:
    url, options = s3_store
    state = nested_state()["model"]
    save(state, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", f"{url}/ours", source_options={}, storage_options=options)
    convert(f"{url}/ours", f"{url}/stock", to="dcp", storage_options=options)
    convert(f"{url}/stock", f"{url}/x/model.safetensors", storage_options=options)
    convert(f"{url}/x/model.safetensors", f"{url}/model.pt", storage_options=options)
    convert(f"{url}/model.pt", tmp_path / "b", source_options=options)
    with open_checkpoint(tmp_path / "b") as checkpoint:
        assert_same_bits(checkpoint["w"][...], state["w"])
        assert_same_bits(checkpoint["blocks.1.b"][...], state["blocks"][1]["b"])

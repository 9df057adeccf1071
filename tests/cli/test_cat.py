"""`dcp-nvcomp cat`: a tensor, some rows, an object."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from dcp_nvcomp import convert, save
from dcp_nvcomp.cli.looking import parse_index
from tests.cli.checkpoints import run

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(20.0).reshape(5, 4), "empty": torch.zeros(0), "odd[0]": torch.tensor([7])},
    "broken": torch.tensor([1.0, float("nan"), float("inf"), 0.0]),
    "config": {"lr": 0.1, "name": "\x1b[31mred"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cat")
    save(STATE, path, no_dist=True)
    return str(path)


cat = partial(run, "cat")


def test_a_tensor(saved: str) -> None:
    status, output, errors = cat(saved, "model.w")
    assert (status, errors) == (0, "")
    assert output.splitlines()[:2] == ["model.w: float32 [5, 4]", "min 0, max 19, mean 9.5, nan 0, inf 0, zeros 1"]
    assert "[16., 17., 18., 19.]" in output


@pytest.mark.parametrize(
    ("index", "first"),
    [("[1:3]", "float32 [2, 4]"), ("[-1, ::2]", "float32 [2]"), ("[..., 0]", "float32 [5]"), ("[]", "float32 [5, 4]")],
)
def test_rows(saved: str, index: str, first: str) -> None:
    status, output, _ = cat(saved, f"model.w{index}")
    assert status == 0
    assert output.splitlines()[0] == f"model.w: {first}"


def test_what_is_broken_is_counted(saved: str) -> None:
    assert "min 0, max 1, mean 0.5, nan 1, inf 1, zeros 1" in cat(saved, "broken")[1]
    assert cat(saved, "model.empty")[1].splitlines()[0] == "model.empty: float32 [0]"


def test_brackets_may_be_part_of_a_key(saved: str) -> None:
    assert "tensor([7])" in cat(saved, "model.odd[0]")[1]


def test_objects(saved: str) -> None:
    assert cat(saved, "config.lr")[1].splitlines() == ["config.lr: float", "0.1"]
    assert "\x1b" not in cat(saved, "config.name")[1]


def test_json(saved: str) -> None:
    found = json.loads(cat(saved, "broken", "--json")[1])
    assert found["values"] == [1.0, "nan", "inf", 0.0]
    assert (found["schema"], found["key"], found["dtype"], found["shape"]) == (1, "broken", "float32", [4])
    assert found["statistics"]["nan"] == 1
    assert json.loads(cat(saved, "config.lr", "--json")[1])["value"] == 0.1


def test_json_of_what_json_has_no_word_for(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    value = {(1, 2): 3, "nan": float("nan"), "tuple": (1, 2j), "set": {1}, "bytes": b"x", "none": None}
    torch.save({"o": (value,), "itself": (itself,)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a")
    found = json.loads(cat(str(tmp_path / "a"), "o", "--json")[1])["value"]
    assert found == [{"(1, 2)": 3, "nan": "nan", "tuple": [1, [0.0, 2.0]], "set": "{1}", "bytes": "b'x'", "none": None}]
    assert json.loads(cat(str(tmp_path / "a"), "itself", "--json")[1])["value"] == "([[...]],)"


def test_a_dtype_with_which_nothing_can_be_computed(tmp_path: Path) -> None:
    save({"w": torch.arange(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path, no_dist=True)
    assert cat(str(tmp_path), "w")[1].splitlines() == [
        "w: float4_e2m1fn_x2 [3]",
        "tensor([0, 1, 2], dtype=torch.uint8)",
    ]
    assert json.loads(cat(str(tmp_path), "w", "--json")[1])["values"] == [0, 1, 2]


def test_a_sparse_tensor(tmp_path: Path) -> None:
    save({"w": torch.eye(3).to_sparse()}, tmp_path, no_dist=True)
    assert json.loads(cat(str(tmp_path), "w[1:, :2]", "--json")[1])["values"] == [[0.0, 1.0], [0.0, 0.0]]


def test_mistakes(saved: str) -> None:
    status, _, errors = cat(saved, "w")
    assert status == 1 and "has 'model.w'" in errors and len(errors.splitlines()) == 1
    assert cat(saved, "model.w[9]")[0] == 2
    assert cat(saved, "model.w[x]")[0] == 2
    assert cat(saved, "model.w[::0]")[0] == 2
    assert cat(f"{saved}/nothing", "w")[0] == 1


def test_indices() -> None:
    assert parse_index("1:, -2, ..., ::3") == (slice(1, None), -2, ..., slice(None, None, 3))
    with pytest.raises(typer.BadParameter):
        parse_index("1:2:3:4")

"""`dcp-nvcomp diff` and `tools.compare`: what differs between two checkpoints."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import convert, save, tools
from tests.checkpoints import save_stock
from tests.cli.checkpoints import run


class Opaque:
    """Not read, as it could run code."""


def state() -> dict[str, Any]:
    return {
        "same": torch.randn(50, 40, generator=torch.Generator().manual_seed(0)),
        "w": torch.tensor([1.0, 2.0, float("nan"), 0.0]),
        "shape": torch.zeros(3),
        "dtype": torch.zeros(3),
        "kind": torch.zeros(3),
        "step": 3,
        "gone": torch.zeros(2),
        "opaque": Opaque(),
    }


def other() -> dict[str, Any]:
    changed = state()
    changed["w"] = torch.tensor([1.0, 2.5, float("nan"), -0.0])
    changed.update(shape=torch.zeros(4), dtype=torch.zeros(3).half(), kind=3, step=4, new=torch.zeros(1))
    del changed["gone"]
    return changed


diff = partial(run, "diff")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("diff")
    save(state(), path / "a", no_dist=True)
    save_stock(path / "b", other())
    return str(path / "a"), str(path / "b")


def test_every_difference(paths: tuple[str, str]) -> None:
    found = tools.compare(*paths)
    assert {one.fqn: one.kind for one in found.differences} == {
        "w": "values",
        "shape": "shape",
        "dtype": "dtype",
        "kind": "kind",
        "step": "values",
        "gone": "only in a",
        "new": "only in b",
    }
    (w,) = (one for one in found.differences if one.fqn == "w")
    assert (w.elements, w.max_difference) == (2, 0.5)
    assert found.equal == 2 and not found.is_equal


def test_equal_ones(paths: tuple[str, str], tmp_path: Path) -> None:
    plain = {key: value for key, value in state().items() if key != "opaque"}
    save(plain, tmp_path / "c", no_dist=True)
    save_stock(tmp_path / "d", plain)
    status, output, errors = diff(str(tmp_path / "c"), str(tmp_path / "d"))
    assert (status, output, errors) == (0, "7 keys are equal in their values.\n", "")


def test_nan_that_came_or_went(tmp_path: Path) -> None:
    save({"w": torch.zeros(2)}, tmp_path / "a", no_dist=True)
    save({"w": torch.tensor([0.0, float("nan")])}, tmp_path / "b", no_dist=True)
    (one,) = tools.compare(tmp_path / "a", tmp_path / "b").differences
    assert one.max_difference is not None and math.isnan(one.max_difference)
    found = json.loads(diff(str(tmp_path / "a"), str(tmp_path / "b"), "--json")[1])
    assert found["differences"][0]["max_difference"] == "nan"


def test_the_table_and_keys_only(paths: tuple[str, str]) -> None:
    status, output, _ = diff(*paths)
    assert status == 1
    assert output.splitlines()[0].split() == ["key", "differs", "how"]
    assert "2 of 4 elements differ, by at most 0.5" in output
    assert output.splitlines()[-1] == "2 keys are equal in their values, 7 differ."
    status, output, _ = diff(*paths, "--keys-only")
    assert "elements differ" not in output and "float32 [3] and float16 [3]" in output


def test_progress(paths: tuple[str, str]) -> None:
    calls: list[tuple[int, int]] = []
    tools.compare(*paths, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


def differences(tmp_path: Path, one: Any, other: Any) -> tuple[Any, ...]:
    for name, value in (("a", one), ("b", other)):
        if isinstance(value, tuple | dict):  # a save would take it apart
            torch.save({"x": (value,)}, tmp_path / "x.pt")
            convert(tmp_path / "x.pt", tmp_path / name)
        else:
            save({"x": value}, tmp_path / name, no_dist=True)
        assert tools.compare(tmp_path / name, tmp_path / name).is_equal
    return tools.compare(tmp_path / "a", tmp_path / "b").differences


def middle(value: float) -> torch.Tensor:
    tensor = torch.ones(5000)
    tensor[2500] = value
    return tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((middle(0),), (middle(1),)),  # which torch prints alike
        ({"m": (middle(0).to_sparse(),)}, {"m": (middle(2).to_sparse(),)}),
        ((torch.ones(2),), (torch.ones(2).double(),)),
        (0.0, -0.0),
        ((1, 2), (1, 3)),
        (complex(0, 0.0), complex(0, -0.0)),
        (1, True),
    ],
)
def test_objects_that_differ(tmp_path: Path, one: Any, other: Any) -> None:
    (found,) = differences(tmp_path, one, other)
    assert found.kind == "values"


@pytest.mark.parametrize(
    "value", [float("nan"), (torch.tensor([float("nan")]), float("nan")), Opaque(), {1, 2}, torch.Size([3])]
)
def test_what_is_equal_to_itself(tmp_path: Path, value: Any) -> None:
    assert differences(tmp_path, value, value) == ()


def test_equal_objects_that_are_stored_differently(tmp_path: Path) -> None:
    one = float("nan")
    assert differences(tmp_path, (one, one, middle(3)), (one, float("nan"), middle(3))) == ()


def test_objects_that_are_not_read(tmp_path: Path) -> None:
    changed = Opaque()
    changed.x = 1  # type: ignore[attr-defined]
    (found,) = differences(tmp_path, Opaque(), changed)
    assert found.kind == "unknown"


@pytest.mark.parametrize(
    ("dtype", "one", "other", "gap"),
    [
        (torch.int64, 2**60, 2**60 + 1, 1),
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.uint64, 0, 2**64 - 1, 2**64 - 1),
        (torch.int8, -128, 127, 255),
        (torch.bool, 0, 1, 1),
    ],
)
def test_integers_are_subtracted_as_integers(
    tmp_path: Path, dtype: torch.dtype, one: int, other: int, gap: int
) -> None:
    (found,) = differences(tmp_path, torch.tensor([one, 0], dtype=dtype), torch.tensor([other, 0], dtype=dtype))
    assert found.what == f"1 of 2 elements differ, by at most {gap}"
    assert found.max_difference == float(gap)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.complex64])
def test_differences_in_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    one, other = (torch.full((16,), value, dtype=torch.uint8).view(dtype) for value in (1, 2))
    (found,) = differences(tmp_path, one, other)
    assert found.elements == one.numel()
    assert (found.max_difference is None) is (dtype == torch.float4_e2m1fn_x2)


def test_sparse_tensors(tmp_path: Path) -> None:
    (found,) = differences(tmp_path, middle(2).to_sparse(), middle(5).to_sparse())
    assert (found.elements, found.max_difference) == (1, 3.0)


def test_mistakes(paths: tuple[str, str]) -> None:
    status, _, errors = diff(paths[0], paths[1] + "/nothing")
    assert status == 1 and len(errors.splitlines()) == 1

"""`Checkpoint.load_into`: plain modules, on any device, with keys under a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_nvcomp import errors, open_checkpoint, save
from tests.states import assert_same


class Model(nn.Module):
    """Tied weights, a buffer, a buffer that is not saved, a scalar, extra state."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Model]:
    model = Model()
    model.note = "saved"
    with torch.no_grad():
        model.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
    save({"model": model.state_dict()}, tmp_path, no_dist=True)
    return tmp_path, model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_loaded(saved: tuple[Path, Model], device: str) -> None:
    path, model = saved
    with torch.device(device):
        into = Model()
    with open_checkpoint(path) as checkpoint:
        checkpoint.load_into(into, prefix="model.")
    assert_same(into.state_dict(), model.state_dict())
    assert into.note == "saved"
    assert into.head.weight is into.embed.weight, "tied weights stay tied"
    assert [one.requires_grad for one in into.parameters()] == [one.requires_grad for one in model.parameters()]
    assert not any(one.is_meta for one in into.parameters())


def test_a_module_that_is_partly_on_meta(saved: tuple[Path, Model]) -> None:
    path, model = saved
    into = Model()
    into.norm.to("meta")
    weight = into.embed.weight
    with open_checkpoint(path) as checkpoint:
        checkpoint.load_into(into, prefix="model.")
    assert into.embed.weight is weight, "what has memory is filled where it is"
    assert_same(into.state_dict(), model.state_dict())


def test_keys_that_are_missing(saved: tuple[Path, Model]) -> None:
    path, _ = saved
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(errors.MissingKeyError, match=r"prefix='model\.'"):
            checkpoint.load_into(Model())
        into = nn.ModuleDict({"model": Model(), "more": nn.Linear(2, 2)})
        with pytest.raises(errors.MissingKeyError, match=r"no 'more\.weight'"):
            checkpoint.load_into(into)


def test_nothing_is_written_if_a_shape_differs(saved: tuple[Path, Model]) -> None:
    path, _ = saved
    into = Model(width=9)
    before = {key: value.clone() for key, value in into.state_dict().items() if isinstance(value, torch.Tensor)}
    with open_checkpoint(path) as checkpoint, pytest.raises(errors.ShapeMismatchError, match=r"\(5, 9\).*\(5, 8\)"):
        checkpoint.load_into(into, prefix="model.")
    assert_same({key: into.state_dict()[key] for key in before}, before)


def test_another_dtype_is_converted_only_if_asked_for(saved: tuple[Path, Model]) -> None:
    path, model = saved
    into = Model().to(torch.bfloat16)
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(errors.DtypeMismatchError, match="torch.bfloat16.*torch.float32.*dtype='cast'"):
            checkpoint.load_into(into, prefix="model.")
        with pytest.warns(UserWarning, match="is converted to torch.bfloat16"):
            checkpoint.load_into(into, prefix="model.", dtype="cast")
    assert torch.equal(into.embed.weight, model.embed.weight.to(torch.bfloat16))
    with open_checkpoint(path) as checkpoint, pytest.raises(errors.ConfigurationError, match="'same', 'cast'"):
        checkpoint.load_into(into, dtype="convert")  # type: ignore[arg-type]


def test_what_is_no_tensor_in_the_checkpoint(tmp_path: Path) -> None:
    save({"weight": 3, "bias": torch.ones(2)}, tmp_path, no_dist=True)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(errors.ShapeMismatchError, match="Python object"):
        checkpoint.load_into(nn.Linear(2, 2))

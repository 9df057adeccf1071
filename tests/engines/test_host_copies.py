"""Copies of strided tensors to the host, where the device has no memory for a contiguous one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from dcp_nvcomp.engines.cuda.fallback import to_host
from dcp_nvcomp.engines.tensors import host_copy
from dcp_nvcomp.saving.encode.choices import _device_sample, spread_sample

BASE = torch.arange(6 * 50 * 70, dtype=torch.int32).reshape(6, 50, 70)
VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.mT,
    "dimensions reversed": BASE.permute(2, 1, 0),
    "a box": BASE[1:5, 3:40, 7:60],
    "a box, transposed": BASE[1:5, 3:40, 7:60].permute(1, 2, 0),
    "every second element": BASE[..., ::2],
    "expanded": BASE[:, :1].expand(6, 50, 70),
    "one element": BASE[2, 3, 4],
    "empty": BASE[:0].mT,
}


def leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no strided tensor made contiguous, as on a device without memory."""
    contiguous = torch.Tensor.contiguous

    def refuse(self: torch.Tensor, **more: object) -> torch.Tensor:
        if not self.is_contiguous():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return contiguous(self)

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)


@pytest.mark.parametrize("name", VIEWS)
def test_runs_are_copied_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_no_memory(monkeypatch)
    view = VIEWS[name]
    copy = host_copy(view)
    assert copy.is_contiguous() and torch.equal(copy, view)
    assert to_host([view, BASE[0, 0]]).tobytes() == view.numpy().tobytes() + BASE[0, 0].numpy().tobytes()


@pytest.mark.parametrize("name", [name for name, view in VIEWS.items() if view.numel() > 1])
@pytest.mark.parametrize("sample", [_device_sample, partial(spread_sample, nbytes=4096)], ids=["few", "spread"])
def test_what_is_looked_at_is_the_same(
    name: str, sample: Callable[[torch.Tensor], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sample(VIEWS[name])
    leave_no_memory(monkeypatch)
    assert (sample(VIEWS[name]) == found).all()

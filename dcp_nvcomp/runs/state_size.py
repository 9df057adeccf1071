"""How much memory a rank's part of a state takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def state_nbytes(values: Mapping[str, Any]) -> int:
    """Return the size of the tensors, in bytes."""
    found, waiting = 0, list(values.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found += local.numel() * local.element_size()
    return found

"""Host memory for encoded and decoded bytes."""

from __future__ import annotations

import numpy as np

__all__ = ["pinned_allocate", "plain_allocate"]


_ALIGNMENT_NBYTES = 4096


def plain_allocate(nbytes: int) -> memoryview:
    """Host memory whose address is a multiple of 4096, for direct IO."""
    raw = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_NBYTES
    return raw[start : start + nbytes].data


def pinned_allocate(nbytes: int) -> memoryview:
    """Page-locked host memory, which a GPU copies to at full speed."""
    import torch

    view: memoryview = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    return view

"""Streams on which threads work beside training.

A new thread's current stream is the device's default one, on which training works too: what is queued there waits for
all that training has queued, and training waits for it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

# Those that no thread has. They are kept: what torch allocates for a stream stays reserved for it.
_FREE: Final[defaultdict[torch.device, list[torch.cuda.Stream]]] = defaultdict(list)
_LENDING: Final = threading.Lock()


@contextmanager
def stream_beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Make a stream of the device current that no other save has meanwhile, and that waits for an event.

    Torch has 32 of them, and may have given the same one to others: that costs time only.
    """
    with _LENDING:
        stream = _FREE[device].pop() if _FREE[device] else None
    if stream is None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
    finally:
        with _LENDING:
            _FREE[device].append(stream)

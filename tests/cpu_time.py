"""How much processor time something may take, however busy the machine is and whatever ran before it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

__all__ = ["within_cpu_seconds"]


@contextlib.contextmanager
def within_cpu_seconds(limit: float) -> Iterator[None]:
    """Fail if the block takes this thread longer than that.

    Other threads, and the collection of what other tests have left, which takes over a second late in a long run, do
    not count.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    began = time.thread_time()
    try:
        yield
    finally:
        took = time.thread_time() - began
        if was_enabled:
            gc.enable()
    assert took < limit, f"it took {took:.2f} s of processor time"

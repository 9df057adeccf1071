"""Python's cyclic garbage collector, held back while many objects are made that will all be kept."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The collector is one for the whole process, and so is how many threads want it to wait.
_lock = threading.Lock()
_waiting_for = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection while this lasts, on any thread.

    Only around work of our own that neither waits for anything nor leaves reference cycles. Where the collector was
    disabled before, it stays so; another thread must not disable it permanently meanwhile, as that would be undone.
    """
    global _waiting_for, _was_enabled
    is_counted = False
    try:  # from the first step on: an interrupt between two of them must not leave the collector off
        with _lock:
            _waiting_for += 1
            is_counted = True
            if _waiting_for == 1:
                _was_enabled = gc.isenabled()
                gc.disable()
        yield
    finally:
        if is_counted:
            with _lock:
                _waiting_for -= 1
                if _waiting_for == 0 and _was_enabled:
                    gc.enable()


def _begin_again() -> None:
    """In a forked child: the threads that wanted a pause are not there, so none would end it."""
    global _lock, _waiting_for
    _lock = threading.Lock()
    if _waiting_for and _was_enabled:
        gc.enable()
    _waiting_for = 0


os.register_at_fork(after_in_child=_begin_again)

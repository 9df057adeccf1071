"""Waiting for threads so that none outlives its call, whatever interrupts the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["join_all"]


def join_all(threads: Iterable[threading.Thread], fail: Callable[[BaseException], None]) -> None:
    """Wait for all threads to end.

    Args:
        threads: started threads.
        fail: called with what interrupts the wait, a KeyboardInterrupt say; must make the threads end soon. The wait
            then goes on: a thread that outlived the call would write into files or tensors of somebody else.
    """
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                fail(error)

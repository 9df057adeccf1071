"""The limits of one execution: return, or raise `CheckpointError`, within a second and 64 MiB.

Memory is limited for real, by RLIMIT_AS: the address space may grow by 64 MiB and no further, so whatever asks for
more gets a `MemoryError`, which is a finding, before a byte of it is used. Peak RSS would see only what is touched, and
only afterwards; tracemalloc sees nothing of what C libraries take. Two things could hide memory from the limit: what
malloc keeps for later use, so it is told to give every larger piece back at once; and a library that turns a failed
allocation into an error of its own, so messages are searched for that.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable
from pathlib import Path

from dcp_nvcomp.errors import CheckpointError

SECONDS = 1.0  # of processor time: another process must not make a finding
MEMORY_NBYTES = 64 << 20

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_REFRESH = 64  # executions between two looks at how much address space is in use


class FindingError(Exception):
    """An execution that did what it must not do."""


class Limits:
    """Runs executions of a target, each under the limits."""

    def __init__(self, refresh: int = _REFRESH) -> None:
        self._refresh = refresh
        self._count = 0
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_AS)
        self._used = 0
        libc = ctypes.CDLL(None)
        # fixed, as glibc would else raise them as it sees large pieces come and go
        assert libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17) and libc.mallopt(_M_TRIM_THRESHOLD, 1 << 17)

    def run(self, target: Callable[[bytes], None], data: bytes) -> None:
        """One execution."""
        if self._count % self._refresh == 0:
            self._used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self._count += 1
        begin = time.process_time()
        resource.setrlimit(resource.RLIMIT_AS, (self._used + MEMORY_NBYTES, self._hard))
        try:
            target(data)
        except CheckpointError as error:
            _check_error(error)
        except MemoryError as error:
            raise FindingError(f"It asks for more than {MEMORY_NBYTES >> 20} MiB.") from error
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (self._soft, self._hard))
        took = time.process_time() - begin
        if took > SECONDS:
            raise FindingError(f"It took {took:.1f} s.")


def _check_error(error: CheckpointError) -> None:
    text = str(error)
    if len(text) > 3000:
        raise FindingError(f"The message has {len(text)} characters.") from error
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or "llocat" in str(seen) or "enough memory" in str(seen):
            raise FindingError("A failed allocation is reported as something else.") from error
        seen = seen.__cause__

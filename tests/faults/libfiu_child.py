"""Runs below fiu-run: saves or loads while libfiu lets system calls fail, and prints what came of each round as JSON.

    fiu-run -x python -m tests.faults.libfiu_child FOLDER ROUNDS ERRNO PROBABILITY [load] POINT...

The failure points are enabled for the time of the save or load only, in this process, by libfiu's own functions.
"""

from __future__ import annotations

import ctypes
import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.states import same, small_state

from .small import Failure, failure_of, load_in_order, save_in_order, what_loads


@contextmanager
def failing(points: Sequence[str], number: int, probability: float) -> Iterator[None]:
    """System calls fail now and then in the block."""
    library = ctypes.CDLL("libfiu.so.0")
    library.fiu_enable_random.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_float]
    library.fiu_disable.argtypes = [ctypes.c_char_p]
    for point in points:
        assert library.fiu_enable_random(point.encode(), 1, number, 0, probability) == 0
    try:
        yield
    finally:
        for point in points:
            library.fiu_disable(point.encode())


def main() -> None:
    """All rounds."""
    folder, rounds, number, probability, *points = sys.argv[1:]
    old, new = small_state(1), small_state(2)
    path, backup = Path(folder) / "c", Path(folder) / "old"
    save_in_order(backup, old)
    loads = points[0] == "load"

    def work() -> None:
        if loads:
            assert same(load_in_order(path, old), old), "a load returned what was never saved"
        else:
            save_in_order(path, new)

    ctypes.CDLL("libfiu.so.0").fiu_set_prng_seed(7)
    for _ in range(int(rounds)):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(backup, path)
        with failing(points[loads:], getattr(errno, number), float(probability)):
            failure = failure_of(work)
        tell(failure, lambda: what_loads(path, old, new))


def tell(failure: Failure | None, found: Callable[[], int | None]) -> None:
    """One line of what came of it."""
    line = {
        "error": failure.kind.__name__ if failure else None,
        "errno": errno.errorcode.get(failure.number or 0) if failure else None,
        "text": failure.text if failure else "",
        "loads": {0: "old", 1: "new"}.get(found()),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

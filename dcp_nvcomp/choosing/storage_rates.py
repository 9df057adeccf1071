"""How fast a storage takes and gives bytes, through the same `Filesystem` that saves and loads use.

Streams are written and ranges read as a save and a load do it: as many at once, as long, and durably. Bytes are random,
so that no storage compresses them. Local files are dropped from the page cache before they are read, where the system
allows it: a restart rarely finds its checkpoint in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.storage.base import Filesystem

_PIECE_NBYTES = 1 << 20  # as an encoded block is handed over
_FIRST_NBYTES = 8 << 20
_MOST_NBYTES = 256 << 20
_LATENCIES = 5


@dataclass(frozen=True)
class StorageRates:
    """What a storage does for one rank.

    Attributes:
        write_rates: bytes a second with so many streams at once: with one, and with as many as a save uses.
        read_rates: bytes a second with so many reads at once: with one, and with as many as a load uses.
        file_seconds: time to make a file of one byte, durably.
        publish_seconds: time to publish a small file, as a commit does.
        file_nbytes: state of so many bytes is worth another stream.
        streams: how many streams a save with one thread uses at most, with two, and so on; empty if threads do not
            matter.
    """

    write_rates: dict[int, float]
    read_rates: dict[int, float]
    file_seconds: float
    publish_seconds: float
    file_nbytes: int
    streams: tuple[int, ...] = ()

    def write_rate(self, state_nbytes: int, *, threads: int | None = None) -> float:
        """Return the rate for a state of this size, which may be too small for all streams."""
        most = max(self.write_rates)
        if threads is not None and self.streams:
            most = min(most, self.streams[min(threads, len(self.streams)) - 1])
        streams = max(1, min(most, state_nbytes // self.file_nbytes))
        return _between(self.write_rates, streams)

    @property
    def read_rate(self) -> float:
        """The rate with as many reads at once as a load uses."""
        return self.read_rates[max(self.read_rates)]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "write_rates": [{"streams": streams, "rate": rate} for streams, rate in self.write_rates.items()],
            "read_rates": [{"streams": streams, "rate": rate} for streams, rate in self.read_rates.items()],
            "file_seconds": self.file_seconds,
            "publish_seconds": self.publish_seconds,
        }


def measure_storage(filesystem: Filesystem, *, threads: int, memory_budget: int, seconds: float) -> StorageRates:
    """Measure a storage. The directory must exist; what is written there is removed again."""
    names: list[str] = []
    with removing(lambda: filesystem.remove(names)):
        streams = tuple(filesystem.output_streams(one, memory_budget) for one in range(1, threads + 1))
        return _measured(filesystem, names, streams, seconds)


@contextlib.contextmanager
def removing(remove: Callable[[], object]) -> Iterator[None]:
    """Remove what was made, also after a failure, which is told and not what removing comes to then."""
    try:
        yield
    except BaseException as error:
        # a storage that does not answer would let us wait once more
        if not isinstance(error, StorageError) or error.errno != errno.ETIMEDOUT:
            with contextlib.suppress(CheckpointError):
                remove()
        raise
    remove()


def _measured(filesystem: Filesystem, names: list[str], by_threads: tuple[int, ...], seconds: float) -> StorageRates:
    file_seconds = _median(lambda: _write_all(filesystem, names, 1, 1))
    publish_seconds = _median(lambda: _publish(filesystem, names))
    first = _rate(lambda: _write_all(filesystem, names, 1, _FIRST_NBYTES), _FIRST_NBYTES, file_seconds)
    wanted = max(_FIRST_NBYTES, min(_MOST_NBYTES, int(first * seconds / 4)))
    writes, reads = dict[int, float](), dict[int, float]()
    for streams in sorted({1, by_threads[-1]}):
        each = max(_PIECE_NBYTES, wanted // streams)
        written: list[str] = []
        writes[streams] = _rate(
            lambda streams=streams, each=each, written=written: written.extend(  # type: ignore[misc]
                _write_all(filesystem, names, streams, each)
            ),
            each * streams,
            file_seconds,
        )
    for parallel in sorted({1, filesystem.parallel_reads}):
        reads[parallel] = _read_rate(filesystem, written, each, parallel, limit_seconds=seconds / 4)
    return StorageRates(writes, reads, file_seconds, publish_seconds, filesystem.file_nbytes_worthwhile, by_threads)


def _median(work: Callable[[], object]) -> float:
    spent = []
    for _ in range(_LATENCIES):
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return sorted(spent)[_LATENCIES // 2]


def _rate(work: Callable[[], object], nbytes: int, fixed_seconds: float) -> float:
    """Return bytes a second, without the time that a file of one byte takes."""
    start = time.perf_counter()
    work()
    spent = time.perf_counter() - start
    return nbytes / max(spent - fixed_seconds, spent / 10)


def _publish(filesystem: Filesystem, names: list[str]) -> None:
    names.append(f"{uuid.uuid4().hex}.metadata")
    filesystem.publish(names[-1], bytes(4096))


def _write_all(filesystem: Filesystem, names: list[str], streams: int, nbytes: int) -> list[str]:
    made = [f"__0_{number}_{uuid.uuid4().hex}.distcp" for number in range(streams)]
    names += made
    if streams == 1:
        _write(filesystem, made[0], nbytes)
        return made
    with ThreadPoolExecutor(streams, "dcp-bench") as pool:
        list(pool.map(lambda name: _write(filesystem, name, nbytes), made))
    return made


def _write(filesystem: Filesystem, name: str, nbytes: int) -> None:
    piece = memoryview(os.urandom(min(nbytes, _PIECE_NBYTES)))
    stream = filesystem.open_output(name)
    try:
        for start in range(0, nbytes, _PIECE_NBYTES):
            stream.write(piece[: nbytes - start])
        stream.close()
    except BaseException:
        stream.abort()
        raise


def _read_rate(filesystem: Filesystem, names: list[str], nbytes: int, parallel: int, *, limit_seconds: float) -> float:
    """Read files, or as much of them as there is time for."""
    forget_cached(filesystem, names)
    step = min(filesystem.read_nbytes, nbytes)
    ranges = [(name, start) for start in range(0, nbytes - step + 1, step) for name in names]
    begin = time.perf_counter()
    until = begin + limit_seconds

    def read(buffer: memoryview, mine: list[tuple[str, int]]) -> int:
        done = 0
        for name, start in mine:
            filesystem.read_into(name, start, buffer)
            done += step
            if time.perf_counter() > until:
                break
        return done

    shares = [ranges[number::parallel] for number in range(min(parallel, len(ranges)))]
    buffers = [memoryview(bytearray(step)) for _ in shares]
    if len(shares) == 1:
        total = read(buffers[0], shares[0])
    else:
        with ThreadPoolExecutor(len(shares), "dcp-bench") as pool:
            total = sum(pool.map(read, buffers, shares))
    filesystem.close()
    return total / (time.perf_counter() - begin)


def forget_cached(filesystem: Filesystem, names: list[str]) -> None:
    """Drop local files from the page cache; other storage has none on this machine."""
    if not hasattr(os, "posix_fadvise"):
        return
    for name in names:
        with contextlib.suppress(OSError):
            descriptor = os.open(filesystem.location(name).removeprefix("file://"), os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _between(rates: dict[int, float], streams: int) -> float:
    """Return the rate with a number of streams: measured, or on the line between the neighbours."""
    low = max(known for known in rates if known <= streams)
    high = min(known for known in rates if known >= streams)
    if low == high:
        return rates[low]
    return rates[low] + (rates[high] - rates[low]) * (streams - low) / (high - low)

"""A model of how a state is staged from a GPU and loaded back: what each stage takes, and what waits for what.

    python -m benchmarks.gpu_model

The kernels' and the bus's rates are those of the profile in results/gpu-timeline.json, and Python's share is what
benchmarks.gpu_host has measured on another machine, with 4 us for each kernel and copy of the profile. Threads,
engines, the interpreter's lock, the multiprocessors and each direction of the bus are queues, first come, first served.
A model, not a measurement of a GPU.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

__all__ = ["Rates", "gpu_model", "main", "modelled"]

RESULTS = Path(__file__).parent / "results"

_STATE_NBYTES: Final = 16 << 30
_BATCH_NBYTES: Final = 256 << 20
_RATIO: Final = 1.259  # of the state of the profile
_ENGINES: Final = 2
_THREADS: Final = {"encode": (1, 2, 3), "decode": (1, 2, 4)}  # a save has three for two engines
_UNTIL_SIZES: Final = ("inspect_blocks", "split_blocks", "measure_slices")
_GATHER: Final = ("copy_pieces", "write_slices")
_CRC_RATE: Final = 9e9  # bytes a second of one core of that machine
_CRC_THREADS: Final = 4
_START_SECONDS: Final = 4e-6  # what the driver takes to launch a kernel or to start a copy; assumed
_TERMS: Final = {
    "nothing: as it is": (),
    "Python": ("host",),
    "kernels but those that decode": ("until_sizes", "gather"),
    "kernels that decode, also to check": ("rest",),
    "CRCs on the host": ("crc",),
    "all but the bus": ("host", "until_sizes", "gather", "rest", "crc"),
}

# What a worker does next: the places that it needs at the same time, and for how many seconds each.
Step = dict[str, float]


@dataclass(frozen=True)
class Rates:
    """Seconds that a batch takes in each place."""

    host: float  # Python, which has one lock
    until_sizes: float  # kernels before the sizes of what is encoded are known
    gather: float  # kernels that bring it into one run
    rest: float  # kernels of the check, or of decoding
    bus: float  # the copy of what is encoded
    crc: float  # comparing what arrived on the host with its CRCs, by four threads

    @property
    def plain(self) -> float:
        """The copy of what is not encoded."""
        return self.bus * _RATIO

    @staticmethod
    def of(results: Path, action: str) -> Rates:
        """Read what was measured of an action, `encode` or `decode`, from the folder of the results."""
        profile = json.loads((results / "gpu-timeline.json").read_text())
        kernels = profile["rows"][f"{action}, 1 engine"]["kernels"]
        share = _BATCH_NBYTES / profile["nbytes"] / 1e3
        seconds = {name: kernel["milliseconds"] * share for name, kernel in kernels.items()}
        bus = sum(seconds.pop(name) for name in list(seconds) if "Pinned" in name)
        until_sizes, gather = (sum(seconds.pop(name, 0.0) for name in names) for names in (_UNTIL_SIZES, _GATHER))
        host = json.loads((results / "gpu-host.json").read_text())["milliseconds"][action] / 1e3
        started = sum(kernel["count"] for kernel in kernels.values())
        host += started / kernels["decode_slices"]["count"] * _START_SECONDS
        if action == "decode":
            # since that profile the GPU compares the CRCs of what is stored too, with the kernel of the other ones
            return Rates(host, until_sizes * (1 + 1 / _RATIO), gather, sum(seconds.values()), bus, 0)
        crc = _BATCH_NBYTES / _RATIO / _CRC_RATE / _CRC_THREADS
        return Rates(host, until_sizes, gather, sum(seconds.values()), bus, crc)


class _Queues:
    """Places that are used one after the other, and those who use them."""

    def __init__(self) -> None:
        self.busy: dict[str, float] = {}
        self._free_at: dict[str, float] = {}
        self._engines = _ENGINES
        self._waiting: deque[tuple[int, Iterator[Step]]] = deque()

    def run(self, workers: list[Iterator[Step]]) -> float:
        """Let the workers go on until all have ended; return when that is."""
        numbers = count()
        coming = [(0.0, next(numbers), worker) for worker in workers]
        now = 0.0
        while coming:
            now, _, worker = heapq.heappop(coming)
            step = next(worker, None)
            if step is None:
                continue
            if "take" in step and not self._engines:
                self._waiting.append((next(numbers), worker))
                continue
            self._engines -= "take" in step
            if "give back" in step:
                if self._waiting:
                    heapq.heappush(coming, (now, *self._waiting.popleft()))
                else:
                    self._engines += 1
            ends = [self._use(place, now, seconds) for place, seconds in step.items()]
            heapq.heappush(coming, (max(ends), next(numbers), worker))
        return now

    def _use(self, place: str, now: float, seconds: float) -> float:
        begin = now if place == "cores" else max(now, self._free_at.get(place, 0.0))  # of cores there are enough
        self._free_at[place] = begin + seconds
        self.busy[place] = self.busy.get(place, 0.0) + seconds
        return begin + seconds


def _encodes(rates: Rates, batches: Iterator[int]) -> Iterator[Step]:
    for _ in batches:
        yield {"take": 0.0}
        yield {"interpreter": rates.host / 2}
        yield {"multiprocessors": rates.until_sizes}
        yield {"interpreter": rates.host / 2}
        yield {"multiprocessors": rates.gather}
        yield {"multiprocessors": rates.rest, "bus": rates.bus}
        yield {"give back": 0.0}
        yield {"cores": rates.crc}


def _decodes(rates: Rates, batches: Iterator[int]) -> Iterator[Step]:
    for _ in batches:
        yield {"take": 0.0}
        yield {"interpreter": rates.host}
        yield {"bus": rates.bus}
        yield {"multiprocessors": rates.until_sizes + rates.gather + rates.rest}
        yield {"give back": 0.0}


def modelled(
    results: Path, action: str, *, threads: int, without: Sequence[str] = ()
) -> tuple[float, dict[str, float]]:
    """Return how long it takes, as a multiple of a plain copy, and for what share of that each place is busy.

    Args:
        results: the folder of the results.
        action: `encode`, to page-locked memory, or `decode`, from there.
        threads: how many encode or decode.
        without: the terms that take no time, fields of `Rates`.
    """
    rates, left = Rates.of(results, action), iter(range(_STATE_NBYTES // _BATCH_NBYTES))
    rates = replace(rates, **dict.fromkeys(without, 0.0))
    work = _encodes if action == "encode" else _decodes
    queues = _Queues()
    seconds = queues.run([work(rates, left) for _ in range(threads)])
    busy = {place: taken / seconds for place, taken in queues.busy.items() if taken}
    return seconds / (rates.plain * (_STATE_NBYTES // _BATCH_NBYTES)), busy


def gpu_model(results: Path) -> str:
    """Return the table, for the documents.

    Args:
        results: the folder of the results.
    """
    lines = [
        "| 16 GiB of bfloat16 weights | x a plain pinned copy | busy: bus | multiprocessors | Python | CRCs, cores |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for action, what in (("encode", "to page-locked memory"), ("decode", "from there")):
        for threads in _THREADS[action]:
            times, busy = modelled(results, action, threads=threads)
            shares = [f"{busy[place]:.0%}" for place in ("bus", "multiprocessors", "interpreter")]
            cores = f"{busy['cores'] * _CRC_THREADS:.1f}" if "cores" in busy else "none"
            lines.append(f"| {what}, {_of_threads(threads)} | {times:.2f} | {' | '.join(shares)} | {cores} |")
    lines += ["", "The same, in multiples of a plain pinned copy, if one of the terms took no time:", ""]
    columns = [("encode", 2), ("encode", 3), ("decode", 1), ("decode", 2)]
    names = [
        f"{'to' if action == 'encode' else 'from'} the host, {_of_threads(threads)}" for action, threads in columns
    ]
    lines += [f"| without | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for what, without in _TERMS.items():
        found = [modelled(results, action, threads=threads, without=without)[0] for action, threads in columns]
        lines.append(f"| {what} | {' | '.join(f'{times:.2f}' for times in found)} |")
    return "\n".join(lines)


def _of_threads(count: int) -> str:
    return f"{count} thread{'s'[: count > 1]}"


def main() -> None:
    """Print the table."""
    print(gpu_model(RESULTS))


if __name__ == "__main__":
    main()

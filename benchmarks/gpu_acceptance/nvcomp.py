"""Step: what the engine relies on and nvCOMP's documentation leaves open.

Sizes: what `buffer_sizes` holds, and if asking waits. Synchrony: if a call returns while the stream is still busy with
what was there before. The GIL: how much of the time another Python thread gets meanwhile. Scratch memory: what a call
takes through the allocator, beside what the engine reckons with.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.made import exponents
from benchmarks.gpu_acceptance.results import Probe
from dcp_nvcomp.codecs.base import padded
from dcp_nvcomp.codecs.coders import Ans, Deflate
from dcp_nvcomp.engines.cuda.coders import NvcompCoders
from dcp_nvcomp.engines.cuda.device import Device

_SLICE_NBYTES = 64 << 10
_SCRATCH_PER_BYTE = 12
_SLEEP_CYCLES = 400_000_000  # some tenths of a second

_ALGORITHMS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "Deflate 0": ({"algorithm": "Deflate", "algorithm_type": 0}, Deflate(_SLICE_NBYTES, literals_only=True)),
    "Deflate 1": ({"algorithm": "Deflate", "algorithm_type": 1}, Deflate(_SLICE_NBYTES)),
    "ANS": ({"algorithm": "ANS", "data_type": "|u1"}, Ans(_SLICE_NBYTES, "|u1")),
}


@dataclass
class _Call:
    """Slices and frames of one batch, and the codec for them."""

    host: Host
    device: Device
    name: str
    count: int

    def __post_init__(self) -> None:
        options, self.coder = _ALGORITHMS[self.name]
        # nvCOMP's scratch memory comes from there
        self.device.arena.set_limit(_SCRATCH_PER_BYTE * self.count * _SLICE_NBYTES + (64 << 20))
        with self.device.current():
            self.codec = self.device.nvcomp.Codec(
                bitstream_kind=self.device.nvcomp.BitstreamKind.RAW,
                uncomp_chunk_size=_SLICE_NBYTES,
                device_id=self.device.torch_device.index or 0,
                cuda_stream=self.device.stream_handle,
                **options,
            )
        self.lengths = [_SLICE_NBYTES] * self.count
        self.starts = [number * _SLICE_NBYTES for number in range(self.count)]
        self.data = exponents(self.count * _SLICE_NBYTES, self.device.torch_device)
        sample = self.device.nvcomp.as_array(self.data[:_SLICE_NBYTES], cuda_stream=self.device.stream_handle)
        self.room = padded(int(self.codec.get_max_comp_buffer_size(sample)))
        self.slots = self.empty(self.room * self.count)
        self.out = self.empty(self.count * _SLICE_NBYTES)
        self.places = [number * self.room for number in range(self.count)]
        self.config = self.codec.decompression_config(self.codec.compression_config(self.lengths))

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)

    def batch(self, memory: torch.Tensor, at: list[int], nbytes: list[int]) -> Any:
        return self.device.nvcomp.as_arrays(memory, at, nbytes, cuda_stream=self.device.stream_handle)

    def slices(self, memory: torch.Tensor) -> Any:
        return self.batch(memory, self.starts, self.lengths)

    def encode(self) -> tuple[Any, Any]:
        """Start to encode; returns nvCOMP's batch of frames, and its batch of slices, which must live as long."""
        source = self.slices(self.data)
        return self.codec.encode(source, out=self.batch(self.slots, self.places, [self.room] * self.count)), source

    def frames(self, nbytes: list[int]) -> Any:
        return self.batch(self.slots, self.places, nbytes)

    def decode(self, frames: Any, config: Any) -> Any:
        return self.codec.decode(frames, out=self.slices(self.out), decompression_config=config)


def probes(host: Host) -> Iterator[Probe]:
    device = cache(host.device)
    yield "module", lambda: {"public": [name for name in dir(device().nvcomp) if not name.startswith("_")]}
    for name in _ALGORITHMS:
        call = cache(partial(lambda name: _Call(host, device(), name, host.pick(2048, 8)), name))
        yield f"{name}: sizes", partial(_sizes, call)
        yield f"{name}: alignment", partial(_alignment, call)
        yield f"{name}: synchrony", partial(_synchrony, host, call)
        yield f"{name}: scratch memory", partial(_workspaces, host, device, name)


def _sizes(call: Callable[[], _Call]) -> Mapping[str, Any]:
    """Describe `buffer_sizes`, and find out if a configuration serves another batch of the same shape."""
    made = call()
    with made.device.session([made.data]):
        frames, _source = made.encode()
        sizes = frames.buffer_sizes
        nbytes = np.asarray(sizes, np.int64)
        given = made.frames(nbytes.tolist())
        decoded = made.decode(given, made.config)
        found = np.asarray(decoded.buffer_sizes, np.int64)
    again = torch.equal(made.out, made.data)
    with made.device.session([made.data]):  # the configuration a second time, on frames of other slices
        made.data.bitwise_xor_(1)
        frames, _source = made.encode()
        given = made.frames([int(size) for size in frames.buffer_sizes])
        second = made.decode(given, made.config)
        right = [int(size) for size in second.buffer_sizes] == made.lengths
    return {
        "type": type(sizes).__name__,
        "item_type": type(sizes[0]).__name__,
        "frames_fit": bool((nbytes > 0).all() and (nbytes <= made.room).all()),
        "mean_frame_nbytes": float(nbytes.mean()),
        "room_nbytes": made.room,
        "decoded_sizes_are_the_slices": found.tolist() == made.lengths,
        "decoded_right": again,
        "configuration_serves_again": right and torch.equal(made.out, made.data),
    }


def _alignment(call: Callable[[], _Call]) -> Mapping[str, Any]:
    """Return the alignments that nvCOMP asks for; the engine's slices and frames are at multiples of 16."""
    codec, found = call().codec, {}
    for name in ("get_required_compression_alignment", "get_required_decompression_alignment"):
        if hasattr(codec, name):
            found[name] = str(getattr(codec, name)())
    return found


class _Counter:
    """Counts on a thread of its own, as fast as it may: a context manager."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.count += 1

    def __enter__(self) -> _Counter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


class _Watch:
    """Makes calls while the stream sleeps.

    Attributes:
        found: of each call how long it took (as long as the sleep if it waits, next to nothing if not), and at what
            share of its usual speed a Python thread ran meanwhile (near 0 if the call keeps the GIL).
    """

    def __init__(self, host: Host, counter: _Counter) -> None:
        self._host = host
        self._counter = counter
        self._usual = 0.0
        self.found: dict[str, Any] = {}

    def call(self, what: str, work: Callable[[], Any]) -> Any:
        if not self._host.stand_in:
            torch.cuda._sleep(_SLEEP_CYCLES)
        count, start = self._counter.count, time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        counted = self._counter.count - count
        self._host.synchronize()
        if not self._usual:  # the first call is a plain sleep, which leaves the thread alone
            self._usual = counted / seconds
        self.found[what] = {"call_seconds": seconds, "thread_share": counted / seconds / self._usual}
        return result


def _synchrony(host: Host, call: Callable[[], _Call]) -> Mapping[str, Any]:
    made, usual_interval = call(), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # else the main thread waits 5 ms each time that it wants the GIL back
    try:
        with made.device.session([made.data]), _Counter() as counter:
            return {"calls": _calls(host, made, _Watch(host, counter))}
    finally:
        sys.setswitchinterval(usual_interval)


def _calls(host: Host, made: _Call, watch: _Watch) -> Mapping[str, Any]:
    codec, lengths = made.codec, made.lengths
    watch.call("Python's sleep", lambda: time.sleep(0.1))
    watch.call("torch's synchronize", host.synchronize)
    watch.call("as_arrays", lambda: made.slices(made.data))
    sample = made.device.nvcomp.as_array(made.data[:_SLICE_NBYTES], cuda_stream=made.device.stream_handle)
    watch.call("get_max_comp_buffer_size", lambda: codec.get_max_comp_buffer_size(sample))
    _frames, _source = watch.call("encode", made.encode)
    watch.call("encode and buffer_sizes", lambda: _encoded_sizes(made))
    frames, _source = made.encode()
    given = made.frames([int(size) for size in watch.call("buffer_sizes of frames", lambda: frames.buffer_sizes)])
    from_lengths = watch.call(
        "decompression_config from lengths", lambda: codec.decompression_config(codec.compression_config(lengths))
    )
    slices = watch.call("decode with it", lambda: made.decode(given, from_lengths))
    watch.call("buffer_sizes of slices", lambda: slices.buffer_sizes)
    if not host.stand_in:  # whose engine never asks for these
        from_frames = watch.call("decompression_config from frames", lambda: codec.decompression_config(given))
        watch.call("decode with that", lambda: made.decode(given, from_frames))
        watch.call("decode without a configuration", lambda: codec.decode(given, out=made.slices(made.out)))
    return watch.found


def _encoded_sizes(made: _Call) -> Any:
    frames, source = made.encode()
    return frames.buffer_sizes, source


def _workspaces(host: Host, device: Callable[[], Device], name: str) -> Mapping[str, Any]:
    """Return the scratch memory that nvCOMP takes, by count of slices, and what the engine reckons with."""
    target = device()
    memory, stream = target.nvcomp_memory, target.stream_handle
    coders = NvcompCoders(target)
    found: dict[str, Any] = {}
    for count in host.pick((1, 32, 512, 4096), (1, 8)):
        made = _Call(host, target, name, count)
        lengths = np.full(count, _SLICE_NBYTES, np.int64)
        row = {}
        with target.session([made.data]):
            before = memory.reset_peak(stream)
            frames, _source = made.encode()
            row["encode_nbytes"] = memory.peak_nbytes(stream) - before
            given = made.frames([int(size) for size in frames.buffer_sizes])
            del frames
            before = memory.reset_peak(stream)
            made.decode(given, made.config)
            row["decode_nbytes"] = memory.peak_nbytes(stream) - before
        room = made.room * count
        row["encode_reckoned_nbytes"] = coders.encode_nbytes(made.coder, lengths) - room
        row["decode_reckoned_nbytes"] = coders.decode_nbytes(made.coder, lengths)
        row["sliced_nbytes"] = int(lengths.sum())
        found[f"{count} slices"] = row
    return found

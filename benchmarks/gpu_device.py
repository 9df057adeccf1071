"""Helpers of the GPU measurements: time on the device, engines without transfers, coders alone.

All of it goes through `dcp_nvcomp.engines.cuda.device.Device`, so that tests run it without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from dcp_nvcomp.codecs.base import padded
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device

__all__ = ["DeviceClock", "Meter", "RawCoder", "address_of", "host_memory", "synchronize", "with_siblings"]


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that the device copies to at full speed, every page of it touched."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(0)


def with_siblings(device: Device, count: int) -> list[Device]:
    """The same GPU so many times, with streams of their own; a stand-in, which has none, is alone."""
    if not isinstance(device, CudaDevice):
        return [device]
    return [device, *(CudaDevice(device.torch_device) for _ in range(count - 1))]


def address_of(memory: memoryview) -> int:
    """Kinds of host memory."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class DeviceClock:
    """Time on a device's current stream, by its own events; on a CPU by the clock on the wall.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of what is begun inside."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._pairs.append((begin, end))

    def take(self) -> float:
        """Seconds since the last call."""
        synchronize(self._device)
        seconds = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._pairs) / 1e3
        self._pairs, self._seconds = [], 0.0
        return seconds


class Meter:
    """A device whose sessions are timed and that moves nothing between host and device: what is left is its own work.

    What is to be decoded must be on the device already.

    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        self._inner = device
        self._clock = DeviceClock(device.torch_device)
        self._image = torch.empty(0, dtype=torch.uint8)
        self._address = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def seconds(self) -> float:
        """Time in sessions since the last call."""
        return self._clock.take()

    def show(self, host: torch.Tensor) -> None:
        """Keep a copy of host memory, from which `copy_in` takes what it is asked for."""
        self._image = host.to(self._inner.torch_device)
        self._address = host.data_ptr()

    def session(
        self, tensors: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event] = ()
    ) -> AbstractContextManager[None]:
        return self._timed_session(tensors, after)

    @contextmanager
    def _timed_session(self, tensors: Sequence[torch.Tensor], after: Sequence[torch.cuda.Event]) -> Iterator[None]:
        with self._inner.session(tensors, after), self._clock.running():
            yield

    def copy_in(self, host: memoryview, target: torch.Tensor) -> None:
        start = address_of(host) - self._address
        assert 0 <= start <= self._image.numel() - host.nbytes
        target.copy_(self._image[start : start + host.nbytes], non_blocking=True)

    def copy_out(self, source: torch.Tensor, host: memoryview) -> None:
        pass


class RawCoder:
    """One of nvCOMP's coders on slices of device memory, with nothing around it.

    Args:
        device: where it runs.
        slice_nbytes: how the memory is cut.
        **options: of `nvcomp.Codec`.
    """

    def __init__(self, device: Device, slice_nbytes: int, **options: Any) -> None:
        self._device = device
        self._slice_nbytes = slice_nbytes
        with device.current():
            self._codec = device.nvcomp.Codec(
                bitstream_kind=device.nvcomp.BitstreamKind.RAW,
                uncomp_chunk_size=slice_nbytes,
                device_id=device.torch_device.index or 0,
                cuda_stream=device.stream_handle,
                **options,
            )

    def measure(self, data: torch.Tensor, repeats: int) -> tuple[int, list[float], list[float]]:
        """Encode and decode all of `data`.

        Args:
            data: device memory.
            repeats: how often; once more before, unmeasured.

        Returns:
            The size of the frames with their padding, and seconds to encode and to decode them.
        """
        device, step = self._device, self._slice_nbytes
        clock = DeviceClock(device.torch_device)
        starts = list(range(0, data.numel(), step))
        lengths = [min(step, data.numel() - start) for start in starts]
        whole_slice = torch.empty(step, dtype=torch.uint8, device=device.torch_device)
        sample = device.nvcomp.as_array(whole_slice, cuda_stream=device.stream_handle)
        room = padded(int(self._codec.get_max_comp_buffer_size(sample)))
        # slots, what is decoded, and nvCOMP's workspace: Deflate's is 9.5 n at most
        workspace_nbytes = 10 * data.numel() + (1 << 20)
        device.arena.set_limit(room * len(starts) + data.numel() + workspace_nbytes)
        slots = device.arena.empty(room * len(starts))
        at = [room * index for index in range(len(starts))]
        out = device.arena.empty(data.numel())
        # as the engine does: without it nvCOMP reads the frames' headers, and waits, before it begins
        config = self._codec.decompression_config(self._codec.compression_config(lengths))
        encode_seconds, decode_seconds = [], []
        for repeat in range(-1, repeats):
            with device.session([data]):
                source, target = self._batch(data, starts, lengths), self._batch(slots, at, [room] * len(at))
                with clock.running():
                    frames = self._codec.encode(source, out=target)
                nbytes = [int(size) for size in frames.buffer_sizes]  # waits
            spent_encoding = clock.take()
            with device.session([data]):
                source, target = self._batch(slots, at, nbytes), self._batch(out, starts, lengths)
                with clock.running():
                    slices = self._codec.decode(source, out=target, decompression_config=config)
                assert [int(size) for size in slices.buffer_sizes] == lengths
            spent_decoding = clock.take()
            if repeat >= 0:
                encode_seconds.append(spent_encoding)
                decode_seconds.append(spent_decoding)
        assert torch.equal(out, data), "nvCOMP did not decode what it encoded"
        stored = sum(padded(min(size, length)) for size, length in zip(nbytes, lengths, strict=True))
        return stored, encode_seconds, decode_seconds

    def _batch(self, memory: torch.Tensor, at: list[int], nbytes: list[int]) -> Any:
        return self._device.nvcomp.as_arrays(memory, at, nbytes, cuda_stream=self._device.stream_handle)

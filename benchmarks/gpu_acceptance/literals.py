"""Our own coder of literals-only zstd frames: right against libzstd and the CPU encoder, and how fast it is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import exponents
from benchmarks.gpu_acceptance.results import Probe, Skipped
from benchmarks.gpu_device import DeviceClock
from dcp_nvcomp.codecs import Zstd
from dcp_nvcomp.engines.cuda.batches import padded_nbytes, starts_of
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.literals import LiteralCoders, LiteralFrames
from tests.engines.literal_slices import deep, log_uniform, misplaced, skewed

__all__ = ["literal_probes", "rates"]

_CODER = Zstd(literals_only=True)


class Coded:
    """Slices in device memory, each at a multiple of 16, and what the coder makes of them.

    Args:
        device: the device.
        coders: the coder on it.
    """

    def __init__(self, device: Device, coders: LiteralCoders) -> None:
        self._device = device
        self._coders = coders

    def _memory(self, parts: Sequence[bytes], starts: np.ndarray) -> Tensor:
        host = np.zeros(int(starts[-1]), np.uint8)
        for part, start in zip(parts, starts.tolist(), strict=False):
            host[start : start + len(part)] = np.frombuffer(part, np.uint8)
        return torch.from_numpy(host).to(self._device.torch_device)

    def encode(self, slices: Sequence[bytes]) -> list[bytes]:
        """Return the frame of each slice; empty if the slice is to be stored."""
        lengths = np.array([len(data) for data in slices], np.int64)
        starts = starts_of(padded_nbytes(lengths))
        scratch = self._memory(slices, starts)
        with self._device.session([scratch]):
            frames = self._coders.encode(_CODER, scratch, starts[:-1], lengths)
            nbytes = frames.nbytes()
            places, memory = _written(self._device, frames, nbytes)
        host = memory.cpu().numpy()
        return [
            host[at : at + size].tobytes() if size < length else b""
            for at, size, length in zip(places.tolist(), nbytes.tolist(), lengths.tolist(), strict=True)
        ]

    def decode(self, frames: Sequence[bytes], lengths: Sequence[int]) -> list[bytes | None]:
        """Return what each frame decodes to; None for a frame that the kernel reports."""
        nbytes, sizes = np.array([len(frame) for frame in frames], np.int64), np.array(lengths, np.int64)
        at, places = starts_of(padded_nbytes(nbytes)), starts_of(padded_nbytes(sizes))
        encoded = self._memory(frames, at)
        scratch = torch.full((int(places[-1]),), 0xA5, dtype=torch.uint8, device=self._device.torch_device)
        with self._device.session([encoded, scratch]):
            good = self._coders.decode(_CODER, encoded, at[:-1], nbytes, scratch, places[:-1], sizes).good()
        host = scratch.cpu().numpy()
        return [
            host[place : place + size].tobytes() if is_good else None
            for is_good, place, size in zip(good.tolist(), places.tolist(), lengths, strict=False)
        ]


def _written(device: Device, frames: LiteralFrames, nbytes: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Write frames one after the other; returns where they begin, and the memory."""
    places = starts_of(padded_nbytes(nbytes))
    memory = device.arena.empty(int(places[-1]))
    frames.write(places[:-1] + memory.data_ptr())
    return places[:-1], memory


def literal_probes(host: Host, *, count: int, seeds: int = 1) -> Iterator[Probe]:
    """Yield the probes of correctness.

    Args:
        host: where.
        count: how many slices each has.
        seeds: how often slices are made.
    """
    coded = cache(lambda: _coded(host))
    slices = partial(_slices, host, count)
    for seed in range(seeds):
        yield f"literals: made slices, seed {seed}", partial(_made_slices, coded, partial(slices, seed))
    yield "literals: frames of the CPU encoder", partial(_cpu_frames, coded, partial(slices, 100))
    yield "literals: frames that are cut or have a flipped bit", partial(_corrupt_frames, coded, partial(slices, 200))


def _coded(host: Host) -> Coded:
    device = host.device(compiled=True)
    device.arena.set_limit(host.pick(1024, 16) * MIB)
    return Coded(device, LiteralCoders(device))


def _slices(host: Host, count: int, seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        nbytes = log_uniform(random) if not host.stand_in else int(random.integers(1, 3000))
        if number % 10 == 0:
            made.append(np.full(nbytes, random.integers(256), np.uint8))
        elif number % 10 == 1:
            made.append(random.integers(0, 256, nbytes, np.uint8))
        elif number % 10 == 2:
            made.append(deep(random, int(random.integers(2, host.pick(26, 16))), int(random.integers(256))))
        elif number % 10 == 3:
            made.append(misplaced(random, nbytes))
        else:
            symbols = int(random.choice([2, 3, 16, 40, 128, 129, 200, 256]))
            made.append(
                skewed(random, nbytes, symbols, int(random.integers(256)), float(random.choice([1.01, 1.3, 2])))
            )
    return [data.tobytes() for data in made]


def _libzstd(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def _made_slices(coded: Callable[[], Coded], make: Callable[[], list[bytes]]) -> Mapping[str, Any]:
    """Encode slices, and decode their frames with libzstd and with the kernel."""
    slices = make()
    frames = coded().encode(slices)
    kept = [(data, frame) for data, frame in zip(slices, frames, strict=True) if frame]
    wrong = sum(_libzstd(frame) != data for data, frame in kept)
    back = coded().decode([frame for _, frame in kept], [len(data) for data, _ in kept])
    wrong_here = sum(found != data for found, (data, _) in zip(back, kept, strict=True))
    if wrong or wrong_here or not kept:
        raise AssertionError(f"{wrong} of {len(kept)} frames wrong for libzstd, {wrong_here} for the kernel")
    size = sum(len(frame) or len(data) for data, frame in zip(slices, frames, strict=True))
    return {"slices": len(slices), "frames": len(kept), "size": size / sum(map(len, slices))}


def _cpu_frames(coded: Callable[[], Coded], make: Callable[[], list[bytes]]) -> Mapping[str, Any]:
    try:
        from dcp_nvcomp.codecs.coders._literals import encode_literals
    except ImportError:
        raise Skipped("the CPU encoder is not compiled here") from None
    slices, frames = [], []
    for data in make():
        out = bytearray(2 * len(data) + 4096)
        nbytes = encode_literals(data, out)
        if 0 < nbytes < len(data):
            slices.append(data)
            frames.append(bytes(out[:nbytes]))
    found = coded().decode(frames, [len(data) for data in slices])
    wrong = sum(one != data for one, data in zip(found, slices, strict=True))
    if wrong or not frames:
        raise AssertionError(f"{wrong} of {len(frames)} frames wrong")
    return {"frames": len(frames)}


def _corrupt_frames(coded: Callable[[], Coded], make: Callable[[], list[bytes]]) -> Mapping[str, Any]:
    """Decode corrupt frames among good ones: the kernel must return, and the good frames must come out right."""
    random = np.random.default_rng(7)
    slices = [data for data in make() if len(data) > 100]
    framed = [(data, frame) for data, frame in zip(slices, coded().encode(slices), strict=True) if frame]
    frames, lengths = [], []
    for number, (data, frame) in enumerate(framed):
        bad = bytearray(frame)
        bad[int(random.integers(len(bad)))] ^= 1 << int(random.integers(8))
        frames += [frame, bytes(bad) if number % 2 else frame[: len(frame) // 2]]
        lengths += [len(data)] * 2
    found = coded().decode(frames, lengths)
    assert all(one == data for one, (data, _) in zip(found[::2], framed, strict=True)), "a right frame came out wrong"
    reported = sum(one is None for one in found[1::2])
    same = sum(one == data for one, (data, _) in zip(found[1::2], framed, strict=True))
    return {"corrupt": len(framed), "reported": reported, "decoded_to_the_same": same}


def rates(
    host: Host, device: Device, coders: LiteralCoders, slice_nbytes: int, count: int, repeats: int
) -> tuple[int, list[float], list[float]]:
    """Return the size of the frames, and seconds to encode and to decode so many slices of exponents."""
    data = exponents(count * slice_nbytes, host.torch_device)
    lengths = np.full(count, slice_nbytes, np.int64)
    starts = starts_of(lengths)[:-1]
    out = torch.zeros_like(data)
    device.arena.set_limit(3 * data.numel() + host.pick(64, 1) * MIB)
    clock = DeviceClock(device.torch_device)
    encode_seconds, decode_seconds, stored = [], [], 0
    for repeat in range(-1, repeats):
        # with the wait for the lengths, which the engine has too
        with device.session([data]), clock.running():
            frames = coders.encode(_CODER, data, starts, lengths)
            nbytes = frames.nbytes()
            places, memory = _written(device, frames, nbytes)
        spent_encoding = clock.take()
        framed = nbytes < lengths
        at = places[framed]
        with device.session([memory]):
            with clock.running():
                decoding = coders.decode(_CODER, memory, at, nbytes[framed], out, starts[framed], lengths[framed])
            assert decoding.good().all()
        spent_decoding = clock.take()
        stored = int(padded_nbytes(np.minimum(nbytes, lengths)).sum())
        if repeat >= 0:
            encode_seconds.append(spent_encoding)
            decode_seconds.append(spent_decoding)
    pieces = np.flatnonzero(framed).tolist()
    assert all(
        torch.equal(out[at * slice_nbytes :][:slice_nbytes], data[at * slice_nbytes :][:slice_nbytes]) for at in pieces
    )
    return stored, encode_seconds, decode_seconds

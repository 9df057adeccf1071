"""decode_slices of literals*.cu, run thread by thread on a CPU, on frames of other encoders and on corrupt ones."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.engines.cuda.literals import PLAN_NBYTES, LiteralCoders, LiteralKernels
from tests.codecs.literal_slices import damaged
from tests.effort import THOROUGH, examples

from .kernels_on_cpu import emulated_launch
from .literal_coding import GuardedDevice, GuardPages, cpu_frame, decode, encode, libzstd
from .literal_slices import KIB, made_slice, skewed

# compiled where there is a C compiler
pytest.importorskip("dcp_nvcomp.codecs.coders._literals")

U8 = np.ndarray


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(1024, 6000) | st.integers(128 * KIB - 5, 128 * KIB) | st.integers(129 * KIB, 400 * KIB),
    symbols=st.integers(2, 256),
    first=st.integers(0, 255),
    skew=st.sampled_from([1.02, 1.1, 1.3, 1.618, 2.0, 4.0]),
    seed=st.integers(0, 1 << 30),
)
def test_frames_of_the_cpu_encoder(
    device: GuardedDevice, coders: LiteralCoders, count: int, symbols: int, first: int, skew: float, seed: int
) -> None:
    """Of several blocks too."""
    data = skewed(np.random.default_rng(seed), count, symbols, first, skew).tobytes()
    frame = cpu_frame(data)
    if frame:
        assert decode(device, coders, [frame], [count]) == [data]


def test_real_frames_of_the_cpu_encoder(device: GuardedDevice, coders: LiteralCoders, planes: list[U8]) -> None:
    slices = [plane[: 128 * KIB].tobytes() for plane in planes]
    framed = [(data, frame) for data in slices if (frame := cpu_frame(data))]
    assert len(framed) > 20
    decoded = decode(device, coders, [frame for _, frame in framed], [len(data) for data, _ in framed])
    assert decoded == [data for data, _ in framed]


def block(kind: int, size: int, content: bytes, *, last: bool) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + content


def frame_of(nbytes: int, *blocks: bytes) -> bytes:
    return b"\x28\xb5\x2f\xfd\xa0" + nbytes.to_bytes(4, "little") + b"".join(blocks)


def test_raw_and_repeated_blocks(device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator) -> None:
    full, rest = 128 * KIB, random.bytes(777)
    compressed = encode(device, coders, [skewed(random, full, 30, 90, 1.3)])
    content = compressed.frames[0][12:]
    frame = frame_of(
        4 * full + 777,
        block(0, full, random.bytes(full), last=False),
        block(2, len(content), content, last=False),
        block(1, full, b"\x07", last=False),
        block(2, len(content), content, last=False),
        block(0, 777, rest, last=True),
    )
    data = libzstd(frame)
    assert data[-777:] == rest and data[full : 2 * full] == compressed.slices[0]
    assert decode(device, coders, [frame, frame], [len(data)] * 2) == [data, data]


def test_what_is_none_of_ours_is_reported(
    device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator, planes: list[U8]
) -> None:
    data = planes[0][:50_000].tobytes()
    short = block(1, 1000, b"a", last=False)
    frames = [
        zstandard.ZstdCompressor(level=3).compress(data),
        zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data),
        zstandard.ZstdCompressor(level=3, write_content_size=False).compress(data),
        zstandard.ZstdCompressor(level=1).compress(random.bytes(50_000)),
        frame_of(50_000, *[short] * 49, block(1, 1000, b"a", last=True)),  # libzstd takes it; none writes it
        b"\x28",
        b"\x28\xb5\x2f\xfd\xa0\x01",
        frame_of(50_000),
        frame_of(50_000, block(3, 5, b"abcde", last=True)),
        frame_of(50_000, block(2, 5, bytes([2 | 3 << 2, 0, 0, 0, 0]), last=True)),
        frame_of(50_000, block(2, 4, bytes([2 | 1 << 2, 0, 0, 0]), last=True)),
    ]
    assert decode(device, coders, frames, [50_000] * len(frames)) == [None] * len(frames)


# ---- corrupt frames --------------------------------------------------------------------------------------------------


def test_corrupt_frames(device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator) -> None:
    """Reported, or decoded as libzstd does it: a CRC finds those. `decode` checks that nothing else is touched."""
    counts = [(n, s) for n in (60, 500, 3001, 9000) for s in (2, 12, 40, 140, 256)]
    framed = encode(device, coders, [skewed(random, n, s, 100, 1.2) for n, s in counts]).framed()
    long = skewed(random, 300 * KIB, 20, 90, 1.4).tobytes()
    pairs = [*zip(framed.slices, framed.frames, strict=True), (long, cpu_frame(long))]
    reported = changed = 0
    for _ in range(200 if THOROUGH else 10):
        chosen = [pairs[int(random.integers(len(pairs)))] for _ in range(40)]
        frames = [damaged(random, frame) for _, frame in chosen]
        decoded = decode(device, coders, frames, [len(data) for data, _ in chosen])
        reported += sum(found is None for found in decoded)
        changed += sum(found not in (None, data) for found, (data, _) in zip(decoded, chosen, strict=True))
        for found, frame, (data, _) in zip(decoded, frames, chosen, strict=True):
            if found is not None:
                assert libzstd(frame) == found, (frame, len(data))
    assert reported > 100 and changed > 0


def test_a_wrong_length_is_reported(device: GuardedDevice, coders: LiteralCoders, random: np.random.Generator) -> None:
    encoded = encode(device, coders, [skewed(random, 5000, 20, 90, 1.3)] * 4 + [np.zeros(5000, np.uint8)] * 2)
    assert decode(device, coders, encoded.frames, [4999, 5001, 5000, 1, 4999, 5001]) == [
        None,
        None,
        encoded.slices[0],
        None,
        None,
        None,
    ]


def test_nothing_outside_is_read(literals_library: ctypes.CDLL, random: np.random.Generator, planes: list[U8]) -> None:
    """Frames and slices that end, or begin, at memory that can't be accessed; whole frames and corrupt ones."""
    kernels, pages = LiteralKernels(emulated_launch(literals_library)), GuardPages()
    for _ in range(60 if THOROUGH else 12):
        data = made_slice(random, planes)[: 40 * KIB]
        data = data[: data.size // 16 * 16] if data.size >= 16 else np.full(16, 3, np.uint8)
        source, plan, nbytes = pages.allocate(data.size), pages.allocate(PLAN_NBYTES), pages.allocate(4)
        source[:] = data
        rows = torch.tensor([[source.ctypes.data, data.size]])
        kernels.measure(rows, torch.from_numpy(plan), torch.from_numpy(nbytes))
        length = int(nbytes.view(np.uint32)[0])
        if length == data.size:
            continue
        frame = pages.allocate(-(-length // 16) * 16)
        kernels.write(rows, torch.from_numpy(plan), torch.tensor([[frame.ctypes.data, length]]))
        whole = frame[:length].tobytes()
        assert libzstd(whole) == data.tobytes()
        for attempt in range(6):
            stored = damaged(random, whole) if attempt else whole
            for at_end in (True, False):
                memory = pages.allocate(-(-len(stored) // 4) * 4, at_end=at_end)
                out = pages.allocate(data.size, at_end=at_end)
                memory[: len(stored)] = np.frombuffer(stored, np.uint8)
                corrupt = torch.zeros(1, dtype=torch.int32)
                row = (memory.ctypes.data, len(stored), out.ctypes.data, data.size)
                kernels.decode(torch.tensor([row]), corrupt)
                assert attempt or (corrupt[0] == 0 and out.tobytes() == data.tobytes())

"""decode_slices checks all that a frame says: for each check a frame, built by hand, that only it finds."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from dcp_nvcomp.engines.cuda.literals import LiteralCoders, LiteralKernels

from .kernels_on_cpu import emulated_launch
from .literal_coding import GuardedDevice, GuardPages, decode, libzstd

# Of this length are all slices here; all of them are zeros, if they can be decoded.
NBYTES = 40
ZEROS = bytes(NBYTES)

# Two symbols, 0 and 1, with codes of one bit: the weight of 0 is listed, that of 1 follows.
TWO_SYMBOLS = bytes([128, 1 << 4])


def bits(*fields: tuple[int, int]) -> bytes:
    """Return numbers of so many bits, from the lowest bit up."""
    value = at = 0
    for number, width in fields:
        value |= number << at
        at += width
    return value.to_bytes(-(-at // 8), "little")


def zeros_stream(count: int, nbits: int = 1) -> bytes:
    """Return a stream of so many symbols whose code is zeros."""
    return bits((0, count * nbits), (1, 1))


def literals(
    weights: bytes = TWO_SYMBOLS,
    streams: tuple[bytes, ...] = (zeros_stream(10),) * 4,
    *,
    nbytes: int = NBYTES,
    kind: int = 2,
    size_format: int = 3,
    more_nbytes: int = 0,
    jumps: tuple[int, ...] | None = None,
    end: bytes = b"\0",
) -> bytes:
    """Return what a compressed block contains."""
    jumps = tuple(len(stream) for stream in streams[:3]) if jumps is None else jumps
    coded = weights + bits(*((jump, 16) for jump in jumps)) + b"".join(streams)
    width = 4 * size_format + 6
    return bits((kind, 2), (size_format, 2), (nbytes, width), (len(coded) + more_nbytes, width)) + coded + end


def block(kind: int, size: int, content: bytes, *, last: bool = True) -> bytes:
    return bits((last, 1), (kind, 2), (size, 21)) + content


def frame(*blocks: bytes, nbytes: int = NBYTES, descriptor: int = 0xA0) -> bytes:
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + nbytes.to_bytes(4, "little") + b"".join(blocks)


def framed(content: bytes) -> bytes:
    return frame(block(2, len(content), content))


def listed(*weights: int) -> bytes:
    pairs = [*weights, 0][: len(weights) + len(weights) % 2]
    return bytes([127 + len(weights), *(one << 4 | two for one, two in zip(pairs[::2], pairs[1::2], strict=True))])


def compressed(*fields: tuple[int, int], more: bytes = b"") -> bytes:
    """Return weights that are compressed: the description of the shares, and a stream."""
    content = bits(*fields) + more
    return bytes([len(content)]) + content


# 64 states, of which the weight 0 has 63 and the weight 1 has one: RFC 8878, 4.1.1.
SHARES = ((1, 4), (64 + 62, 7), (2, 2))
# Weights 1 and 1, so that the third symbol's is 2: both states are that of the rare weight, and 3 bits are left over,
# fewer than it asks for.
TWO_ONES = bits((0, 3), (63, 6), (63, 6), (1, 1))
TWELVE_BITS = listed(1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)

GOOD = {
    "18 bits": framed(literals()),
    "14 bits": framed(literals(size_format=2)),
    "10 bits": framed(literals(size_format=1)),
    "compressed weights": framed(literals(compressed(*SHARES, more=TWO_ONES), (zeros_stream(10, 2),) * 4)),
    "raw": frame(block(0, NBYTES, ZEROS)),
    "repeated": frame(block(1, NBYTES, b"\0")),
}

CORRUPT = {
    "magic": b"\x29" + framed(literals())[1:],
    "descriptor": frame(block(1, NBYTES, b"\0"), descriptor=0xA4),
    "content size": frame(block(1, NBYTES, b"\0"), nbytes=NBYTES + 1),
    "one byte of a block": frame(b"\x01"),
    "two bytes of a block": frame(bits((1, 1), (0, 2), (8000, 13))),
    "a raw block beyond the end": frame(block(0, NBYTES, ZEROS[:-1])),
    "a raw block too long for the slice": frame(block(0, NBYTES + 100, bytes(NBYTES + 100))),
    "a repeated block too long for the slice": frame(block(1, NBYTES + 100, b"\0")),
    "an empty raw block": frame(block(0, 0, b"")),
    "a compressed block longer than the slice": framed(literals(listed(1, *[0] * 60))),
    "a block of no kind": frame(block(3, NBYTES, ZEROS)),
    "a byte after the frame": framed(literals()) + b"\0",
    "a block too short": frame(block(0, NBYTES - 1, ZEROS[1:])),
    "a short block before the last": frame(block(1, 10, b"\0", last=False), block(1, 10, b"\0")),
    "no last block": frame(block(1, NBYTES, b"\0", last=False)),
    "something behind the last block": framed(literals()) + b"\0",
    "a compressed block of four bytes": frame(block(2, 4, literals()[:3] + b"\0")),
    "sequences": framed(literals(end=b"\1")),
    "raw literals": framed(literals(kind=0)),
    "repeated literals": framed(literals(kind=1)),
    "the codes of the block before": framed(literals(kind=3)),
    "one stream": framed(literals(size_format=0)),
    "literals that end too early": framed(literals(more_nbytes=-1)),
    "literals beyond the block": framed(literals(more_nbytes=1)),
    "more literals than fit": framed(literals(streams=(zeros_stream(30),) * 4, nbytes=120)),
    "fewer literals than the slice": framed(literals(streams=(zeros_stream(9),) * 4, nbytes=36)),
    "five literals": frame(block(2, 19, literals(streams=(zeros_stream(2),) * 4, nbytes=5)), nbytes=5),
    "no literals": framed(literals(nbytes=0)),
    "an empty stream": framed(literals(streams=(b"", *(zeros_stream(10),) * 3))),
    "a stream without an end mark": framed(literals(streams=(b"\0", *(zeros_stream(10),) * 3))),
    "a stream that is too long": framed(literals(streams=(zeros_stream(11), *(zeros_stream(10),) * 3))),
    "a stream that is too short": framed(literals(streams=(*(zeros_stream(10),) * 3, zeros_stream(9)))),
    "streams beyond the block": framed(literals(jumps=(0xFFFF, 1, 1))),
    "the third stream beyond the block": framed(literals(jumps=(1, 1, 0xFFFF))),
    "a weight of 15": framed(literals(listed(1, 15))),
    "no weights but zeros": framed(literals(listed(0, 0))),
    "no longest codes": framed(literals(listed(2))),
    "codes of 12 bits": framed(literals(TWELVE_BITS, (zeros_stream(10, 12),) * 4)),
    "weights that nothing completes": framed(literals(listed(1, 1, 1, 2))),
    "a list beyond the block": framed(literals(bytes([255]))),
    "compressed weights beyond the block": framed(literals(bytes([127, 0x11]))),
    "no compressed weights": framed(literals(bytes([0]))),
    "128 states": framed(literals(compressed((2, 4), (129, 8), (0, 8)))),
    "shares of 13 weights": framed(literals(compressed((1, 4), (1, 6), *((3, 2),) * 20, more=bytes(3) + b"\1"))),
    "shares of too many weights, one by one": framed(literals(compressed((1, 4), (0, 60), more=b"\1" * 9))),
    "shares and no stream": framed(literals(compressed(*SHARES))),
    "shares that end beyond their bytes": framed(literals(compressed((1, 4), (32, 6), (62, 6)))),
    "a stream of weights without an end mark": framed(
        literals(compressed(*SHARES, more=TWO_ONES + b"\0"), (zeros_stream(10, 2),) * 4)
    ),
    "a stream of weights without states": framed(literals(compressed(*SHARES, more=b"\7"))),
    "more than 255 weights": framed(literals(compressed(*SHARES, more=bytes(99) + b"\1"))),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_frames(device: GuardedDevice, coders: LiteralCoders, name: str) -> None:
    """The frames below would be such, but for what makes them corrupt."""
    assert libzstd(GOOD[name]) == ZEROS
    assert decode(device, coders, [GOOD[name]], [NBYTES]) == [ZEROS]


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_frames(device: GuardedDevice, coders: LiteralCoders, name: str) -> None:
    """Reported, and nothing is written beside the slice, nor into what is shared with other frames."""
    good = GOOD["18 bits"]
    lengths = [5 if name == "five literals" else NBYTES, NBYTES] * 5
    assert decode(device, coders, [CORRUPT[name], good] * 5, lengths) == [None, ZEROS] * 5


@pytest.mark.parametrize("name", CORRUPT)
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_beside_corrupt_frames(literals_library: ctypes.CDLL, name: str, at_end: bool) -> None:
    kernels, pages, data = LiteralKernels(emulated_launch(literals_library)), GuardPages(), CORRUPT[name]
    memory, out = pages.allocate(-(-len(data) // 4) * 4, at_end=at_end), pages.allocate(48, at_end=at_end)
    # at the end of a page, the frame's own end is there or up to 3 bytes before it
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    corrupt = torch.zeros(1, dtype=torch.int32)
    nbytes = 5 if name == "five literals" else NBYTES
    kernels.decode(torch.tensor([[memory.ctypes.data, len(data), out.ctypes.data, nbytes]]), corrupt)
    assert corrupt[0] == 1 and not out[nbytes:].any()


FULL = 128 << 10
FIVE_LITERALS = literals(streams=(zeros_stream(2),) * 4, nbytes=5)
SHORT_LAST_BLOCKS = {
    "five literals": (5, block(2, len(FIVE_LITERALS), FIVE_LITERALS)),
    "a repeated block too long for the rest": (40, block(1, 50, b"\0")),
}


@pytest.mark.parametrize("name", SHORT_LAST_BLOCKS)
def test_corrupt_last_blocks(device: GuardedDevice, coders: LiteralCoders, name: str) -> None:
    """Blocks that are too long for what is left of a slice, but not for all of it."""
    rest, last = SHORT_LAST_BLOCKS[name]
    data = frame(block(1, FULL, b"\0", last=False), last, nbytes=FULL + rest)
    assert decode(device, coders, [data], [FULL + rest]) == [None]

"""Frames that no encoder wrote, each made of a good one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dcp_nvcomp.codecs.base import Coder
from dcp_nvcomp.codecs.coders import Deflate, Zstd

__all__ = ["SLICE_NBYTES", "TAMPERED_CODERS", "TAMPERINGS", "a_slice"]

SLICE_NBYTES = 64 << 10

TAMPERED_CODERS: Mapping[str, Coder] = {
    "Zstd": Zstd(SLICE_NBYTES),
    "Deflate": Deflate(SLICE_NBYTES, literals_only=True),
}


def a_slice(nbytes: int = SLICE_NBYTES) -> bytes:
    """Return a slice such as exponents are, with some runs in it."""
    random = np.random.default_rng(11)
    data = (100 + random.choice(12, nbytes, p=np.arange(12, 0, -1) / 78)).astype(np.uint8)
    data[nbytes // 3 : nbytes // 2] = 100
    return data.tobytes()


def _flipped(frame: bytes, place: float) -> bytes:
    changed = bytearray(frame)
    changed[int(place * (len(frame) - 1))] ^= 0x24
    return bytes(changed)


def _garbage(frame: bytes) -> bytes:
    return np.random.default_rng(12).integers(0, 256, len(frame), np.uint8).tobytes()


def _other_coder(frame: bytes, coder: Coder) -> bytes:
    other = Deflate(SLICE_NBYTES) if isinstance(coder, Zstd) else Zstd(SLICE_NBYTES)
    return bytes(other.encoder()(memoryview(a_slice())))


# By name: the good frame and its coder --> the frame that is decoded in its place.
TAMPERINGS: Mapping[str, Callable[[bytes, Coder], bytes]] = {
    "random bytes": lambda frame, coder: _garbage(frame),
    "a flipped table": lambda frame, coder: _flipped(frame, 0.005),
    "a flipped middle": lambda frame, coder: _flipped(frame, 0.5),
    "cut in half": lambda frame, coder: frame[: len(frame) // 2],
    "a shorter slice": lambda frame, coder: bytes(coder.encoder()(memoryview(a_slice(1000)))),
    "a longer slice": lambda frame, coder: bytes(coder.encoder()(memoryview(a_slice(2 * SLICE_NBYTES)))),
    "a frame of another coder": _other_coder,
}

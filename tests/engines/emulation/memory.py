"""Memory that another process maps at the same address, so that tables of addresses mean the same there."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["SharedMemory", "WrongResultError", "expect"]

Bytes = npt.NDArray[np.uint8]

# Programs are mapped elsewhere, and ThreadSanitizer takes it for memory of the program.
_ADDRESS = 1 << 36
_MAP_FIXED_NOREPLACE = 0x100000


class SharedMemory:
    """Shared memory, given out piece by piece. There can only be one at a time.

    Args:
        nbytes: how much, a multiple of the size of a page; what is not used takes none.

    Attributes:
        address: where it is mapped.
        nbytes: how much there is.
        descriptor: of the file that it is.
    """

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self.address, self.nbytes = _ADDRESS, nbytes
        self.descriptor = os.memfd_create("kernels")
        os.ftruncate(self.descriptor, nbytes)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
        ]  # fmt: skip
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE
        mapped = self._libc.mmap(self.address, nbytes, protection, flags, self.descriptor, 0)
        if mapped != self.address:
            os.close(self.descriptor)
            raise OSError(ctypes.get_errno(), f"no shared memory at {self.address:#x}")
        self._bytes: Bytes = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.address), np.uint8)
        self._used = 0

    def close(self) -> None:
        """Unmap it; no array that is part of it may be used any more."""
        self._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))
        os.close(self.descriptor)

    def clear(self) -> None:
        """Take everything back."""
        self._bytes[: self._used] = 0
        self._used = 0

    def empty(self, nbytes: int, misaligned: int = 0) -> Bytes:
        """Return zero bytes that begin so far from a multiple of 64."""
        start = -(-self._used // 64) * 64 + misaligned
        self._used = start + nbytes
        assert self._used <= self.nbytes
        return self._bytes[start : start + nbytes]

    def put(self, values: npt.NDArray[np.generic], misaligned: int = 0) -> Bytes:
        """Return a copy."""
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        target = self.empty(source.size, misaligned)
        target[:] = source
        return target


class WrongResultError(Exception):
    """A kernel computed something else than it must."""


def expect(what: str, found: npt.NDArray[np.uint8] | bytes, expected: bytes) -> None:
    """Raise `WrongResultError` if the bytes differ."""
    if bytes(found) != expected:
        raise WrongResultError(what)

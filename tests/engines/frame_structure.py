"""The structure of Zstandard frames and deflate streams as RFC 8878 and RFC 1951 have it, read one frame at a time.

The oracle of dcp_nvcomp/engines/cuda/frame_checks.py, with which it shares nothing. Only what can be read without
decoding is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["is_sound_deflate", "is_sound_zstd"]

_MAX_BLOCK_NBYTES = 128 << 10
_MAX_CODE_NBITS = 11


class _Unsound(Exception):
    pass


class _Bits:
    """Bytes of which the lowest bit comes first."""

    def __init__(self, data: bytes) -> None:
        self._left, self._number = 8 * len(data), int.from_bytes(data, "little")

    def take(self, nbits: int) -> int:
        if nbits > self._left:
            raise _Unsound("too short")
        value = self._number & (1 << nbits) - 1
        self._number >>= nbits
        self._left -= nbits
        return value

    @property
    def left_nbytes(self) -> int:
        assert self._left % 8 == 0
        return self._left // 8

    def rest(self) -> bytes:
        return self._number.to_bytes(self.left_nbytes, "little")

    def block(self, nbytes: int) -> bytes:
        return self.take(8 * nbytes).to_bytes(nbytes, "little")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Unsound(otherwise)


def _is_sound(read: Callable[[_Bits, int], None], frame: bytes, nbytes: int) -> bool:
    try:
        read(_Bits(frame), nbytes)
    except _Unsound:
        return False
    return True


def is_sound_zstd(frame: bytes, nbytes: int) -> bool:
    """Return True if this can be a frame of so many bytes."""
    return _is_sound(_zstd_frame, frame, nbytes)


def is_sound_deflate(stream: bytes, nbytes: int) -> bool:
    """Return True if this can be a stream of so many bytes."""
    return _is_sound(_deflate_stream, stream, nbytes)


def _zstd_frame(bits: _Bits, nbytes: int) -> None:
    _demand(bits.take(32) == 0xFD2FB528, "magic number")
    dictionary_flag, has_checksum, reserved, _unused = bits.take(2), bits.take(1), bits.take(1), bits.take(1)
    is_single, content_flag = bits.take(1), bits.take(2)
    _demand(not reserved, "reserved bit")
    window_nbytes = nbytes
    if not is_single:
        mantissa, exponent = bits.take(3), bits.take(5)
        window_nbytes = 2 ** (10 + exponent) * (8 + mantissa) // 8
    _demand(window_nbytes <= max(8 << 20, 2 * nbytes), "window")
    _demand(bits.take({0: 0, 1: 8, 2: 16, 3: 32}[dictionary_flag]) == 0, "dictionary")
    if content_flag == 1:
        _demand(bits.take(16) + 256 == nbytes, "content size")
    elif content_flag or is_single:
        _demand(bits.take({0: 8, 2: 32, 3: 64}[content_flag]) == nbytes, "content size")
    limit = min(_MAX_BLOCK_NBYTES, window_nbytes)
    least, most, is_last, earlier = 0, 0, 0, _Earlier()
    while not is_last:
        is_last, kind, size = bits.take(1), bits.take(2), bits.take(21)
        _demand(kind < 3, "block type")
        _demand(size <= limit, "block size")
        if kind == 2:
            shortest, longest = _compressed_block(_Bits(bits.block(size)), limit, earlier)
            least, most = least + shortest, most + longest
        else:
            bits.block(size if kind == 0 else 1)
            least, most = least + size, most + size
    _demand(len(bits.rest()) == (4 if has_checksum else 0), "end")
    _demand(least <= nbytes <= most, "sizes of blocks")


class _Earlier:
    """What later blocks of a frame may refer to."""

    table = False
    sequences = False


def _compressed_block(bits: _Bits, limit: int, earlier: _Earlier) -> tuple[int, int]:
    kind, size_format = bits.take(2), bits.take(1)
    if kind < 2:
        nbits = 5 if size_format == 0 else (12, 20)[bits.take(1)]
        count = bits.take(nbits)
        bits.block(count if kind == 0 else 1)
    else:
        size_format += 2 * bits.take(1)
        nbits = (10, 10, 14, 18)[size_format]
        count, coded_nbytes = bits.take(nbits), bits.take(nbits)
        literals = _Bits(bits.block(coded_nbytes))
        if kind == 2:
            header = literals.take(8)
            _demand(header > 0, "empty table")
            literals.block(header if header < 128 else (header - 127 + 1) // 2)
            earlier.table = True
        _demand(earlier.table, "treeless")
        _streams(literals, count, four=size_format > 0)
    _demand(count <= limit, "literals")
    sequences = _sequences(bits, earlier)
    _demand(count + 3 * sequences <= limit, "sequences")
    return count + 3 * sequences, limit if sequences else count


def _streams(literals: _Bits, count: int, *, four: bool) -> None:
    if not four:
        _stream(literals.rest(), count)
        return
    _demand(count >= 6, "four streams")
    lengths = [literals.take(16) for _ in range(3)]
    each = (count + 3) // 4
    for length in lengths:
        _stream(literals.block(length), each)
    _stream(literals.rest(), count - 3 * each)


def _stream(stream: bytes, count: int) -> None:
    _demand(stream[-1:] > b"\0", "end mark")
    nbits = int.from_bytes(stream, "little").bit_length() - 1
    _demand(count <= nbits <= _MAX_CODE_NBITS * count, "length of a stream")


def _sequences(bits: _Bits, earlier: _Earlier) -> int:
    sequences = bits.take(8)
    if 128 <= sequences < 255:
        sequences = ((sequences - 128) << 8) + bits.take(8)
    elif sequences == 255:
        sequences = bits.take(16) + 0x7F00
    if sequences == 0:
        _demand(bits.rest() == b"", "behind no sequences")
        return 0
    reserved, *modes = (bits.take(2) for _ in range(4))
    _demand(reserved == 0, "reserved bits")
    _demand(3 not in modes or earlier.sequences, "repeated table")
    rest = bits.rest()
    _demand(len(rest) > sum(mode in (1, 2) for mode in modes), "tables of sequences")
    _demand(rest[-1] > 0, "end mark")
    earlier.sequences = True
    return sequences


def _deflate_stream(bits: _Bits, nbytes: int) -> None:
    is_last = 0
    while not is_last:
        left_nbytes = bits.left_nbytes
        is_last, kind = bits.take(1), bits.take(2)
        _demand(kind < 3, "block type")
        _demand(nbytes <= 1033 * left_nbytes, "ratio")
        if kind:
            codes, distances = bits.take(5), bits.take(5)
            _demand(kind == 1 or (codes + 257 <= 286 and distances + 1 <= 30), "codes")
            return
        bits.take(5)
        length, complement = bits.take(16), bits.take(16)
        _demand(length + complement == 0xFFFF, "lengths")
        bits.block(length)
        nbytes -= length
        _demand(nbytes >= 0, "more than the slice")
    _demand(nbytes == 0 and bits.rest() == b"", "end")

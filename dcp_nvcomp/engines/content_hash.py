"""The hash of a shard's content, by which a save finds out that a checkpoint beside it has the same.

XXH3 of 128 bits (https://github.com/Cyan4973/xxHash), of the digests of the pieces of 1 MiB that the elements, in C
order, make: so pieces can be hashed at the same time, and on a device. It is no cryptographic hash: it tells tensors
apart that training makes, not those that someone made to collide.
"""

from __future__ import annotations

from typing import Final

import xxhash

PIECE_NBYTES: Final = 1 << 20
HASH_DIGITS: Final = 32


class ContentHash:
    """Hashes the bytes of a shard, piece by piece.

    Examples:
        >>> content = ContentHash()
        >>> content.update(memoryview(bytes(3)))
        >>> content.hexdigest()
        '0dcad540dd9ea02f12eedfd1d313403b'
    """

    def __init__(self) -> None:
        self._pieces, self._piece = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._left_nbytes = PIECE_NBYTES

    @staticmethod
    def digest_of_piece(piece: memoryview) -> bytes:
        """Return the digest of one piece: 16 bytes."""
        found: bytes = xxhash.xxh3_128_digest(piece)
        return found

    @staticmethod
    def of_digests(digests: bytes) -> str:
        """Return the hash of a shard whose pieces have these digests, one after the other."""
        found: str = xxhash.xxh3_128_hexdigest(digests)
        return found

    def update(self, data: memoryview) -> None:
        """Add bytes; long ones without holding the GIL."""
        start = 0
        while start < len(data):
            part = data[start : start + self._left_nbytes]
            self._piece.update(part)
            start += len(part)
            self._left_nbytes -= len(part)
            if not self._left_nbytes:
                self._end_piece()

    def _end_piece(self) -> None:
        self._pieces.update(self._piece.digest())
        self._piece.reset()
        self._left_nbytes = PIECE_NBYTES

    def hexdigest(self) -> str:
        """Return the hash of all that was added; nothing can be added afterwards."""
        if self._left_nbytes < PIECE_NBYTES:
            self._end_piece()
        found: str = self._pieces.hexdigest()
        return found

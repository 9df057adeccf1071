"""`deflate`: each slice one raw deflate stream (RFC 1951), which zlib decodes with `wbits=-15`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

from dcp_nvcomp.codecs.base import Coder, SliceDecoder, SliceEncoder, check_slice_nbytes
from dcp_nvcomp.codecs.coders.zstd import DEFAULT_SLICE_NBYTES
from dcp_nvcomp.codecs.configuration import slice_nbytes
from dcp_nvcomp.errors import CorruptDataError


@dataclass(frozen=True)
class Deflate(Coder):
    """Deflate.

    Attributes:
        slice_nbytes: bytes of a plane in one stream, a multiple of 16.
        level: zlib's compression level where matches are searched. Not stored.
        literals_only: Huffman codes only, no search for matches (zlib's Z_HUFFMAN_ONLY).
    """

    name: ClassVar[str] = "deflate"
    slice_nbytes: int = DEFAULT_SLICE_NBYTES
    level: int = 1
    literals_only: bool = False

    def __post_init__(self) -> None:
        check_slice_nbytes(self.slice_nbytes)

    def configuration(self) -> dict[str, Any]:
        return {"slice_nbytes": self.slice_nbytes}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Deflate:
        return cls(slice_nbytes(configuration, cls.name))

    def encoder(self) -> SliceEncoder:
        strategy = zlib.Z_HUFFMAN_ONLY if self.literals_only else zlib.Z_DEFAULT_STRATEGY

        def encode(data: memoryview) -> bytes:
            compressor = zlib.compressobj(self.level, zlib.DEFLATED, -15, 9, strategy)
            return compressor.compress(data) + compressor.flush()

        return encode

    def decoder(self) -> SliceDecoder:
        def decode(stream: memoryview, out: memoryview) -> None:
            decompressor = zlib.decompressobj(-15)
            try:
                decoded = decompressor.decompress(stream, len(out) + 1)
            except zlib.error as error:
                raise CorruptDataError(f"A deflate slice does not decode: {error}.") from error
            if len(decoded) != len(out) or not decompressor.eof or decompressor.unused_data:
                raise CorruptDataError(f"A deflate slice does not decode to exactly {len(out)} bytes.")
            out[:] = decoded

        return decode

"""`zstd`: each slice one Zstandard frame (RFC 8878)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import zstandard

try:
    from dcp_nvcomp.codecs.coders import _literals
except ImportError:  # no C compiler was there when the package was installed
    _literals = None  # type: ignore[assignment]
from dcp_nvcomp.codecs.base import Coder, SliceDecoder, SliceEncoder, check_slice_nbytes
from dcp_nvcomp.codecs.configuration import slice_nbytes
from dcp_nvcomp.errors import CorruptDataError

# One zstd block is at most 128 KiB, so longer slices gain nothing on the CPU; on the GPU slices run in parallel.
DEFAULT_SLICE_NBYTES = 128 << 10


@dataclass(frozen=True)
class Zstd(Coder):
    """Zstandard.

    Attributes:
        slice_nbytes: bytes of a plane in one frame, a multiple of 16.
        level: zstd's compression level where matches are searched. Not needed to decode, so not stored.
        literals_only: code literals without searching for matches. On exponent planes the matches that zstd finds by
            chance cost 3-4 % of the ratio and half of the speed. The compiled `_literals` writes such frames itself,
            and decodes them; zstd's own library, which codes slices below 1 KiB and all of them where nothing was
            compiled, can be kept from nearly all matches, but not from searching.
    """

    name: ClassVar[str] = "zstd"
    slice_nbytes: int = DEFAULT_SLICE_NBYTES
    level: int = 3
    literals_only: bool = False

    def __post_init__(self) -> None:
        check_slice_nbytes(self.slice_nbytes)

    def configuration(self) -> dict[str, Any]:
        return {"slice_nbytes": self.slice_nbytes}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Zstd:
        return cls(slice_nbytes(configuration, cls.name))

    def encoder(self) -> SliceEncoder:
        if self.literals_only:
            # A match of 7 bytes found through a 64-entry table: practically none in entropy-rich planes.
            # target_length must stay 0: above it, the fast strategy leaves literals uncompressed.
            parameters = zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17, target_length=0
            )
            compress: SliceEncoder = zstandard.ZstdCompressor(compression_params=parameters).compress
            return compress if _literals is None else _literals_encoder(self.slice_nbytes, compress)
        return zstandard.ZstdCompressor(level=self.level).compress

    def decoder(self) -> SliceDecoder:
        # The window is bounded, never what a frame asks for. RFC 8878 wants 8 MiB of every decoder, and streaming
        # encoders use them also for short slices.
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(2 * self.slice_nbytes, 8 << 20))

        def decode(frame: memoryview, out: memoryview) -> None:
            if _literals is not None and _literals.decode_literals(frame, out):
                return
            try:
                parameters = zstandard.get_frame_parameters(frame)
                claimed = parameters.content_size
                if claimed not in (len(out), zstandard.CONTENTSIZE_UNKNOWN) or parameters.dict_id:
                    raise CorruptDataError(f"A zstd slice claims to decode to {claimed} bytes instead of {len(out)}.")
                decoded = decompressor.decompress(frame, max_output_size=len(out), allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise CorruptDataError(f"A zstd slice does not decode: {error}.") from error
            if len(decoded) != len(out):
                raise CorruptDataError(f"A zstd slice decodes to {len(decoded)} bytes instead of {len(out)}.")
            out[:] = decoded

        return decode


def _literals_encoder(slice_nbytes: int, otherwise: SliceEncoder) -> SliceEncoder:
    """Return the compiled encoder, with libzstd for slices that it declines. A frame is valid until the next call."""
    # what does not shrink is stored in blocks of at most 128 KiB: 3 bytes for each, 9 for the frame, and some to spare
    buffer = memoryview(bytearray(slice_nbytes + 3 * (slice_nbytes >> 17) + 32))

    def encode(data: memoryview) -> bytes | memoryview:
        nbytes = _literals.encode_literals(data, buffer)
        return buffer[:nbytes] if nbytes else otherwise(data)

    return encode

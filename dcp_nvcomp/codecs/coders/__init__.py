"""Bytes -> bytes codecs: what happens to each slice.

`zstd`      one Zstandard frame (RFC 8878)
`deflate`   one raw deflate stream (RFC 1951), which zlib decodes with `wbits=-15`
`ans`       nvCOMP's ANS. Opt-in: a closed bitstream, which only nvCOMP on an NVIDIA GPU reads
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import zstandard

from dcp_nvcomp.codecs.base import Coder, SliceDecoder, SliceEncoder, check_slice_nbytes, slice_nbytes, text
from dcp_nvcomp.errors import CodecUnavailableError, CorruptDataError

try:
    from dcp_nvcomp.codecs.coders import _literals
except ImportError:  # no C compiler was there when the package was installed
    _literals = None  # type: ignore[assignment]

# One zstd block is at most 128 KiB, so longer slices gain nothing on the CPU; on the GPU slices run in parallel.
DEFAULT_SLICE_NBYTES = 128 << 10

# nvCOMP's data_type for each element type: the coder models symbols of that width. It has no name for bfloat16.
ANS_DATA_TYPES = {
    "float16": "<f2",
    "bfloat16": "<f2",
    "float32": "<f4",
    "float8_e4m3fn": "|f1",
    "float8_e5m2": "|f1",
}


@dataclass(frozen=True)
class _OpenCoder(Coder):
    """A coder of which a decoder need only know how long slices are."""

    slice_nbytes: int = DEFAULT_SLICE_NBYTES

    def __post_init__(self) -> None:
        check_slice_nbytes(self.slice_nbytes)

    def configuration(self) -> dict[str, Any]:
        return {"slice_nbytes": self.slice_nbytes}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> _OpenCoder:
        return cls(slice_nbytes(configuration, cls.name))


@dataclass(frozen=True)
class Zstd(_OpenCoder):
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
    level: int = 3
    literals_only: bool = False

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


@dataclass(frozen=True)
class Deflate(_OpenCoder):
    """Deflate.

    Attributes:
        slice_nbytes: bytes of a plane in one stream, a multiple of 16.
        level: zlib's compression level where matches are searched. Not stored.
        literals_only: Huffman codes only, no search for matches (zlib's Z_HUFFMAN_ONLY).
    """

    name: ClassVar[str] = "deflate"
    level: int = 1
    literals_only: bool = False

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
            # what follows the stream is ignored: an encoder that states too large a size does no harm
            if len(decoded) != len(out) or not decompressor.eof:
                raise CorruptDataError(f"A deflate slice does not decode to exactly {len(out)} bytes.")
            out[:] = decoded

        return decode


@dataclass(frozen=True)
class Ans(Coder):
    """nvCOMP ANS.

    Attributes:
        slice_nbytes: bytes in one slice, a multiple of 16, at most 16 MiB. Its fixed overhead wants 1 MiB or more.
        data_type: nvCOMP's name of the element type: `|u1`, `|i1`, `|f1`, `<f2` or `<f4`.
        nvcomp_version: the version that wrote the slices; ANS changed incompatibly in 6.0.
    """

    name: ClassVar[str] = "ans"
    block_nbytes: ClassVar[int] = 4 << 20  # a slice has a fixed overhead, so longer ones pay
    needs_gpu: ClassVar[bool] = True
    needs_plain: ClassVar[bool] = True
    slice_nbytes: int = 1 << 20
    data_type: str = "|u1"
    nvcomp_version: str = ""

    def __post_init__(self) -> None:
        check_slice_nbytes(self.slice_nbytes)

    def configuration(self) -> dict[str, Any]:
        return {
            "slice_nbytes": self.slice_nbytes,
            "data_type": self.data_type,
            "nvcomp_version": self.nvcomp_version,
        }

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Ans:
        return cls(
            slice_nbytes(configuration, cls.name),
            text(configuration, "data_type", cls.name),
            text(configuration, "nvcomp_version", cls.name),
        )

    def encoder(self) -> NoReturn:
        raise CodecUnavailableError(
            "codec='ans' is nvCOMP's and needs an NVIDIA GPU, its driver and the package extra dcp-nvcomp[cu12] or "
            "[cu13], and the tensors to be on that GPU. Use codec='auto', which every machine can write and read."
        )

    def decoder(self) -> NoReturn:
        raise CodecUnavailableError(
            "This record was saved with codec='ans', which only nvCOMP on an NVIDIA GPU can decode (extra "
            "dcp-nvcomp[cu12] or [cu13]). On such a machine, load the checkpoint and save it again with codec='auto'; "
            "the result opens anywhere."
        )

"""What codes slices on a GPU: our own kernels for Zstandard, nvCOMP for all else.

encode   slices --> frames under way: their lengths, and then where they are to be written
decode   frames --> slices; nvCOMP decodes the Zstandard frames that have matches, as libzstd writes them

nvCOMP's encoder of Zstandard is never used; the CPU engine encodes what our kernels can't. On an H200 that encoder
(6.0.0.12) does 7 GB/s, takes 1.1 GB of memory for any batch, and with two streams at work ended in an illegal
instruction, after which a process can't use its GPU any more, for training neither.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import U8, CodecChain, Coder
from dcp_nvcomp.codecs.coders import Ans, Zstd
from dcp_nvcomp.engines.cuda.batches import I64, starts_of
from dcp_nvcomp.engines.cuda.coders import DECODE, ENCODE, Decoding, Frames, NvcompCoders, is_served
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.frame_checks import frame_faults
from dcp_nvcomp.engines.cuda.health import LITERALS, DeviceHealth
from dcp_nvcomp.engines.cuda.literals import LiteralCoders, LiteralDecoding, LiteralFrames
from dcp_nvcomp.errors import CodecUnavailableError

Bools = npt.NDArray[np.bool_]

# The CPU engine leaves shorter slices to libzstd, literals only or not (MIN_FRAME_NBYTES of _literals_encode.h).
_OWN_LEAST_NBYTES = 1024


class CheckedDecoding:
    """Slices of which some are decoded, and nvCOMP decodes the rest, but for frames that no GPU must see."""

    def __init__(self, good: Bools, under_way: npt.NDArray[np.intp], rest: Decoding | None) -> None:
        self._good = good
        self._under_way = under_way
        self._rest = rest

    def good(self) -> Bools:
        """Wait, and return for each slice True if it was decoded to its length."""
        if self._rest is not None:
            self._good[self._under_way] = self._rest.good()
        return self._good

    def known(self) -> Bools:
        """Return for each slice True if a decoder was given it that knows all frames."""
        known = self._good.copy()
        known[self._under_way] = True
        return known


# Frames of slices, under way; slices while they are decoded.
SliceFrames = Frames | LiteralFrames
SliceDecoding = Decoding | LiteralDecoding | CheckedDecoding


class DeviceCoders:
    """All coders of one device."""

    def __init__(self, device: Device, health: DeviceHealth) -> None:
        self._device = device
        self._health = health
        self._nvcomp = NvcompCoders(device, health.workspaces)
        self._literals: LiteralCoders | None = None

    def encodes(self, chain: CodecChain) -> bool:
        """True if the device encodes blocks of this chain, and decodes them again."""
        return is_served(chain) and (chain.coder is None or self._of(chain.coder, ENCODE) is not None)

    def decodes(self, chain: CodecChain) -> bool:
        """True if the device decodes blocks of this chain, or most of them."""
        return is_served(chain) and (chain.coder is None or self._of(chain.coder, DECODE) is not None)

    def check_decodable(self, coder: Coder | None) -> None:
        self._nvcomp.check_decodable(coder)

    def forget(self) -> None:
        """Drop nvCOMP's codecs, which keep the scratch memory of their largest batch."""
        self._nvcomp.forget()

    def encode_nbytes(self, coder: Coder, lengths: I64) -> int:
        return self._served_by(coder, ENCODE).encode_nbytes(coder, lengths)

    def decode_nbytes(self, coder: Coder, lengths: I64) -> int:
        coders = self._served_by(coder, DECODE)
        nbytes = coders.decode_nbytes(coder, lengths)
        if coders is self._nvcomp:
            return nbytes
        libzstd = lengths[lengths < _OWN_LEAST_NBYTES] if getattr(coder, "literals_only", False) else lengths
        return nbytes + (self._nvcomp.decode_nbytes(coder, libzstd) if libzstd.size else 0)

    def encode(self, coder: Coder, scratch: Tensor, places: I64, lengths: I64) -> SliceFrames:
        return self._served_by(coder, ENCODE).encode(coder, scratch, places, lengths)

    def decode(
        self, coder: Coder, encoded: Tensor, at: I64, nbytes: I64, scratch: Tensor, places: I64, lengths: I64
    ) -> SliceDecoding:
        """See `NvcompCoders.decode`. Waits for our kernels, and before nvCOMP gets frames that have to be checked."""
        coders = self._served_by(coder, DECODE)
        good = np.zeros(lengths.shape, np.bool_)
        if coders is not self._nvcomp:
            decoding = coders.decode(coder, encoded, at, nbytes, scratch, places, lengths)
            good = decoding.good()
            if good.all():
                return decoding
        elif isinstance(coder, Ans):  # its frames can't be checked
            return coders.decode(coder, encoded, at, nbytes, scratch, places, lengths)
        others = np.flatnonzero(~good)
        if coder.name in self._health.refused:
            return CheckedDecoding(good, others[:0], None)
        faults = frame_faults(coder, *_in_host_memory(encoded, at[others], nbytes[others]), lengths[others])
        sound = np.delete(others, list(faults))
        rest = None
        if sound.size:
            rest = self._nvcomp.decode(coder, encoded, at[sound], nbytes[sound], scratch, places[sound], lengths[sound])
        return CheckedDecoding(good, sound, rest)

    def _of(self, coder: Coder, direction: str) -> NvcompCoders | LiteralCoders | None:
        """Return what codes for a coder, the first that works; None if it is left to the CPU engine."""
        for name in names_of(coder, direction):
            if name == LITERALS and self._literals is None and name not in self._health.refused:
                try:
                    self._literals = LiteralCoders(self._device)
                except CodecUnavailableError as error:
                    self._health.refuse(name, error)
            if name not in self._health.refused:
                return self._literals if name == LITERALS else self._nvcomp
        return None

    def _served_by(self, coder: Coder, direction: str) -> NvcompCoders | LiteralCoders:
        found = self._of(coder, direction)
        assert found is not None, "the engine asks first"
        return found


def _in_host_memory(encoded: Tensor, at: I64, nbytes: I64) -> tuple[U8, I64, I64]:
    """Return memory of the host that has these frames, where in it, and their lengths."""
    if not at.size or nbytes.sum() > encoded.numel() // 4:
        return encoded.cpu().numpy(), at, nbytes
    # the last slices of tensors, in a batch of our kernels' frames: all of it would take longer than to decode it
    runs = [encoded[start : start + length] for start, length in zip(at.tolist(), nbytes.tolist(), strict=True)]
    return torch.cat(runs).cpu().numpy(), starts_of(nbytes)[:-1], nbytes


def names_of(coder: Coder, direction: str) -> tuple[str, ...]:
    """Return the names of what may code for a coder; nvCOMP's are those of the coders."""
    if not isinstance(coder, Zstd):
        return (coder.name,)
    if direction == DECODE:  # what a file says of its coder does not say whether the frames are of literals only
        return (LITERALS, coder.name)
    return (LITERALS,) if LiteralCoders.encodes(coder) else ()


def is_ever_served(chain: CodecChain, direction: str) -> bool:
    """Return False if blocks of a chain are always left to the CPU engine, which is nothing to warn of."""
    return is_served(chain) and (chain.coder is None or bool(names_of(chain.coder, direction)))


def refusal_of(health: DeviceHealth, chain: CodecChain, direction: str) -> str | None:
    """Return why a device must not code blocks of a chain; None if it may, or never does."""
    if chain.coder is None or not is_ever_served(chain, direction):
        return None
    return health.refusal(chain.coder, names_of(chain.coder, direction))

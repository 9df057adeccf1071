"""What codes slices on a GPU: nvCOMP, or for literals-only zstd frames our own kernels.

nvCOMP codes whatever the kernels of literals.py don't. What both can code is left to the kernels, but on GPUs for which
nvCOMP was measured to be faster, or if nvCOMP is asked for by name. Both write frames that every zstd decoder reads.

nvCOMP's encoder of Zstd is used in these two cases alone: else the CPU engine encodes what our kernels can't. On an
H200 that encoder (6.0.0.12) does 7 GB/s, takes 1.1 GB of memory for any batch, and with two streams at work ended in an
illegal instruction, after which a process can't use its GPU any more, for training neither.

    encode   slices --> frames under way: their lengths, and then where they are to be written
    decode   frames --> slices, by the kernels if those are chosen; frames of other encoders are nvCOMP's all the same

`zstd_rates.json` has what was measured of both on each kind of GPU, by the name that its driver gives it, in bytes of
slices per second. Only `python -m benchmarks.gpu_rates` writes it, from a run of benchmarks.gpu_acceptance there.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain, Coder
from dcp_nvcomp.codecs.coders import Zstd
from dcp_nvcomp.engines.cuda.batches import I64
from dcp_nvcomp.engines.cuda.coders import DECODE, ENCODE, Decoding, Frames, NvcompCoders, is_served
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.health import LITERALS, NVCOMP, DeviceHealth
from dcp_nvcomp.engines.cuda.literals import LiteralCoders, LiteralDecoding, LiteralFrames
from dcp_nvcomp.errors import CodecUnavailableError
from dcp_nvcomp.options import CudaZstd

Bools = npt.NDArray[np.bool_]

RATES_NAME: Final = "zstd_rates.json"


class _TwoDecodings:
    """Slices of which our kernels decoded some, and nvCOMP, if it can be had, decodes the rest."""

    def __init__(self, good: Bools, rest: SliceDecoding | None) -> None:
        self._good = good
        self._rest = rest

    def good(self) -> Bools:
        good = self._good.copy()
        if self._rest is not None:
            good[~self._good] = self._rest.good()
        return good

    def known(self) -> Bools:
        return self._good.copy() if self._rest is None else np.ones_like(self._good)


# Frames of slices, under way; slices while they are decoded; and what codes slices in device memory.
SliceFrames = Frames | LiteralFrames
SliceDecoding = Decoding | LiteralDecoding | _TwoDecodings
SliceCoders = NvcompCoders | LiteralCoders


class DeviceCoders:
    """All coders of one device."""

    def __init__(self, device: Device, health: DeviceHealth) -> None:
        self._device = device
        self._health = health
        self._nvcomp = NvcompCoders(device, health.workspaces)
        self._literals: LiteralCoders | None = None
        self._zstd = "auto"
        self._budget_nbytes = 0
        health.nvcomp_is_faster = faster_nvcomp(device.name)

    def prefer(self, zstd: str, budget_nbytes: int) -> None:
        """Choose what codes Zstd from now on, one of `options.CudaZstd`, and how much memory a batch may take."""
        assert zstd in get_args(CudaZstd)
        self._zstd = zstd
        self._budget_nbytes = budget_nbytes

    @contextmanager
    def preferring(self, zstd: str) -> Iterator[None]:
        """`prefer`, for a while."""
        before, self._zstd = self._zstd, zstd
        try:
            yield
        finally:
            self._zstd = before

    def may_use_literals(self, chain: CodecChain) -> bool:
        """True if our kernels are to code slices of this chain, should they work."""
        coder = chain.coder
        if coder is None:
            return False
        working = (
            [one for one in self.providers(coder, way) if one == LITERALS or self._works(one, coder)]
            for way in (ENCODE, DECODE)
        )
        return any(providers[:1] == [LITERALS] for providers in working)

    def providers(self, coder: Coder, direction: str) -> tuple[str, ...]:
        """Return what may code for a coder, whether it works or not."""
        return providers_of(coder, self._zstd, direction, self._health.nvcomp_is_faster)

    def encodes(self, chain: CodecChain) -> bool:
        """True if the device encodes blocks of this chain, and decodes them again."""
        if chain.coder is None or not self.decodes(chain):
            return self.decodes(chain)
        coders = self._of(chain.coder, ENCODE)
        # nvCOMP's encoder of Zstd takes more than a gigabyte for any batch; without that the CPU engine is faster
        return coders is not None and coders.encode_fixed_nbytes(chain.coder) <= self._budget_nbytes

    def decodes(self, chain: CodecChain) -> bool:
        """True if the device decodes blocks of this chain, or most of them."""
        return is_served(chain) and (chain.coder is None or self._of(chain.coder, DECODE) is not None)

    def check_decodable(self, coder: Coder | None) -> None:
        self._nvcomp.check_decodable(coder)

    def encode_nbytes(self, coder: Coder, lengths: I64) -> int:
        return self._served_by(coder, ENCODE).encode_nbytes(coder, lengths)

    def encode_fixed_nbytes(self, coder: Coder) -> int:
        return self._served_by(coder, ENCODE).encode_fixed_nbytes(coder)

    def decode_nbytes(self, coder: Coder, lengths: I64) -> int:
        coders = self._served_by(coder, DECODE)
        nbytes = coders.decode_nbytes(coder, lengths)
        may_have_others = coders is not self._nvcomp and not getattr(coder, "literals_only", False)
        if may_have_others and self._works(NVCOMP, coder):  # it decodes the frames that are not ours
            nbytes += self._nvcomp.decode_nbytes(coder, lengths)
        return nbytes

    def encode(self, coder: Coder, scratch: Tensor, places: I64, lengths: I64) -> SliceFrames:
        return self._served_by(coder, ENCODE).encode(coder, scratch, places, lengths)

    def decode(
        self, coder: Coder, encoded: Tensor, at: I64, nbytes: I64, scratch: Tensor, places: I64, lengths: I64
    ) -> SliceDecoding:
        """See `NvcompCoders.decode`. Waits, if our kernels are chosen and meet frames that are not theirs."""
        coders = self._served_by(coder, DECODE)
        decoding = coders.decode(coder, encoded, at, nbytes, scratch, places, lengths)
        if coders is self._nvcomp or (good := decoding.good()).all():
            return decoding
        others, rest = ~good, None
        if self._works(NVCOMP, coder):
            rest = self._nvcomp.decode(
                coder, encoded, at[others], nbytes[others], scratch, places[others], lengths[others]
            )
        return _TwoDecodings(good, rest)

    def _works(self, provider: str, coder: Coder) -> bool:
        return (provider, type(coder)) not in self._health.refused

    def _of(self, coder: Coder, direction: str) -> SliceCoders | None:
        """Return what codes for a coder; None if nothing on this device may."""
        for provider in providers_of(coder, self._zstd, direction, self._health.nvcomp_is_faster):
            coders = self._working_literals(coder) if provider == LITERALS else self._working_nvcomp(coder)
            if coders is not None:
                return coders
        return None

    def _working_nvcomp(self, coder: Coder) -> NvcompCoders | None:
        return self._nvcomp if self._works(NVCOMP, coder) else None

    def _served_by(self, coder: Coder, direction: str) -> SliceCoders:
        found = self._of(coder, direction)
        assert found is not None, "the engine asks first"
        return found

    def _working_literals(self, coder: Coder) -> LiteralCoders | None:
        """Return our own coder, compiled when it is first wanted; None if it does not work here."""
        if self._literals is None and self._works(LITERALS, coder):
            try:
                self._literals = LiteralCoders(self._device)
            except CodecUnavailableError as error:
                self._health.refuse(LITERALS, type(coder), error)
        return self._literals if self._works(LITERALS, coder) else None


def providers_of(coder: Coder, zstd: str, direction: str, nvcomp_is_faster: Collection[str]) -> tuple[str, ...]:
    """Return what may code for a coder, the first that works; nothing if it is always left to the CPU engine.

    Args:
        coder: the coder.
        zstd: one of `options.CudaZstd`.
        direction: `"encode"` or `"decode"`.
        nvcomp_is_faster: the directions in which nvCOMP's Zstd was measured to be faster than our kernels.
    """
    if not isinstance(coder, Zstd):
        return (NVCOMP,)
    # what a file says of its coder does not say whether the frames are of literals only
    serves = LiteralCoders.encodes if direction == ENCODE else LiteralCoders.decodes
    own = (LITERALS,) if zstd != NVCOMP and serves(coder) else ()
    if zstd == LITERALS and own:
        return own  # what is asked for by name is not replaced
    wants_nvcomp = zstd == NVCOMP or (zstd == "auto" and direction in nvcomp_is_faster)
    nvcomp = (NVCOMP,) if wants_nvcomp or direction == DECODE else ()
    return (*nvcomp, *own) if wants_nvcomp else (*own, *nvcomp)


def refusal_of(health: DeviceHealth, chain: CodecChain, zstd: str, direction: str) -> str | None:
    """Return why a device must not code blocks of a chain; None if it may, or never does."""
    if chain.coder is None or not is_served(chain):
        return None
    providers = providers_of(chain.coder, zstd, direction, health.nvcomp_is_faster)
    return health.refusal(chain.coder, providers) if providers else None


def is_ever_served(health: DeviceHealth, chain: CodecChain, zstd: str, direction: str) -> bool:
    """Return False if blocks of a chain are always left to the CPU engine, which is nothing to warn of."""
    return is_served(chain) and (
        chain.coder is None or bool(providers_of(chain.coder, zstd, direction, health.nvcomp_is_faster))
    )


@functools.cache
def _rates() -> dict[str, Any]:
    text = importlib.resources.files("dcp_nvcomp.engines.cuda").joinpath(RATES_NAME).read_text(encoding="utf-8")
    rates: dict[str, Any] = json.loads(text)
    return rates


def faster_nvcomp(gpu: str) -> frozenset[str]:
    """Return the directions, `"encode"` and `"decode"`, in which nvCOMP was measured to be faster on a GPU."""
    measured = _rates().get(gpu, {})
    return frozenset(direction for direction, rates in measured.items() if rates["nvcomp"] > rates["literals"])

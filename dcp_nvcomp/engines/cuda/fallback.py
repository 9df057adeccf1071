"""Before the CPU engine does a GPU's work: a warning, or, where the CPU may not or can't, an error."""

from __future__ import annotations

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.engines.cuda.health import DeviceHealth
from dcp_nvcomp.engines.cuda.interface import EnginePolicy
from dcp_nvcomp.engines.cuda.slice_coders import refusal_of
from dcp_nvcomp.errors import CodecUnavailableError


class FallBack:
    """What one save or load allows. Each method raises CodecUnavailableError if that rules the CPU engine out."""

    def __init__(self, health: DeviceHealth, policy: EnginePolicy) -> None:
        self._health = health
        self._policy = policy

    def of_everything(self, reason: str) -> None:
        """The GPU is not used any more."""
        if not self._policy.may_fall_back:
            raise CodecUnavailableError(f"engine='cuda' can't go on: {reason}. Use engine='auto' or 'cpu'.")
        self._health.fell_back(reason)

    def of_chain(self, chain: CodecChain, direction: str) -> None:
        """The GPU does not take a block of this chain: be it that it never does, or that its self-test failed."""
        refusal = refusal_of(self._health, chain, self._policy.zstd, direction)
        if refusal is not None:
            if not self._policy.may_fall_back:
                raise CodecUnavailableError(f"engine='cuda' can't run here: {refusal}. Use engine='auto' or 'cpu'.")
            self._health.left_out(chain, refusal)

    def of_block(self, chain: CodecChain, reason: str) -> None:
        """A block failed alone. One that needs a GPU is left to `CopyingEngine`, which says so."""
        if not self._policy.may_fall_back and not chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU failed on a block ({reason}), and engine='cuda' rules the CPU engine out."
            )
        if not chain.needs_gpu:
            self._health.failed(reason)

    def of_wrong_block(self, chain: CodecChain) -> None:
        """A block was encoded to wrong bytes; with any policy the CPU makes it right, if it can."""
        if chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU encoded a block to wrong bytes ({self._health.name}), which was found before they were "
                "written, and only a GPU runs nvCOMP's ANS. Save with codec='auto', of which the CPU engine does again "
                "what comes out wrong, and report this, with the versions of nvCOMP and of the driver."
            )

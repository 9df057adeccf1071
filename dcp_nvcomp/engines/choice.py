"""The engine for each tensor, by the `engine` option and by what this machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser, needs_gpu
from dcp_nvcomp.engines.cuda.device import current_device
from dcp_nvcomp.engines.cuda.fallback import EnginePolicy
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE, shared_pool
from dcp_nvcomp.engines.cuda.slice_coders import is_ever_served, refusal_of
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.engines.notices import warn
from dcp_nvcomp.errors import CodecUnavailableError
from dcp_nvcomp.options import Engine, check_choice


@dataclass
class EngineChoice:
    """The `engine` option, applied to one tensor at a time."""

    option: str  # `"auto"`, `"cpu"` or `"cuda"`
    _warned: bool = False
    _known: tuple[int, str | None] = (0, None)

    def _unavailable_reason(self) -> str | None:
        """Return `cuda_unavailable_reason`, asked once in each process: blocks ask by the thousand."""
        if self._known[0] != os.getpid():
            self._known = (os.getpid(), cuda_unavailable_reason())
        return self._known[1]

    def begin(self, device_memory_budget: int | None) -> None:
        """Begin a save or load: make sure, before it does anything, that `engine="cuda"` is not asked for in vain.

        Where CUDA can run, tensors in host memory are no reason to refuse: the option is about those on a GPU.
        """
        shared_pool().begin(self._budget_nbytes(device_memory_budget))
        reason = self._unavailable_reason() if self.option == "cuda" else None
        if reason is not None:
            raise _impossible(reason)

    def check_codec(self, chooser: CodecChooser) -> None:
        """Make sure, before anything is written, that the codec can run here."""
        if not needs_gpu(chooser):
            return
        reason = "engine='cpu' was asked for" if self.option == "cpu" else cuda_unavailable_reason()
        if reason is not None:
            raise CodecUnavailableError(
                f"codec='ans' can't run here: {reason}. It is nvCOMP's and needs an NVIDIA GPU and the extra "
                "dcp-nvcomp[cu12] or dcp-nvcomp[cu13]. Use codec='auto', which every machine can write and read."
            )

    def _budget_nbytes(self, device_memory_budget: int | None) -> int:
        return shared_pool().default_budget_nbytes() if device_memory_budget is None else device_memory_budget

    def policy(self, device_memory_budget: int | None, *, check_encodes: bool = True) -> EnginePolicy:
        """Return what a save or load asks of each of a device's engines."""
        share_nbytes = max(1, self._budget_nbytes(device_memory_budget) // ENGINES_PER_DEVICE)
        return EnginePolicy(share_nbytes, check_encodes=check_encodes, may_fall_back=self.option != "cuda")

    def may_use_cuda(self) -> bool:
        """Return True if there can be tensors for the CUDA engine. Imports nothing: perhaps there are none."""
        return self.option != "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

    def on_cuda(self, device: torch.device) -> bool:
        """Return True if the CUDA engine handles the tensors of this device."""
        if self.option == "cpu" or not _is_cuda(device):
            return False
        reason = self._unavailable_reason()
        if reason is None:
            health = shared_pool().tested(device)
            if health.unusable is None:
                return True
            if self.option == "cuda":
                raise _impossible(health.unusable)
            health.fell_back(health.unusable)
            return False
        if self.option == "cuda":
            raise _impossible(reason)
        if not self._warned:
            self._warned = True
            message = f"GPU tensors are handled by the slower CPU engine: {reason}. engine='cpu' silences this."
            warn(message, stacklevel=2)
        return False

    def serves(self, device: torch.device, chain: CodecChain, direction: str) -> bool:
        """Return True if the CUDA engine codes blocks of a chain on a device that it handles."""
        if not is_ever_served(chain, direction):
            return False
        health = shared_pool().tested(device)
        refusal = refusal_of(health, chain, direction)
        if refusal is None:
            return True
        if self.option == "cuda":
            raise _impossible(refusal)
        health.left_out(chain, refusal)
        return False


def has_cuda_engine(engine: str) -> bool:
    """Return True if this process has used CUDA, and tensors on its GPUs are for the CUDA engine."""
    choice = EngineChoice(engine)
    return choice.may_use_cuda() and choice._unavailable_reason() is None


def warm_up(engine: str = "auto") -> None:
    """Make the CUDA engine of the current GPU and test it now, for which the first save or load would wait.

    Where its kernels were never compiled this takes seconds; an engine that is there takes no time. A process that has
    not used CUDA has none to make, nor one whose GPU the engine can't use. Do not call it while a CUDA graph is
    captured. A `CheckpointManager` calls it when it is made.

    Args:
        engine: of the saves to come; `"cpu"` makes none.

    Examples:
        >>> import dcp_nvcomp
        >>> dcp_nvcomp.tools.warm_up()
    """
    check_choice("engine", engine, Engine)
    if has_cuda_engine(engine):
        shared_pool().tested(current_device())


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _impossible(reason: str) -> CodecUnavailableError:
    return CodecUnavailableError(f"engine='cuda' can't run here: {reason}. Use engine='auto' or 'cpu'.")

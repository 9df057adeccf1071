"""The generators of random numbers of one rank, as values that are stored and loaded without executing anything."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

_SEED_NBYTES: Final = 8


def capture_generators(own: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Return the states of this process's generators: of Python, NumPy and torch, and of the current CUDA device."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "own": {name: generator.get_state() for name, generator in own.items()},
    }
    if _uses_cuda():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_generators(state: Mapping[str, Any], own: Mapping[str, torch.Generator]) -> None:
    """Set this process's generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for name, generator in own.items():
        if name in state["own"]:
            generator.set_state(state["own"][name])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_generators(state: Mapping[str, Any], rank: int, own: Mapping[str, torch.Generator]) -> None:
    """Seed the generators of a rank that was not there when the state was saved: differently from all other ranks'."""

    def seed(name: str) -> int:
        digest = hashlib.sha256(f"{name} {rank} ".encode() + state["torch"].numpy().tobytes()).digest()
        return int.from_bytes(digest[:_SEED_NBYTES], "little") >> 1

    random.seed(seed("python"))
    np.random.seed(seed("numpy") % (1 << 32))
    torch.default_generator.manual_seed(seed("torch"))
    for name, generator in own.items():
        generator.manual_seed(seed(f"own {name}"))
    if _uses_cuda():
        torch.cuda.manual_seed(seed("cuda"))


def _uses_cuda() -> bool:
    # not before the training has: it would take a context of hundreds of MB
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

"""States on which `auto` can choose badly, and the codecs it chooses from, each for all tensors.

Real floats and what differs from them: parts that repeat, exactly or nearly, near each other or far apart, zeros,
constants, sparse gradients, rounded floats, few values, integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.states import State, component, load_state
from dcp_nvcomp.codecs import Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.base import Coder, ElementType

__all__ = ["FIXED_CODECS", "Fixed", "auto_states"]

U8 = npt.NDArray[np.uint8]

_EXPONENT = ("exponent",)
_ALL_PLANES = ("low", "rest", "exponent")


@dataclass(frozen=True)
class Fixed:
    """A chooser: the same codecs for every tensor.

    Attributes:
        coder: None to store everything.
        coded: the planes of floats that are coded; None to leave floats whole.
    """

    coder: Coder | None
    coded: tuple[str, ...] | None = None

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        width = element.float_nbytes
        if self.coded is None or not width:
            return CodecChain(Bytes(), self.coder)
        return CodecChain(
            Planes(width, tuple(name for name in Planes(width).plane_names if name in self.coded)), self.coder
        )


FIXED_CODECS: Mapping[str, Fixed] = {
    "stored": Fixed(None),
    "literals": Fixed(Zstd(literals_only=True)),
    "zstd": Fixed(Zstd(level=3)),
    "planes, exponents as literals": Fixed(Zstd(literals_only=True), _EXPONENT),
    "planes, all as literals": Fixed(Zstd(literals_only=True), _ALL_PLANES),
    "planes, exponents matched": Fixed(Zstd(level=1), _EXPONENT),
    "planes, all matched": Fixed(Zstd(level=1), _ALL_PLANES),
}


def auto_states(nbytes: int, tensor_nbytes: int = 4 << 20) -> dict[str, State]:
    """Return the states by name.

    Args:
        nbytes: about the size of each.
        tensor_nbytes: about the size of each of its tensors.
    """
    made = _Maker(max(1, nbytes // tensor_nbytes), tensor_nbytes)
    kinds: dict[str, Callable[[int], torch.Tensor]] = {
        "bf16 weights": lambda seed: made.real("model", seed),
        "fp32 moments": lambda seed: made.real("exp_avg", seed),
        "fp32 squared moments": lambda seed: made.real("exp_avg_sq", seed),
        "bf16, repeated in reach": lambda seed: made.repeated(seed, 48 << 10),
        "bf16, repeated out of reach": lambda seed: made.repeated(seed, 1 << 20),
        "bf16, nearly repeated in reach": lambda seed: made.repeated(seed, 48 << 10, noise=1e-3),
        "bf16, nearly repeated out of reach": lambda seed: made.repeated(seed, 1 << 20, noise=1e-3),
        "equal rows": lambda seed: made.real("exp_avg", seed)[:1000].repeat(made.elements(4) // 1000),
        "zeros": lambda seed: torch.zeros(made.elements(4)),
        "constants": lambda seed: torch.full((made.elements(4),), 0.1 * (seed + 1)),
        "sparse gradients": made.sparse_rows,
        "pruned weights": made.pruned,
        "bf16 values in fp32": lambda seed: made.real("model", seed).float(),
        "few values": lambda seed: made.random(seed, 16, 4)[1][made.random(seed, 16, 4)[0]],
        "token ids": lambda seed: made.random(seed, 50_000, 8)[0],
        "positions": lambda seed: torch.arange(made.elements(8)),
        "int8 weights": lambda seed: (made.normal(seed, 1) * 20).round().clamp(-127, 127).to(torch.int8),
        "masks": lambda seed: made.normal(seed, 1) > 1.0,
        "noise": lambda seed: made.random(seed, 2**31, 4)[0].to(torch.int32),
    }
    return {kind: {f"layers.{i}": make(i) for i in range(made.count)} for kind, make in kinds.items()}


class _Maker:
    def __init__(self, count: int, tensor_nbytes: int) -> None:
        self.count = count
        self._nbytes = tensor_nbytes
        self._real: dict[str, torch.Tensor] = {}
        for name, tensor in load_state().items():
            kind, flat = component(name), tensor.reshape(-1)
            self._real[kind] = torch.cat([self._real[kind], flat]) if kind in self._real else flat

    def elements(self, width: int) -> int:
        return self._nbytes // width

    def real(self, kind: str, seed: int) -> torch.Tensor:
        """Real values in another order each time: nothing repeats."""
        flat = self._real[kind]
        count = self.elements(flat.element_size())
        picked = torch.randint(0, flat.numel(), (count,), generator=torch.Generator().manual_seed(seed))
        found = flat[picked]
        if flat.element_size() == 4:  # or whole floats would repeat
            halves = found.view(torch.int16).view(-1, 2)
            halves[:, 0] = torch.randint(
                -(1 << 15), 1 << 15, (count,), generator=torch.Generator().manual_seed(seed + 1)
            )
        return found

    def repeated(self, seed: int, period_nbytes: int, noise: float = 0.0) -> torch.Tensor:
        """Copies of a part, as experts that were made from one dense layer are."""
        count = self.elements(2)
        part = self.real("model", seed)[: min(period_nbytes // 2, count)]
        whole = part.repeat(-(-count // part.numel()))[:count]
        if not noise:
            return whole
        return (whole.float() * (1 + noise * self.normal(seed, 2))).bfloat16()

    def sparse_rows(self, seed: int) -> torch.Tensor:
        """The gradient of an embedding: a few rows are not zero."""
        rows = self.elements(2) // 256
        gradient = self.real("grad", seed)[: rows * 256].view(rows, 256)
        gradient[torch.rand(rows, generator=torch.Generator().manual_seed(seed)) > 0.05] = 0
        return gradient

    def pruned(self, seed: int) -> torch.Tensor:
        weights = self.real("model", seed)
        weights[torch.rand(weights.numel(), generator=torch.Generator().manual_seed(seed)) < 0.5] = 0
        return weights

    def normal(self, seed: int, width: int) -> torch.Tensor:
        return torch.randn(self.elements(width), generator=torch.Generator().manual_seed(seed))

    def random(self, seed: int, values: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random numbers below `values`, and as many random floats."""
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(0, values, (self.elements(width),), generator=generator)
        return numbers, torch.randn(min(values, 1 << 16), generator=generator)

"""Tensors that code like training state, of any size, without a file of real ones.

Weights and gradients in bfloat16 and both moments of Adam in float32, in the proportions of a real state. The scales of
rows and columns vary so that exponents are as skewed as those of benchmarks/states.py: each kind is compressed as much
as the real one, within a hundredth (tests/choosing compares them).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

State = dict[str, torch.Tensor]

_ROWS = 1024
_COLUMNS = 1024


def sample_state(nbytes: int, *, unique_nbytes: int = 24 << 20, device: str = "cpu") -> State:
    """Return a state of about this size."""
    generator = torch.Generator().manual_seed(0)
    layer_nbytes = 2 * _ROWS * _COLUMNS * 2 + 2 * _ROWS * _COLUMNS * 4
    layers = max(1, round(nbytes / layer_nbytes))
    unique = max(1, min(layers, unique_nbytes // layer_nbytes))
    made = [{kind: make(generator).to(device) for kind, make in _KINDS.items()} for _ in range(unique)]
    return {
        f"{kind}.layers.{layer}.weight": tensor if layer < unique else tensor.clone()
        for layer in range(layers)
        for kind, tensor in made[layer % unique].items()
    }


def _scales(generator: torch.Generator, rows: float, columns: float = 0.0) -> torch.Tensor:
    """Return positive factors for a matrix; the arguments are the deviations of their logarithms."""
    by_row = torch.randn(_ROWS, 1, generator=generator) * rows
    by_column = torch.randn(1, _COLUMNS, generator=generator) * columns
    return torch.exp(by_row + by_column)


def _normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(_ROWS, _COLUMNS, generator=generator)


_KINDS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "model": lambda g: (_normal(g) * _scales(g, 0.2) * 2e-2).bfloat16(),
    "grad": lambda g: (_normal(g) * _scales(g, 0.6) * 1e-4).bfloat16(),
    "exp_avg": lambda g: _normal(g) * _scales(g, 0.5) * 1e-5,
    "exp_avg_sq": lambda g: torch.exp(_normal(g) * 0.5) * _scales(g, 0.7, 0.4) * 1e-10,
}

"""States and blocks with bits like those of a training run, made where they are needed: no file is read.

Weights of a layer have a scale that differs from row to row; gradients are smaller and their scales more spread;
Adam's first moment is an average of gradients, the second one of their squares, never negative.
"""

from __future__ import annotations

import torch

__all__ = ["State", "exponents", "made_state", "moments", "weights"]

State = dict[str, torch.Tensor]

_COLUMNS = 4096


def _values(rows: int, device: torch.device, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(rows, _COLUMNS, generator=generator, device=device)
    scales = torch.randn(rows, 1, generator=generator, device=device) * spread
    return values.mul_(scales.exp_() / 50)


def made_state(nbytes: int, device: torch.device, *, tensor_nbytes: int = 128 << 20) -> State:
    """Return about so many bytes of state; a sixth each are bf16 weights and gradients, a third each fp32 moments.

    Args:
        nbytes: how much.
        device: where.
        tensor_nbytes: how large the moments of a layer are, about.
    """
    layers = max(1, round(nbytes / (3 * tensor_nbytes)))
    rows = max(1, nbytes // layers // 12 // _COLUMNS)
    state: State = {}
    for layer in range(layers):
        state[f"model.{layer}"] = _values(rows, device, 4 * layer, 0.5).bfloat16()
        state[f"grad.{layer}"] = _values(rows, device, 4 * layer + 1, 1.0).mul_(1e-3).bfloat16()
        state[f"exp_avg.{layer}"] = _values(rows, device, 4 * layer + 2, 1.0).mul_(1e-4)
        state[f"exp_avg_sq.{layer}"] = _values(rows, device, 4 * layer + 3, 1.0).mul_(1e-4).square_()
    return state


def weights(nbytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return so many bytes of bf16 weights, as bytes."""
    rows = -(-nbytes // (2 * _COLUMNS))
    return _values(rows, device, seed, 0.5).bfloat16().view(torch.uint8).reshape(-1)[:nbytes]


def moments(nbytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return so many bytes of Adam's first moments in fp32, as bytes."""
    rows = -(-nbytes // (4 * _COLUMNS))
    return _values(rows, device, seed, 1.0).mul_(1e-4).view(torch.uint8).reshape(-1)[:nbytes]


def exponents(nbytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return so many bytes of the exponent plane of bf16 weights."""
    bits = weights(2 * nbytes, device, seed).view(torch.int16)
    return ((bits >> 7) & 0xFF).to(torch.uint8)

"""States of small models that were trained here, for a minute each: AdamW on the CPU, in fp32 or mixed precision.

Each learns something: a language model the bytes of Python's reference, an image model which of ten patterns was
shifted and covered with noise, a network of layers what another one, fixed and random, computes. What their optimizer
keeps has the scales of neurons and of their inputs, as that of large models has, and random numbers have not.
"""

from __future__ import annotations

import copy
import pydoc_data.topics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measuring import Settings
from benchmarks.states import State

__all__ = ["MODELS", "trained", "trained_states"]

Batches = Iterator[tuple[Tensor, Tensor]]
_WIDTH = 384
_TEXT = Path(pydoc_data.topics.__file__)


class _Attention(nn.Module):
    """A transformer's encoder, over tokens or patches."""

    def __init__(self, embedding: nn.Module, tokens: int, outputs: int, *, causal: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.position = nn.Parameter(0.02 * torch.randn(tokens, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 6, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, outputs)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.position)) if self.causal else None
        hidden = self.blocks(hidden, mask=mask, is_causal=self.causal)
        return self.head(hidden if self.causal else hidden.mean(1)).flatten(0, -2)


def _language(random: torch.Generator) -> tuple[nn.Module, Batches]:
    text = torch.frombuffer(bytearray(_TEXT.read_bytes()), dtype=torch.uint8)

    def batches() -> Batches:
        while True:
            starts = torch.randint(len(text) - 33, (16,), generator=random).tolist()
            rows = torch.stack([text[at : at + 33] for at in starts]).long()
            yield rows[:, :-1], rows[:, 1:].flatten()

    return _Attention(nn.Embedding(256, _WIDTH), 32, 256, causal=True), batches()


def _images(random: torch.Generator) -> tuple[nn.Module, Batches]:
    patterns = torch.randn(10, 3, 32, 32, generator=random)

    def batches() -> Batches:
        while True:
            which = torch.randint(10, (16,), generator=random)
            shifts = torch.randint(32, (2,), generator=random).tolist()
            yield patterns[which].roll(shifts, (2, 3)) + 2 * torch.randn(16, 3, 32, 32, generator=random), which

    embedding = nn.Sequential(nn.Conv2d(3, _WIDTH, 8, 8), nn.Flatten(2), _Transposed())
    return _Attention(embedding, 16, 10, causal=False), batches()


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _layers(random: torch.Generator) -> tuple[nn.Module, Batches]:
    teacher = [torch.randn(512, 64, generator=random) / 23, torch.randn(64, 16, generator=random) / 8]
    scales = torch.randn(512, generator=random).exp()  # of inputs, as those of measurements differ

    def batches() -> Batches:
        while True:
            x = torch.randn(64, 512, generator=random) * scales
            yield x, ((x @ teacher[0]).tanh() @ teacher[1]).argmax(1)

    sizes = (512, 1024, 1024, 512)
    inner = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(sizes[-1], 16)), batches()


MODELS: dict[str, Callable[[torch.Generator], tuple[nn.Module, Batches]]] = {
    "GPT on text": _language,
    "ViT on patterns": _images,
    "layers after a teacher": _layers,
}


def trained_states(settings: Settings, *, mixed: bool = False) -> dict[str, State]:
    """Return what all `MODELS` come to, two seeds each, by their names: tensors by kind and name of the parameter."""
    steps = 3 if settings.quick else 150
    states: dict[str, State] = {}
    for model in MODELS:
        for seed in (1,) if settings.quick else (1, 2):
            settings.say(f"{model}, seed {seed}: {steps} steps")
            found = trained(model, seed, steps, mixed=mixed)
            states[f"{model}, {seed}"] = {
                f"{kind}.{name}": tensor for kind, tensors in found.items() for name, tensor in tensors.items()
            }
    return states


def trained(model: str, seed: int, steps: int, *, mixed: bool = False) -> dict[str, dict[str, Tensor]]:
    """Train one of `MODELS`.

    Args:
        model: its name.
        seed: of its parameters and its data.
        steps: of the optimizer.
        mixed: train in mixed precision: activations and gradients in bfloat16, with weights that are rounded from
            float32 ones, which the optimizer changes.

    Returns:
        Its weights and both of Adam's moments by the name of their parameter: `w`, `m` and `v`; if it is mixed, `w` are
        those in bfloat16, and `master` those in float32.
    """
    torch.manual_seed(seed)
    network, batches = MODELS[model](torch.Generator().manual_seed(seed))
    betas = (0.9, 0.95) if model.startswith("GPT") else (0.9, 0.999)  # as such models are usually trained
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=betas, weight_decay=0.1)
    used = copy.deepcopy(network).bfloat16() if mixed else network
    for _ in range(steps):
        x, y = next(batches)
        loss = functional.cross_entropy(used(x.bfloat16() if mixed and x.is_floating_point() else x).float(), y)
        used.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if mixed:
            for parameter, rounded in zip(network.parameters(), used.parameters(), strict=True):
                assert rounded.grad is not None
                parameter.grad = rounded.grad.float()
        optimizer.step()
        if mixed:
            with torch.no_grad():
                for parameter, rounded in zip(network.parameters(), used.parameters(), strict=True):
                    rounded.copy_(parameter)
    weights = "master" if mixed else "w"
    state: dict[str, dict[str, Tensor]] = {weights: {}, "m": {}, "v": {}}
    for name, parameter in network.named_parameters():
        state[weights][name] = parameter.detach().clone()
        state["m"][name] = optimizer.state[parameter]["exp_avg"].clone()
        state["v"][name] = optimizer.state[parameter]["exp_avg_sq"].clone()
    if mixed:
        state["w"] = {name: rounded.detach().clone() for name, rounded in used.named_parameters()}
    return state

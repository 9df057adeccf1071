"""A small byte-level GPT, and the text it learns: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CONTEXT = 128
VOCABULARY = 256  # one token a byte


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.head_count, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class TinyGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, width: int = 256, depth: int = 4, head_count: int = 4) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, head_count) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def load_corpus(limit_nbytes: int = 8 << 20) -> torch.Tensor:
    """The top-level modules of the standard library, one after the other, as a tensor of bytes."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py")))
    return torch.frombuffer(bytearray(text[:limit_nbytes]), dtype=torch.uint8)


def draw_batch(
    corpus: torch.Tensor, generator: torch.Generator, global_batch: int, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the next global batch, as inputs and targets.

    Every rank draws the whole batch from the same generator and takes its own rows, so a job that goes on with
    another number of ranks sees the same data.
    """
    starts = torch.randint(len(corpus) - CONTEXT - 1, (global_batch,), generator=generator)[rank::world_size]
    rows = corpus[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]

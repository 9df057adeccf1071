"""State to measure with: real bits, in any amount.

tests/data/gpt_block.safetensors holds parts of one transformer block of a real training run, 3 MB. A larger state is
made of permuted copies of it, several of them stacked in each tensor as rows.

The copies are permuted because a match finder whose window reaches back to the previous copy would find everything
there, and zstd's window (2 MiB at level 3, more above) is larger than most tensors of the block. Each copy therefore
has its own order of rows and columns, like a network with renumbered neurons: a row keeps its scale, and two elements
that are adjacent in one copy are adjacent in another only by chance. zstd -9 still matches a single fp32 and the next
exponent, so the low halves of fp32 elements, which are noise, are permuted too: each copy pairs them with different
high halves. The distribution of every byte is unchanged. Vectors (norms) occur only once: their few values would repeat
in any order. tests/benchmarks checks that no coder packs copies better than the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = [
    "COMPONENTS",
    "DEFAULT_STATE",
    "State",
    "assert_same",
    "build_state",
    "component",
    "destination",
    "load_state",
    "nbytes_of",
    "small_tensors",
]

State = dict[str, torch.Tensor]

DEFAULT_STATE = Path(__file__).parents[1] / "tests" / "data" / "gpt_block.safetensors"
COMPONENTS = {
    "model": "bf16 weights",
    "grad": "bf16 gradients",
    "exp_avg": "fp32 first moments",
    "exp_avg_sq": "fp32 second moments",
}
TENSOR_NBYTES = 16 << 20


def component(name: str) -> str:
    """Which of `COMPONENTS` a tensor is of."""
    return name.partition(".")[0]


def load_state(path: Path | None = None) -> State:
    """The real state, as it is: weights, gradients and both moments. Other components of the file are left out."""
    from safetensors.torch import load_file  # which a GPU host may lack

    tensors = load_file(path or DEFAULT_STATE)
    return {name: tensor for name, tensor in sorted(tensors.items()) if component(name) in COMPONENTS}


def nbytes_of(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def build_state(
    nbytes: int,
    path: Path | None = None,
    *,
    tensor_nbytes: int = TENSOR_NBYTES,
    device: torch.device | str = "cpu",
) -> State:
    """Permuted copies of the real state, see above.

    Args:
        nbytes: about how much; whole copies.
        path: a safetensors file with the components' names; None means the one in tests/data.
        tensor_nbytes: about how large the largest tensors get.
        device: where.
    """
    real = {name: tensor.to(device) for name, tensor in load_state(path).items()}
    vectors = {name: tensor for name, tensor in real.items() if tensor.dim() < 2}
    matrices = {name: tensor for name, tensor in real.items() if tensor.dim() == 2}
    copies = max(1, round((nbytes - nbytes_of(vectors)) / nbytes_of(matrices)))
    stacked = max(1, tensor_nbytes // max(tensor.nbytes for tensor in matrices.values()))
    state = {_named(name, 0): tensor for name, tensor in vectors.items()}
    with _one_thread():
        for layer, first in enumerate(range(0, copies, stacked)):
            members = range(first, min(first + stacked, copies))
            for name, tensor in matrices.items():
                state[_named(name, layer)] = torch.cat([_permuted(tensor, name, copy) for copy in members])
    return dict(sorted(state.items()))


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other, at every one of many small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _named(name: str, layer: int) -> str:
    kind, _, parameter = name.partition(".")
    return f"{kind}.layers.{layer}.{parameter}"


def _permuted(tensor: torch.Tensor, name: str, copy: int) -> torch.Tensor:
    """The matrix with rows and columns in the order of this copy, the same for all components of a parameter."""
    seed = sum(map(ord, name.partition(".")[2])) * 100_003 + copy
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(size, generator=generator).to(tensor.device) for size in tensor.shape)
    matrix = tensor.index_select(0, rows).index_select(1, columns)
    if matrix.dtype == torch.float32:
        halves = matrix.view(torch.int16).view(-1, 2)
        shift = int(torch.randint(1, len(halves), (1,), generator=generator))
        halves[:, 0] = halves[:, 0].roll(shift)  # little-endian: the low half comes first
    return matrix


def small_tensors(count: int, path: Path | None = None, *, elements: int = 256) -> State:
    """Many small fp32 tensors (1 KB each by default), all of real first moments."""
    flat = _first_moments(count * elements, path)
    return {f"layers.{i}.norm.weight": flat[i * elements : (i + 1) * elements].clone() for i in range(count)}


def squares(nbytes: int, tensor_nbytes: int, path: Path | None = None) -> State:
    """Square fp32 matrices of real first moments, `tensor_nbytes` each."""
    count, elements = max(1, nbytes // tensor_nbytes), tensor_nbytes // 4
    side = math.isqrt(elements)
    flat = _first_moments(count * elements, path)
    return {
        f"layers.{i}.weight": flat[i * elements : (i + 1) * elements].view(side, side).clone() for i in range(count)
    }


def _first_moments(elements: int, path: Path | None) -> torch.Tensor:
    needed = 3 * elements * 4 + (4 << 20)  # a third of each copy and more
    moments = [t.reshape(-1) for name, t in build_state(needed, path).items() if component(name) == "exp_avg"]
    return torch.cat(moments)[:elements]


def destination(state: Mapping[str, torch.Tensor]) -> State:
    """Tensors to load into. Every page was written to, so that a load does not pay for their first touch."""
    return {name: torch.empty_like(tensor).fill_(0) for name, tensor in state.items()}


def assert_same(loaded: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], who: str) -> None:
    """A benchmark of wrong results is worth nothing: all must be bit-identical."""
    for name, tensor in saved.items():
        same = torch.equal(loaded[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert same, f"{who} did not load what was saved: {name}"

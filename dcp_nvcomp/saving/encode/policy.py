"""The codec chain of each record: the user's choice, measured on a sample, and what can run where the elements are."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import Auto, CodecChooser, sample_nbytes
from dcp_nvcomp.codecs.dtypes import ElementType
from dcp_nvcomp.codecs.registry import check_chain
from dcp_nvcomp.engines.cuda.coders import stamped_chain
from dcp_nvcomp.engines.tensors import host_array

U8 = npt.NDArray[np.uint8]


class CodecPolicy:
    """Picks codec chains."""

    def __init__(self, chooser: CodecChooser) -> None:
        self._chooser = chooser
        self._auto = Auto()
        self._checked: set[tuple[str, str]] = set()

    def chain(self, element: ElementType, sample: U8, nbytes: int, *, on_cuda: bool) -> CodecChain:
        """Return the chain for a record."""
        chain = self._chooser.choose(element, sample, nbytes)
        described = repr(chain), element.name
        if described not in self._checked:  # before anything depends on it
            check_chain(chain, element)
            self._checked.add(described)
        if on_cuda:
            return stamped_chain(chain)
        return self._auto.choose(element, sample, nbytes) if chain.needs_gpu else chain

    @property
    def is_auto(self) -> bool:
        """True if `auto` chooses for every tensor."""
        return isinstance(self._chooser, Auto)

    def tensor_chain(self, element: ElementType, tensor: torch.Tensor, *, on_cuda: bool) -> CodecChain:
        """Return the chain for a tensor without lazy bits, measured on a sample of it."""
        nbytes = tensor.numel() * tensor.element_size()
        sample = spread_sample(tensor, sample_nbytes(nbytes)) if nbytes else np.zeros(0, np.uint8)
        return self.chain(element, sample, nbytes, on_cuda=on_cuda)


def spread_sample(tensor: torch.Tensor, nbytes: int, pieces: int = 4) -> U8:
    """Return bytes from several places of a tensor, to measure codecs on."""
    width = tensor.element_size()
    if tensor.numel() * width <= nbytes:
        parts = [tensor.reshape(-1)]
    elif tensor.is_contiguous():
        flat, count = tensor.view(-1), nbytes // pieces // width
        step = (tensor.numel() - count) // max(pieces - 1, 1)
        parts = [flat[at * step : at * step + count] for at in range(pieces)]
    else:
        # boxes of a strided tensor, so that no full-size copy is ever made
        places = sorted({tensor.shape[0] * at // pieces for at in range(pieces)})
        parts = [_leading(tensor[at:], nbytes // pieces // width) for at in places]
    return np.concatenate([host_array(part.cpu().contiguous()).view(np.uint8) for part in parts])


def _leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return at most `count` elements, and at least one, from the start of a strided tensor, as a run."""
    for dim in range(tensor.dim()):
        inner = math.prod(tensor.shape[dim + 1 :])
        tensor = tensor.narrow(dim, 0, max(1, min(tensor.shape[dim], count // inner)))
    return tensor.reshape(-1)

"""The codec chain of each record: the user's choice, and what can run where the elements are, by `CodecPolicy`.

`auto` chooses when a record is encoded, and is remembered from save to save: a record that looks as it did gets the
chain that it had, unless its ratio has drifted, and dense floats that of others of their tensor, as layers differ in
their numbers only: planes, or predicted ones. Of anything else slices are coded by every chain that could win. Whether
rows and columns predict floats shows neither in a look nor in a size, and Adam's second moment comes to be predictable
only as it averages more steps: so one of each such tensor is judged again in every 16th save.

For a tensor on a device, `device_chain` chooses when it is fed: a look costs a copy to the host, which waits for the
device. So what an earlier save chose for dense floats is used without one, but in every 16th save (mantissas that are
rounded don't change the size), and forgotten if its size surprises. Nothing is predicted there, as no kernel does that,
so devices and the host remember apart.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.codecs.base import CodecChain, ElementType, ScratchArrays
from dcp_nvcomp.codecs.choose import (
    STORED,
    TINY_NBYTES,
    Auto,
    CodecChooser,
    Judge,
    columns_of,
    judged_nbytes,
    literal_exponents,
    predicted_exponents,
    sample_nbytes,
)
from dcp_nvcomp.codecs.registry import check_chain
from dcp_nvcomp.codecs.transforms.derived import is_rounded
from dcp_nvcomp.engines.cuda.coders import stamped_chain
from dcp_nvcomp.engines.tensors import HostArray, host_array, host_copy
from dcp_nvcomp.format.block_grid import BlockGrid
from dcp_nvcomp.format.record import Record
from dcp_nvcomp.saving.encode.remembered import ChoiceKey, ChoiceMemory, choice_key
from dcp_nvcomp.saving.encode.sources import ChainChoice, Workbench, block_bytes

U8 = npt.NDArray[np.uint8]

_LOOKED_AT = 2048  # elements: what is worth a microsecond for each 20 KB
_PIECES = 64
_JUDGED_SLICES = 4
# Where a glance goes, from 0 to 1: anywhere, as rows or columns of zeros would escape a regular pattern.
_GLANCED_AT = np.sort(np.random.default_rng(0).random(512))
_MOST_ALIKE = 24  # of these: as many as a look takes for dense, 3 %, and chance
_PLANE_OF_BYTE = np.arange(8, dtype=np.uint16) << 8


class _Place(NamedTuple):
    """A record's elements in host memory, and its blocks."""

    array: HostArray
    grid: BlockGrid


class AutoChoice(ChainChoice):
    def __init__(
        self, record: Record, array: HostArray, grid: BlockGrid, remembered: ChoiceMemory | None = None
    ) -> None:
        super().__init__(None if array.nbytes >= TINY_NBYTES else STORED)
        self._key, self._element = choice_key(record.fqn, record.element, record.shape, record.offsets), record.element
        self._place: _Place | None = _Place(array, grid)
        self._remembered = remembered
        self._lock = threading.Lock()
        self._is_trusted = False

    def settle(self, bench: Workbench) -> CodecChain:
        if self._chain is None:
            with self._lock:
                if self._chain is None:
                    assert self._place is not None
                    self._chain = self._found(self._place, bench)
        if not self._is_trusted:
            self._place = None  # the tensor may be freed before its blocks are written
        return self._chain

    def confirm(self, ratio: float, bench: Workbench) -> CodecChain:
        if self._is_trusted:
            assert self._place is not None and self._remembered is not None
            # a glance only now: the tensor has just come into the cache, and each place would have to be waited for
            is_as_before = self._remembered.expects(self._key, ratio)
            if not is_as_before or not _seems_random(self._place.array, self._element):
                self._chain = self._chosen(self._place, self._remembered, bench)
            self._is_trusted, self._place = False, None
        return self.chain

    def achieved(self, ratio: float) -> None:
        if self._remembered is not None:
            self._remembered.achieved(self._key, ratio)

    def _found(self, place: _Place, bench: Workbench) -> CodecChain:
        remembered = self._remembered
        if remembered is None:
            return self._judged(place, bench)
        if predicted_exponents(self._element, columns_of(place.grid.block_shape)) is not None:
            remembered.age(self._key)
        may_trust = place.grid.block_count == 1 and place.array.flags.c_contiguous
        trusted = remembered.trust(self._key) if may_trust else None
        if trusted is None:
            return self._chosen(place, remembered, bench)
        self._is_trusted = True
        return trusted

    def _chosen(self, place: _Place, remembered: ChoiceMemory, bench: Workbench) -> CodecChain:
        element = self._element
        look = bench.judge.look(element, _sample(place, element, bench.scratch))
        chain = remembered.recall(self._key, look)
        if chain is not None:
            return chain
        remembered.forget(self._key)
        kin = remembered.of_dense_kin(self._key) if look.is_dense else None
        is_alike = kin is not None and not _repeats(place, element, bench.scratch)
        chain = kin if is_alike and kin is not None else self._judged(place, bench)
        remembered.keep(self._key, element, look, chain)
        return chain

    def _judged(self, place: _Place, bench: Workbench) -> CodecChain:
        element, columns = self._element, columns_of(place.grid.block_shape)
        return bench.judge.judge(element, _slices(place, element, bench.scratch, columns), columns)


class KeptChain(ChainChoice):
    """A chain that the next save recalls, as long as its records come to the same size."""

    def __init__(self, chain: CodecChain, key: ChoiceKey, remembered: ChoiceMemory) -> None:
        self._chain, self._key, self._remembered = chain, key, remembered

    def achieved(self, ratio: float) -> None:
        self._remembered.achieved(self._key, ratio)


def device_chain(
    key: ChoiceKey, element: ElementType, tensor: torch.Tensor, remembered: ChoiceMemory, judge: Judge
) -> CodecChain:
    """Return what `auto` chooses for a tensor on a device, without lazy bits."""
    nbytes = tensor.nbytes
    if nbytes < TINY_NBYTES:
        return STORED
    chain = remembered.trust_unseen(key)
    if chain is None:
        look = judge.look(element, _device_sample(tensor))
        chain = remembered.recall(key, look)
        if chain is None:
            remembered.forget(key)
            is_alike = look.is_dense and remembered.of_dense_kin(key) is not None
            sample = None if is_alike else spread_sample(tensor, sample_nbytes(nbytes))
            chain = literal_exponents(element) if sample is None else Auto().choose(element, sample, nbytes)
            remembered.keep(key, element, look, chain)
    return chain


def _device_sample(tensor: torch.Tensor) -> U8:
    """Return some elements from all over a tensor, by one copy to the host."""
    if not tensor.is_contiguous():
        return spread_sample(tensor, _LOOKED_AT * tensor.element_size())
    flat, wanted = tensor.view(-1), _LOOKED_AT // _PIECES
    step = flat.numel() // _PIECES
    some = flat[:_LOOKED_AT] if step <= wanted else flat[: _PIECES * step].view(_PIECES, step)[:, :wanted]
    return host_array(host_copy(some)).reshape(-1).view(np.uint8)


def _sample(place: _Place, element: ElementType, scratch: ScratchArrays) -> U8:
    """Return some elements from all over a record, or from the block in its middle if that is not contiguous."""
    array, grid = place
    data = (
        array.reshape(-1).view(np.uint8) if array.flags.c_contiguous else _block(place, grid.block_count // 2, scratch)
    )
    step = data.size // _PIECES // element.nbytes * element.nbytes
    wanted = _LOOKED_AT // _PIECES * element.nbytes
    if step <= wanted:
        return data[: _LOOKED_AT * element.nbytes]
    return np.ascontiguousarray(data[: _PIECES * step].reshape(_PIECES, step)[:, :wanted]).reshape(-1)


def is_derived(record: Record, array: HostArray, base: HostArray) -> bool:
    """Return True if a float32 tensor is worth storing as what `base`, a bfloat16 one, lacks: if a sample was rounded.

    Where lower halves are not random, a chain that packs them is the better one.
    """
    if record.element.name != "float32" or array.shape != base.shape or array.nbytes < TINY_NBYTES:
        return False
    if not array.flags.c_contiguous:  # a row will do
        array, base = (np.ascontiguousarray(one[(0,) * (one.ndim - 1)]) for one in (array, base))
    if not base.flags.c_contiguous or not _seems_random(array, record.element):
        return False
    step = max(1, array.size // _LOOKED_AT)
    some, rounded = (np.ascontiguousarray(one.reshape(-1)[::step]).view(np.uint8) for one in (array, base))
    return is_rounded(rounded, some)


def _seems_random(array: HostArray, element: ElementType) -> bool:
    """Return True if no byte stands out among those that are stored as they are, whose size would not tell."""
    width = element.float_nbytes
    floats = array.reshape(-1).view(np.uint8).view(f"u{width}")
    some = floats[_glance(floats.size)].view(np.uint8).reshape(-1, width)[:, : width - 1]
    counts = np.bincount((some + _PLANE_OF_BYTE[: width - 1]).reshape(-1), minlength=1)  # of each plane's bytes
    return int(counts.max()) <= _MOST_ALIKE


@lru_cache(maxsize=64)
def _glance(count: int) -> npt.NDArray[np.int64]:
    return (_GLANCED_AT * count).astype(np.int64)


def _slices(place: _Place, element: ElementType, scratch: ScratchArrays, columns: int) -> list[U8]:
    """Return some slices of a record, as they will be coded, of whole rows if they can be: all of a small record's."""
    count = place.grid.block_count
    blocks = count if count <= 2 else max(2, min(_JUDGED_SLICES, 1 + count // 4))
    step, row_nbytes = judged_nbytes(element), columns * element.nbytes
    if 0 < row_nbytes < step:
        step -= step % row_nbytes
    found: list[U8] = []
    for number in _spread(blocks, count):
        block = _block(place, number, scratch)
        found += [block[at : at + step] for at in range(0, block.size, step)]
    return [found[at] for at in _spread(min(_JUDGED_SLICES, len(found)), len(found))]


def _spread(number: int, count: int) -> list[int]:
    """Return `number` of `count` places, the first and the last among them."""
    return [place * (count - 1) // max(number - 1, 1) for place in range(number)]


def _block(place: _Place, number: int, scratch: ScratchArrays) -> U8:
    block = block_bytes(place.array, place.grid.box(number), scratch)
    return block if np.may_share_memory(block, place.array) else block.copy()


def _repeats(place: _Place, element: ElementType, scratch: ScratchArrays) -> bool:
    """Return True if a run of 8 bytes occurs again within a slice: no dense tensor has that by chance."""
    words = _block(place, 0, scratch)[: judged_nbytes(element)]
    words = words[: words.size // 8 * 8].view(np.uint64)
    # A third from the start, it finds repetitions that are up to two thirds of a slice apart. One that begins later in
    # the slice is missed, which costs size, and only if the tensor's kin are dense: worth half of the time.
    return int(np.count_nonzero(words == words[words.size // 3])) > 1


class CodecPolicy:
    def __init__(self, chooser: CodecChooser) -> None:
        self.is_auto = isinstance(chooser, Auto)
        self._chooser = chooser
        self._auto = Auto()
        self._checked: set[tuple[str, str]] = set()

    def chain(self, element: ElementType, sample: U8, nbytes: int, *, on_cuda: bool) -> CodecChain:
        chain = self._chooser.choose(element, sample, nbytes)
        described = repr(chain), element.name
        if described not in self._checked:  # before anything depends on it
            check_chain(chain, element)
            self._checked.add(described)
        if on_cuda:
            return stamped_chain(chain)
        return self._auto.choose(element, sample, nbytes) if chain.needs_gpu else chain

    def tensor_chain(self, element: ElementType, tensor: torch.Tensor, *, on_cuda: bool) -> CodecChain:
        nbytes = tensor.numel() * tensor.element_size()
        sample = spread_sample(tensor, sample_nbytes(nbytes)) if nbytes else np.zeros(0, np.uint8)
        return self.chain(element, sample, nbytes, on_cuda=on_cuda)


def spread_sample(tensor: torch.Tensor, nbytes: int, pieces: int = 4) -> U8:
    """Return bytes from several places of a tensor, to measure codecs on."""
    width = tensor.element_size()
    if tensor.numel() * width <= nbytes:
        parts = [tensor]
    elif tensor.is_contiguous():
        flat, count = tensor.view(-1), nbytes // pieces // width
        step = (tensor.numel() - count) // max(pieces - 1, 1)
        parts = [flat[at * step : at * step + count] for at in range(pieces)]
    else:
        # boxes of a strided tensor, so that no full-size copy is ever made
        places = sorted({tensor.shape[0] * at // pieces for at in range(pieces)})
        parts = [_leading(tensor[at:], nbytes // pieces // width) for at in places]
    return np.concatenate([host_array(host_copy(part)).reshape(-1).view(np.uint8) for part in parts])


def _leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return at most `count` elements, and at least one, from the start of a strided tensor."""
    for dim in range(tensor.dim()):
        inner = math.prod(tensor.shape[dim + 1 :])
        tensor = tensor.narrow(dim, 0, max(1, min(tensor.shape[dim], count // inner)))
    return tensor

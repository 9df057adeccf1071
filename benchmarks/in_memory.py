"""Coders alone, from tensors in memory to bytes in memory: this project's CPU engine, ZipNN, and plain zstd."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.states import State
from dcp_nvcomp.codecs import CodecChain
from dcp_nvcomp.codecs.base import BLOCK_NBYTES, EncodedBlock
from dcp_nvcomp.codecs.choose import parse_codec, sample_nbytes
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.tensors import element_type
from dcp_nvcomp.saving.encode.choices import spread_sample

__all__ = ["EngineCoder", "ZipNNCoder", "as_bytes", "have_zipnn", "zstd_nbytes"]

U8 = npt.NDArray[np.uint8]


def have_zipnn() -> bool:
    """True if ZipNN is installed: it is only a peer to compare with."""
    return importlib.util.find_spec("zipnn") is not None


def as_bytes(tensor: torch.Tensor) -> U8:
    """A contiguous tensor's bytes, not copied."""
    array: U8 = tensor.view(torch.uint8).numpy().reshape(-1)
    return array


def chain_for(tensor: torch.Tensor, codec: str = "auto") -> CodecChain:
    """The codec chain that a save would choose for this tensor."""
    element = element_type(tensor.dtype)
    assert element is not None
    return parse_codec(codec).choose(element, spread_sample(tensor, sample_nbytes(tensor.nbytes)), tensor.nbytes)


def blocks_of(data: U8) -> Iterator[U8]:
    """Blocks as a save would cut them from whole rows, about."""
    for start in range(0, data.size, BLOCK_NBYTES):
        yield data[start : start + BLOCK_NBYTES]


@dataclass(frozen=True)
class _Encoded:
    like: torch.Tensor
    chain: CodecChain
    blocks: Sequence[EncodedBlock]


class EngineCoder:
    """This project's CPU engine on a pool of threads: choice of codec, planes, entropy coder and both checksums.

    Like ZipNN it returns new memory each time: for each encoded block, and for each decoded tensor.

    Args:
        threads: how many.
    """

    name = "dcp_nvcomp"

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._local = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def prepare(self, state: State) -> State:
        """What `encode` takes."""
        return state

    def encode(self, state: State) -> dict[str, _Encoded]:
        """Encode all tensors."""
        chains = {name: chain_for(tensor) for name, tensor in state.items()}
        work = [(block, chains[name]) for name, tensor in state.items() for block in blocks_of(as_bytes(tensor))]
        done = self._pool.map(self._encode_block, *zip(*work, strict=True))
        return {
            name: _Encoded(tensor, chains[name], [next(done) for _ in blocks_of(as_bytes(tensor))])
            for name, tensor in state.items()
        }

    def decode(self, encoded: Mapping[str, _Encoded]) -> State:
        """Decode all tensors; stored bytes are checked first, as in a load."""
        state = {name: torch.empty_like(one.like) for name, one in encoded.items()}
        work = [
            (block, one.chain, out)
            for name, one in encoded.items()
            for block, out in zip(one.blocks, blocks_of(as_bytes(state[name])), strict=True)
        ]
        for _ in self._pool.map(self._decode_block, *zip(*work, strict=True)):
            pass
        return state

    def nbytes(self, encoded: Mapping[str, _Encoded]) -> int:
        """Size of what `encode` returned."""
        return sum(block.data.nbytes for one in encoded.values() for block in one.blocks)

    def _engine(self) -> CpuEngine:
        engine: CpuEngine | None = getattr(self._local, "engine", None)
        if engine is None:
            engine = self._local.engine = CpuEngine()
        return engine

    def _encode_block(self, block: U8, chain: CodecChain) -> EncodedBlock:
        out = np.empty(chain.max_encoded_nbytes(block.nbytes), np.uint8)
        return self._engine().encode(block, chain, out.data)

    def _decode_block(self, block: EncodedBlock, chain: CodecChain, out: U8) -> None:
        self._engine().decode(block.data, block.row, chain, out, verify="stored")


class ZipNNCoder:
    """ZipNN, tensor by tensor, with its own threads.

    Args:
        threads: how many.
    """

    name = "zipnn"

    def __init__(self, threads: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it is built on torch.jit
            from zipnn import ZipNN

        self._new = lambda: ZipNN(input_format="torch", threads=threads)
        self._coder = self._new()

    def close(self) -> None:
        pass

    def prepare(self, state: State) -> State:
        """Copies: it reorders the bits of what it is given in place, and leaves them so."""
        return {name: tensor.clone() for name, tensor in state.items()}

    def encode(self, state: State) -> dict[str, Any]:
        """Encode all tensors, in place of which garbage is left."""
        return {name: self._coder.compress(tensor) for name, tensor in state.items()}

    def decode(self, encoded: Mapping[str, Any]) -> State:
        """Decode all tensors."""
        coder = self._new()  # it keeps fields of the last stream's header
        return {name: coder.decompress(data) for name, data in encoded.items()}

    def nbytes(self, encoded: Mapping[str, Any]) -> int:
        """Size of what `encode` returned."""
        return sum(len(data) for data in encoded.values())


def zstd_nbytes(state: State, level: int) -> int:
    """Compress the tensors' bytes with zstd, tensor by tensor."""
    compressor = zstandard.ZstdCompressor(level=level)
    return sum(len(compressor.compress(as_bytes(tensor).data)) for tensor in state.values())

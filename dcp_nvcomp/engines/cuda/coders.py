"""nvCOMP's coders on batches of slices: Deflate, ANS, and the decoder of Zstd, as bare streams, one for each slice.

`_ALGORITHMS` lists the coders that nvCOMP serves; the CPU engine runs chains with any other.

encode   scratch memory, where its slices lie  -->  where their frames lie, how long they are
decode   encoded memory, where its frames lie  -->  scratch memory, how much came out of each

Both only start the work: several coders of a batch, and the steps after them, are queued before the first wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain, Coder, padded
from dcp_nvcomp.codecs.coders import Ans, Deflate, Zstd
from dcp_nvcomp.codecs.transforms import Bytes, Planes
from dcp_nvcomp.engines.cuda.batches import I64, size_classes
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.support import nvcomp_version
from dcp_nvcomp.errors import UnsupportedVersionError


@dataclass(frozen=True)
class _EncodedGroup:
    """Slices of one size class while they are encoded."""

    members: I64
    batch: Any  # nvCOMP's, of the frames
    source: Any  # nvCOMP's, of the slices: its tables must live until the work is done
    room_nbytes: int  # the room of each frame


class Frames:
    """Frames of slices, encoded or under way, each in a slot of its own."""

    def __init__(self, lengths: I64) -> None:
        self._lengths = lengths
        self.addresses = np.zeros_like(lengths)
        self._nbytes = lengths.copy()
        self._groups: list[_EncodedGroup] = []
        self._memory: list[Tensor] = []

    def add(self, group: _EncodedGroup, slots: Tensor) -> None:
        """Slices that are being encoded, each to a slot of its own."""
        self._groups.append(group)
        self._memory.append(slots)
        at = np.arange(group.members.size, dtype=np.int64) * group.room_nbytes
        self.addresses[group.members] = slots.data_ptr() + at

    def nbytes(self) -> I64:
        """Wait, and return the length of each frame; the slice's own length if nvCOMP was not given it."""
        groups, self._groups = self._groups, []
        for group in groups:
            found = np.asarray(group.batch.buffer_sizes, np.int64)
            if found.shape != group.members.shape or (found <= 0).any() or (found > group.room_nbytes).any():
                raise RuntimeError(f"nvCOMP reports impossible sizes for {group.members.size} slices.")
            self._nbytes[group.members] = found
        # one that is no shorter would be taken for a stored slice
        self._nbytes = np.minimum(self._nbytes, self._lengths)
        return self._nbytes

    def write(self, addresses: I64) -> None:
        """Start to write each frame to its address, a multiple of 16, unless it is written: here all are."""


class Decoding:
    """Slices while they are decoded."""

    def __init__(self, batch: Any, used: tuple[Any, ...], lengths: I64) -> None:
        self._batch = batch
        self._used = used
        self._lengths = lengths

    def good(self) -> npt.NDArray[np.bool_]:
        """Wait, and return for each slice True if nvCOMP decoded it to its length."""
        found = np.asarray(self._batch.buffer_sizes, np.int64)
        return found == self._lengths if found.shape == self._lengths.shape else np.zeros(self._lengths.shape, np.bool_)

    def known(self) -> npt.NDArray[np.bool_]:
        """Return True for each slice: nvCOMP decodes whatever a frame may hold."""
        return np.ones(self._lengths.shape, np.bool_)


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that nvCOMP takes for itself: per decoded byte and per slice."""

    per_byte: float
    per_slice: int

    def nbytes(self, coded_nbytes: int, slices: int) -> int:
        """Return what a batch takes."""
        return int(coded_nbytes * self.per_byte) + slices * self.per_slice


ENCODE: Final = "encode"
DECODE: Final = "decode"

# What nvCOMP 6.0's temp-size functions answer without a GPU (Zstd decode 3 n + 6.9 KB, Deflate 1 up to 9.5 n + 38 KB);
# none for Deflate 0 and ANS, nor to decode Deflate 1.
_WORKSPACES = {
    (DECODE, "Zstd"): Workspace(3.05, 8 << 10),
    (ENCODE, "Deflate matching"): Workspace(9.5, 40 << 10),
}
_NO_WORKSPACE = Workspace(0, 256)

# nvCOMP's `algorithm_type` of Deflate: 0 codes literals only, 1 searches for matches.
_DEFLATE_LITERALS, _DEFLATE_MATCHES = 0, 1

# Batches of one state have few shapes; a load whose batches all differ must not keep them all.
_KEPT_CONFIGS = 64

_ANS_ITEM_NBYTES = {"<f2": 2, "<f4": 4}


@dataclass(frozen=True)
class _Algorithm:
    """The algorithm of nvCOMP that serves a coder."""

    kind: str
    options: dict[str, Any]  # arguments of nvCOMP's codec
    item_nbytes: int = 1  # nvCOMP takes slices of whole items only; others are stored
    version: str | None = None  # the version of nvCOMP that wrote the slices, if no other major version decodes them


def _zstd(coder: Zstd) -> _Algorithm:
    return _Algorithm("Zstd", {"algorithm": "Zstd"})  # it has no levels here, so literals_only has nothing to set


def _deflate(coder: Deflate) -> _Algorithm:
    if coder.literals_only:
        return _Algorithm("Deflate", {"algorithm": "Deflate", "algorithm_type": _DEFLATE_LITERALS})
    return _Algorithm("Deflate matching", {"algorithm": "Deflate", "algorithm_type": _DEFLATE_MATCHES})


def _ans(coder: Ans) -> _Algorithm:
    options = {"algorithm": "ANS", "data_type": coder.data_type}
    return _Algorithm("ANS", options, _ANS_ITEM_NBYTES.get(coder.data_type, 1), coder.nvcomp_version)


_ALGORITHMS: dict[type[Coder], Callable[[Any], _Algorithm]] = {Zstd: _zstd, Deflate: _deflate, Ans: _ans}


def _algorithm(coder: Coder) -> _Algorithm:
    return _ALGORITHMS[type(coder)](coder)


def is_served(chain: CodecChain) -> bool:
    """Return True if the kernels know the chain's planes and nvCOMP its coder."""
    return type(chain.array_to_bytes) in (Bytes, Planes) and (chain.coder is None or type(chain.coder) in _ALGORITHMS)


def stamped_chain(chain: CodecChain) -> CodecChain:
    """Return the chain with the version of nvCOMP that is installed, if its slices depend on it."""
    if isinstance(chain.coder, Ans):
        return CodecChain(chain.array_to_bytes, replace(chain.coder, nvcomp_version=nvcomp_version()))
    return chain


class NvcompCoders:
    """nvCOMP codecs on a device's stream, made when first needed."""

    def __init__(self, device: Device, workspaces: dict[tuple[str, str], Workspace] | None = None) -> None:
        self._device = device
        # what engines of one device have seen, which all of them keep to
        self._workspaces = {} if workspaces is None else workspaces
        self._codecs: dict[Coder, Any] = {}
        self._bounds: dict[tuple[Coder, int], int] = {}
        self._decompress_configs: dict[tuple[Coder, bytes], Any] = {}

    def _workspace(self, direction: str, kind: str) -> Workspace:
        return self._workspaces.get((direction, kind)) or _WORKSPACES.get((direction, kind), _NO_WORKSPACE)

    def forget(self) -> None:
        """Drop all codecs, and with them the scratch memory that each keeps; others are made when needed."""
        self._decompress_configs.clear()
        self._codecs.clear()

    @property
    def version(self) -> str:
        return str(self._device.nvcomp.__version__)

    def check_decodable(self, coder: Coder | None) -> None:
        """Refuse what this nvCOMP can't decode: ANS changes from one major version to the next."""
        version = None if coder is None else _algorithm(coder).version
        if version is not None and version.split(".")[0] != self.version.split(".")[0]:
            wrote = version or "(version not recorded)"
            raise UnsupportedVersionError(
                f"This record was coded with the ANS of nvCOMP {wrote}, which nvCOMP {self.version} can't decode: "
                f"install nvidia-nvcomp-cu13=={wrote.split('.')[0]}.* (or -cu12), load the checkpoint there and save "
                "it again with codec='auto'."
            )

    def slot_nbytes(self, coder: Coder, ceiling: int) -> int:
        """Return the room that the frame of a slice of at most `ceiling` bytes needs."""
        bound = self._bounds.get((coder, ceiling))
        if bound is None:
            sample = self._device.nvcomp.as_array(
                self._device.arena.empty(ceiling), cuda_stream=self._device.stream_handle
            )
            bound = self._bounds[coder, ceiling] = int(self._codec(coder).get_max_comp_buffer_size(sample))
        return padded(bound)

    def encode_nbytes(self, coder: Coder, lengths: I64) -> int:
        """Return the device memory that encoding slices of these lengths takes, in addition to the slices."""
        slots = sum(
            self.slot_nbytes(coder, ceiling) * members.size
            for ceiling, members in size_classes(lengths, coder.slice_nbytes)
        )
        workspace = self._workspace(ENCODE, _algorithm(coder).kind)
        return slots + workspace.nbytes(int(lengths.sum()), lengths.size)

    def decode_nbytes(self, coder: Coder, lengths: I64) -> int:
        """Return the device memory that decoding slices of these lengths takes, in addition to slices and frames."""
        workspace = self._workspace(DECODE, _algorithm(coder).kind)
        return workspace.nbytes(int(lengths.sum()), lengths.size)

    def encode(self, coder: Coder, scratch: Tensor, places: I64, lengths: I64) -> Frames:
        """Start to encode slices."""
        frames = Frames(lengths)
        algorithm = _algorithm(coder)
        assert algorithm.version in (None, self.version)
        for ceiling, members in size_classes(lengths, coder.slice_nbytes):
            members = members[lengths[members] % algorithm.item_nbytes == 0]
            if members.size == 0:
                continue
            slot_nbytes = self.slot_nbytes(coder, ceiling)
            slots = self._device.arena.empty(slot_nbytes * members.size)
            at, room = np.arange(members.size, dtype=np.int64) * slot_nbytes, np.full(members.size, slot_nbytes)
            source, target = self._batch(scratch, places[members], lengths[members]), self._batch(slots, at, room)
            with self._learning(ENCODE, algorithm.kind, lengths[members]):
                batch = self._codec(coder).encode(source, out=target)
            frames.add(_EncodedGroup(members, batch, source, slot_nbytes), slots)
        return frames

    def decode(
        self, coder: Coder, encoded: Tensor, at: I64, nbytes: I64, scratch: Tensor, places: I64, lengths: I64
    ) -> Decoding:
        """Start to decode slices."""
        codec, config = self._codec(coder), self._decompress_config(coder, lengths)
        source, target = self._batch(encoded, at, nbytes), self._batch(scratch, places, lengths)
        with self._learning(DECODE, _algorithm(coder).kind, lengths):
            batch = codec.decode(source, out=target, decompression_config=config)
        return Decoding(batch, (source, config), lengths)

    def _decompress_config(self, coder: Coder, lengths: I64) -> Any:
        """Return nvCOMP's configuration, made from the lengths so that it neither waits nor reads the frames.

        Without it `decode` stops the stream to parse all of them, which for Deflate means to decode them twice.
        """
        key = (coder, lengths.tobytes())
        config = self._decompress_configs.get(key)
        if config is None:
            if len(self._decompress_configs) >= _KEPT_CONFIGS:
                self._decompress_configs.clear()
            codec = self._codec(coder)
            config = codec.decompression_config(codec.compression_config(lengths.tolist()))
            self._decompress_configs[key] = config
        return config

    def _batch(self, memory: Tensor, at: I64, nbytes: I64) -> Any:
        return self._device.nvcomp.as_arrays(
            memory, at.tolist(), nbytes.tolist(), cuda_stream=self._device.stream_handle
        )

    @contextmanager
    def _learning(self, direction: str, kind: str, lengths: I64) -> Iterator[None]:
        """Correct the guess of nvCOMP's scratch memory upwards, so that the next batch keeps to the budget."""
        memory, stream = self._device.nvcomp_memory, self._device.stream_handle
        before_nbytes = memory.reset_peak(stream)
        try:
            yield
        finally:  # what was asked for in vain counts most
            known = self._workspace(direction, kind)
            taken = memory.peak_nbytes(stream) - before_nbytes + memory.refused_nbytes(stream)
            excess = taken - known.nbytes(int(lengths.sum()), lengths.size)
            if excess > 0:
                per_byte = known.per_byte + excess / int(lengths.sum())
                self._workspaces[direction, kind] = replace(known, per_byte=per_byte)

    def _codec(self, coder: Coder) -> Any:
        codec = self._codecs.get(coder)
        if codec is None:
            codec = self._codecs[coder] = self._device.nvcomp.Codec(
                bitstream_kind=self._device.nvcomp.BitstreamKind.RAW,
                uncomp_chunk_size=coder.slice_nbytes,
                device_id=self._device.torch_device.index or 0,
                cuda_stream=self._device.stream_handle,
                **_algorithm(coder).options,
            )
        return codec

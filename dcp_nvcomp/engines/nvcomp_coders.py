"""nvCOMP's coders on batches of slices: Zstd, Deflate and ANS as bare streams, one for each slice.

encode   scratch memory, where its slices lie  -->  where their frames lie, how long they are
decode   encoded memory, where its frames lie  -->  scratch memory, how much came out of each
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dcp_nvcomp.codecs.ans import Ans
from dcp_nvcomp.codecs.base import Coder, padded
from dcp_nvcomp.codecs.deflate import Deflate
from dcp_nvcomp.codecs.zstd import Zstd
from dcp_nvcomp.engines.cuda_batches import I64, size_classes
from dcp_nvcomp.engines.cuda_device import Device
from dcp_nvcomp.errors import CodecUnavailableError, UnsupportedVersionError

__all__ = ["Frames", "NvcompCoders"]


@dataclass(frozen=True)
class Frames:
    """What a batch of slices was encoded to.

    Attributes:
        addresses: where each slice's frame lies.
        nbytes: how long it is; the slice's own length for one that nvCOMP was not given.
        memory: what holds them.
    """

    addresses: I64
    nbytes: I64
    memory: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Workspace:
    """How much scratch memory nvCOMP takes for itself: so much a decoded byte, and so much a slice."""

    per_byte: float
    per_slice: int

    def nbytes(self, coded_nbytes: int, slices: int) -> int:
        return int(coded_nbytes * self.per_byte) + slices * self.per_slice


# What nvCOMP 6.0's temp-size functions answer without a GPU (Zstd decode 3 n + 6.9 KB, Deflate 1 up to 9.5 n + 38 KB,
# none for Deflate 0 and ANS). Zstd's encoder can only be asked on one: a guess, corrected upwards by what is seen.
_ENCODE_WORKSPACE = {
    "Zstd": _Workspace(4, 16 << 10),
    "Deflate": _Workspace(0, 256),
    "Deflate matching": _Workspace(9.5, 40 << 10),
    "ANS": _Workspace(0, 256),
}
_DECODE_WORKSPACE = {
    "Zstd": _Workspace(3.05, 8 << 10),
    "Deflate": _Workspace(0, 256),
    "Deflate matching": _Workspace(0, 256),
    "ANS": _Workspace(0, 256),
}

# nvCOMP's `algorithm_type` of Deflate: 0 codes literals only, 1 searches for matches.
_DEFLATE_LITERALS, _DEFLATE_MATCHES = 0, 1

_ANS_ITEM_NBYTES = {"<f2": 2, "<f4": 4}


class NvcompCoders:
    """nvCOMP codecs on a device's stream, made when first needed.

    Args:
        device: where they run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._codecs: dict[Coder, Any] = {}
        self._bounds: dict[tuple[Coder, int], int] = {}
        self._encode_workspace = dict(_ENCODE_WORKSPACE)
        self._decode_workspace = dict(_DECODE_WORKSPACE)

    @property
    def version(self) -> str:
        """Which nvCOMP this is."""
        return str(self._device.nvcomp.__version__)

    def check_decodable(self, coder: Coder | None) -> None:
        """Refuse what this nvCOMP can't decode: ANS changes from one major version to the next.

        Raises:
            UnsupportedVersionError: another major version wrote it.
        """
        if isinstance(coder, Ans) and coder.nvcomp_version.split(".")[0] != self.version.split(".")[0]:
            wrote = coder.nvcomp_version or "(version not recorded)"
            raise UnsupportedVersionError(
                f"This record was coded with the ANS of nvCOMP {wrote}, which nvCOMP {self.version} can't decode: "
                f"install nvidia-nvcomp-cu13=={wrote.split('.')[0]}.* (or -cu12), load the checkpoint there and save "
                "it again with codec='auto'."
            )

    def slot_nbytes(self, coder: Coder, ceiling: int) -> int:
        """Room for the frame of a slice of at most `ceiling` bytes."""
        bound = self._bounds.get((coder, ceiling))
        if bound is None:
            sample = self._device.nvcomp.as_array(self._device.empty(ceiling), cuda_stream=self._device.stream_handle)
            bound = self._bounds[coder, ceiling] = int(self._codec(coder).get_max_comp_buffer_size(sample))
        return padded(bound)

    def encode_nbytes(self, coder: Coder, lengths: I64) -> int:
        """How much device memory it takes to encode slices of these lengths, beside the slices."""
        slots = sum(
            self.slot_nbytes(coder, ceiling) * members.size
            for ceiling, members in size_classes(lengths, coder.slice_nbytes)
        )
        return slots + self._encode_workspace[_kind(coder)].nbytes(int(lengths.sum()), lengths.size)

    def decode_nbytes(self, coder: Coder, lengths: I64) -> int:
        """How much device memory it takes to decode slices of these lengths, beside the slices and their frames."""
        return self._decode_workspace[_kind(coder)].nbytes(int(lengths.sum()), lengths.size)

    def encode(self, coder: Coder, scratch: Tensor, places: I64, lengths: I64) -> Frames:
        """Encode slices, and wait for it.

        Args:
            coder: the coder.
            scratch: the memory in which the slices lie.
            places: where each begins in it, multiples of 16.
            lengths: how long each is, at least 1.

        Returns:
            Their frames. One that is not shorter than its slice means: store the slice.
        """
        addresses, nbytes = np.zeros_like(lengths), lengths.copy()
        memory: list[Tensor] = []
        item_nbytes = _ANS_ITEM_NBYTES.get(coder.data_type, 1) if isinstance(coder, Ans) else 1
        for ceiling, members in size_classes(lengths, coder.slice_nbytes):
            members = members[lengths[members] % item_nbytes == 0]
            if members.size == 0:
                continue
            slot_nbytes = self.slot_nbytes(coder, ceiling)
            slots = self._device.empty(slot_nbytes * members.size)
            at = np.arange(members.size, dtype=np.int64) * slot_nbytes
            nbytes[members] = self._encode_group(
                coder, scratch, places[members], lengths[members], slots, at, np.full(members.size, slot_nbytes)
            )
            addresses[members] = slots.data_ptr() + at
            memory.append(slots)
        return Frames(addresses, nbytes, tuple(memory))

    def _encode_group(
        self, coder: Coder, scratch: Tensor, places: I64, lengths: I64, slots: Tensor, at: I64, room: I64
    ) -> I64:
        self._device.nvcomp_memory.reset_peak(self._device.stream_handle)
        frames = self._codec(coder).encode(self._batch(scratch, places, lengths), out=self._batch(slots, at, room))
        nbytes = np.asarray(frames.buffer_sizes, np.int64)  # waits
        if nbytes.shape != lengths.shape or (nbytes <= 0).any() or (nbytes > room).any():
            raise RuntimeError(f"nvCOMP reports impossible sizes for {lengths.size} slices.")
        self._learn(self._encode_workspace, _kind(coder), lengths)
        return nbytes

    def decode(
        self, coder: Coder, encoded: Tensor, at: I64, nbytes: I64, scratch: Tensor, places: I64, lengths: I64
    ) -> npt.NDArray[np.bool_]:
        """Decode slices.

        Args:
            coder: the coder.
            encoded: the memory in which the frames lie.
            at: where each begins in it, multiples of 16.
            nbytes: how long each is.
            scratch: where the slices go.
            places: where each begins in it, multiples of 16.
            lengths: how long each must become.

        Returns:
            For each slice whether nvCOMP decoded it to its length.
        """
        self._device.nvcomp_memory.reset_peak(self._device.stream_handle)
        slices = self._codec(coder).decode(self._batch(encoded, at, nbytes), out=self._batch(scratch, places, lengths))
        decoded = np.asarray(slices.buffer_sizes, np.int64)  # waits
        self._learn(self._decode_workspace, _kind(coder), lengths)
        return decoded == lengths if decoded.shape == lengths.shape else np.zeros(lengths.shape, np.bool_)

    def _batch(self, memory: Tensor, at: I64, nbytes: I64) -> Any:
        return self._device.nvcomp.as_arrays(
            memory, at.tolist(), nbytes.tolist(), cuda_stream=self._device.stream_handle
        )

    def _learn(self, workspaces: dict[str, _Workspace], kind: str, lengths: I64) -> None:
        """Correct the guess of nvCOMP's scratch memory upwards, so that the next batch keeps to the budget."""
        known = workspaces[kind]
        peak_nbytes = self._device.nvcomp_memory.peak_nbytes(self._device.stream_handle)
        excess = peak_nbytes - known.nbytes(int(lengths.sum()), lengths.size)
        if excess > 0:
            workspaces[kind] = replace(known, per_byte=known.per_byte + excess / int(lengths.sum()))

    def _codec(self, coder: Coder) -> Any:
        codec = self._codecs.get(coder)
        if codec is None:
            codec = self._codecs[coder] = self._device.nvcomp.Codec(
                bitstream_kind=self._device.nvcomp.BitstreamKind.RAW,
                uncomp_chunk_size=coder.slice_nbytes,
                device_id=self._device.torch_device.index or 0,
                cuda_stream=self._device.stream_handle,
                **_options(coder),
            )
        return codec


def _options(coder: Coder) -> dict[str, Any]:
    if isinstance(coder, Zstd):
        return {"algorithm": "Zstd"}  # it has no levels here, so literals_only has nothing to set
    if isinstance(coder, Deflate):
        return {
            "algorithm": "Deflate",
            "algorithm_type": _DEFLATE_LITERALS if coder.literals_only else _DEFLATE_MATCHES,
        }
    if isinstance(coder, Ans):
        return {"algorithm": "ANS", "data_type": coder.data_type}
    raise CodecUnavailableError(f"The CUDA engine has no coder {coder.name!r}.")


def _kind(coder: Coder) -> str:
    options = _options(coder)
    matching = options.get("algorithm_type") == _DEFLATE_MATCHES
    return f"{options['algorithm']} matching" if matching else str(options["algorithm"])

"""`planes` in plain torch operations: the reference for planes_numpy.py and engines/cuda/kernels/blocks.cu.

Written to be read, not to be fast: each plane in one line from the bytes of the floats. Runs on any device, so that a
test can compare byte for byte with whatever runs there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import FLAG_NEGATIVE, FLAG_PACKED_REST
from dcp_nvcomp.codecs.transforms import Planes

__all__ = ["merge", "split"]


def split(block: Tensor, codec: Planes, *, pack: bool) -> tuple[int, dict[str, Tensor]]:
    """Split one block into its planes."""
    floats = block.reshape(-1, codec.float_nbytes)
    second, highest = floats[:, -2], floats[:, -1]
    sign, seven = highest & 0x80, second & 0x7F
    planes = {"exponent": ((highest & 0x7F) << 1) | (second >> 7)}
    if codec.float_nbytes > 2:
        planes["low"] = floats[:, :-2].reshape(-1)
    flags = 0
    if pack and len(floats) >= 8:
        if bool((sign == 0).all()):
            flags = FLAG_PACKED_REST
        elif bool((sign != 0).all()):
            flags = FLAG_PACKED_REST | FLAG_NEGATIVE
    planes["rest"] = _pack(seven) if flags else seven | sign
    return flags, {name: planes[name] for name in codec.plane_names}


def merge(planes: Mapping[str, Tensor], flags: int, codec: Planes) -> Tensor:
    """Put the planes of one block together again: the inverse of `split`."""
    exponent, rest = planes["exponent"], planes["rest"]
    if flags & FLAG_PACKED_REST:
        seven = _unpack(rest, exponent.numel())
        sign = torch.full_like(seven, 0x80 if flags & FLAG_NEGATIVE else 0)
    else:
        seven, sign = rest & 0x7F, rest & 0x80
    columns = [((exponent & 1) << 7) | seven, (exponent >> 1) | sign]
    if codec.float_nbytes > 2:
        columns = [*planes["low"].reshape(-1, codec.float_nbytes - 2).unbind(1), *columns]
    return torch.stack(columns, 1).reshape(-1)


def _bits(device: torch.device) -> Tensor:
    return torch.arange(7, dtype=torch.uint8, device=device).unsqueeze(1)


def _pack(seven: Tensor) -> Tensor:
    eighth = seven.numel() // 8
    first = seven[: 7 * eighth].reshape(7, eighth)
    last = seven[7 * eighth : 8 * eighth]
    ridden = first | (((last >> _bits(seven.device)) & 1) << 7)
    return torch.cat([ridden.reshape(-1), seven[8 * eighth :]])


def _unpack(packed: Tensor, count: int) -> Tensor:
    eighth = count // 8
    first = packed[: 7 * eighth].reshape(7, eighth)
    last = ((first >> 7) << _bits(packed.device)).sum(0, dtype=torch.uint8)
    return torch.cat([first.reshape(-1) & 0x7F, last, packed[7 * eighth :] & 0x7F])

"""Step: every kernel against its reference, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.literals import literal_probes
from benchmarks.gpu_acceptance.results import Probe
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.codecs.transforms import PLANE_NAMES, Planes
from dcp_nvcomp.engines.cuda.batches import block_table, copy_table
from dcp_nvcomp.engines.cuda.device import Device
from tests.codecs import planes_reference
from tests.engines.cases import SIGNS, floats

_COUNTS = (1, 9, 1000, (1 << 19) + 13)
_SMALL_COUNTS = (1, 9, 1000)
_MISALIGNED = (0, 1, 2, 4, 8)


def probes(host: Host) -> Iterator[Probe]:
    device = cache(partial(host.device, compiled=True))
    for width in (2, 4, 8):
        for signs in SIGNS:
            yield f"floats of {width} bytes, {signs} signs", partial(_blocks, host, device, width, signs)
    yield from literal_probes(host, count=host.pick(1000, 12), seeds=host.pick(8, 1))


def _blocks(host: Host, device: Callable[[], Device], width: int, signs: str) -> Mapping[str, Any]:
    wrong = []
    counts = host.pick(_COUNTS, _SMALL_COUNTS)
    for misaligned in _MISALIGNED:
        for count in counts:
            found = differences(device(), width, signs, misaligned, count)
            wrong += [f"{what}, {count} floats {misaligned} bytes from alignment" for what in found]
    if wrong:
        raise AssertionError(f"{len(wrong)} differences: {'; '.join(wrong[:20])}")
    return {"blocks": len(_MISALIGNED) * len(counts)}


def _placed(block: np.ndarray, device: Device, misaligned: int) -> Tensor:
    memory = torch.zeros(block.size + 64, dtype=torch.uint8, device=device.torch_device)
    start = -memory.data_ptr() % 16 + misaligned
    memory[start : start + block.size] = torch.from_numpy(block).to(device.torch_device)
    return memory[start : start + block.size]


def _column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def differences(device: Device, width: int, signs: str, misaligned: int, count: int) -> list[str]:
    """Return the names of what a kernel made otherwise than the reference does.

    Args:
        device: runs the kernels.
        width: bytes of a float.
        signs: see `tests.engines.cases.floats`.
        misaligned: how far from a multiple of 16 the block begins.
        count: how many floats.
    """
    codec, block = Planes(width), _placed(floats(width, count, signs, count), device, misaligned)
    nbytes = block.numel()
    flags, expected = planes_reference.split(block, codec, pack=True)
    # each plane begins at a multiple of 16, and has room behind it that must stay as it is
    rooms = {name: torch.full((plane.numel() + 64,), 0xA5, dtype=torch.uint8) for name, plane in expected.items()}
    rooms = {name: room.to(device.torch_device) for name, room in rooms.items()}
    planes = {name: room[-room.data_ptr() % 16 :] for name, room in rooms.items()}
    addresses = np.array([[planes[n].data_ptr() if n in planes else 0 for n in PLANE_NAMES]], np.int64)
    merged = _placed(np.zeros(nbytes, np.uint8), device, misaligned)
    copied = _placed(np.ones(nbytes + 9, np.uint8), device, 0)
    results = torch.zeros((3, 1), dtype=torch.int32, device=device.torch_device)
    with device.session([block]):
        table = block_table(_column(block.data_ptr()), _column(nbytes), _column(width), _column(1), addresses)
        device.kernels.inspect(table, results[0], results[1])
        device.kernels.split(table, results[1], results[2])
        table = block_table(_column(merged.data_ptr()), _column(nbytes), _column(width), _column(flags), addresses)
        device.kernels.merge(table)
        table = copy_table(_column(merged.data_ptr()), _column(copied.data_ptr()), _column(nbytes), _column(9))
        device.kernels.copy(table)
    right = {
        "the CRC": int(results[0].cpu().numpy().view(np.uint32)[0]) == checksum(block.cpu().numpy()),
        "the flags": int(results[2]) == flags,
        "merged floats": torch.equal(merged, block),
        "copied bytes": torch.equal(copied[:nbytes], block),
        "zero bytes after a copy": not copied[nbytes:].any(),
    }
    for name, plane in expected.items():
        right[f"plane {name}"] = torch.equal(planes[name][: plane.numel()], plane)
        right[f"memory behind plane {name}"] = bool((planes[name][plane.numel() :] == 0xA5).all())
    return [name for name, same in right.items() if not same]

"""Step: the decompression engine of Blackwell GPUs, which decodes Deflate without the multiprocessors.

Asks the driver whether there is one, then decodes the same frames by it and by CUDA: both right, and how fast. Memory
of cudaMalloc will do for it; torch's allocator uses that unless it is told to use expandable segments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.made import exponents
from benchmarks.gpu_acceptance.results import Probe, Skipped
from benchmarks.gpu_device import RawCoder
from benchmarks.measuring import Spread
from dcp_nvcomp.engines.cuda.device import Device

# Of CUDA's driver interface, since 12.8.
_ALGORITHMS_ATTRIBUTE, _MOST_NBYTES_ATTRIBUTE = 136, 137
_DEFLATE = 1

_KIB = 1 << 10
_NBYTES = 512 << 20
_BACKENDS = ("CUDA", "HARDWARE", "DEFAULT")


def probes(host: Host) -> Iterator[Probe]:
    capability = cache(partial(_capability, host))
    yield "what the driver says", lambda: capability()
    device = cache(host.device)
    for slice_nbytes in host.pick((64 * _KIB, 128 * _KIB, 1024 * _KIB), (64 * _KIB,)):
        for backend in _BACKENDS:
            name = f"{backend}, {slice_nbytes >> 10} KiB"
            yield name, partial(_decode, host, device, capability, backend, slice_nbytes)


def _attribute(number: int) -> int:
    """Return an attribute of the GPU; 0 if the driver does not know it."""
    driver, value, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return 0 if failed else value.value


def _capability(host: Host) -> Mapping[str, Any]:
    if host.stand_in:
        return {"algorithms": 0, "most_nbytes": 0, "allocator": "none"}
    return {
        "algorithms": _attribute(_ALGORITHMS_ATTRIBUTE),
        "most_nbytes": _attribute(_MOST_NBYTES_ATTRIBUTE),
        "allocator": torch.cuda.get_allocator_backend(),
    }


def _decode(
    host: Host,
    device: Callable[[], Device],
    capability: Callable[[], Mapping[str, Any]],
    backend: str,
    slice_nbytes: int,
) -> Mapping[str, Any]:
    options: dict[str, Any] = {"algorithm": "Deflate", "algorithm_type": 0}
    if backend != "CUDA":
        algorithms, most_nbytes = capability()["algorithms"], capability()["most_nbytes"]
        if not algorithms & _DEFLATE:
            raise Skipped("this GPU has no decompression engine for Deflate (CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_*)")
        if slice_nbytes > most_nbytes:
            raise Skipped(f"it takes slices of at most {most_nbytes} bytes")
    if not host.stand_in:
        options["decompress_backend"] = getattr(
            device().nvcomp.DecompressBackend, f"NVCOMP_DECOMPRESS_BACKEND_{backend}"
        )
    data = exponents(host.pick(_NBYTES, 1 << 20), host.torch_device)
    # raises if anything comes out wrong
    _, _, seconds = RawCoder(device(), slice_nbytes, **options).measure(data, host.pick(5, 1))
    rate = Spread(tuple(seconds)).rate(data.numel() / 1e9)
    row = {"backend": backend.lower(), "slice_kib": slice_nbytes >> 10, "rate": rate}
    return {"rows": {"hardware": [row]}}

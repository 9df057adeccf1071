"""Step: the same frames given to nvCOMP itself, which promises nothing: what it does is worth knowing, not a failure.

If it raises, reports another size, decodes to something, writes beside the slice, or ends the process or the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_acceptance.tampering import SLICE_NBYTES, TAMPERED_CODERS, TAMPERINGS, a_slice
from dcp_nvcomp.codecs.base import padded

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "Zstd": {"algorithm": "Zstd"},
    "Deflate": {"algorithm": "Deflate", "algorithm_type": 0},
}
_BESIDE_NBYTES = 4096
_SCRATCH_NBYTES = 64 << 20


def probes(host: Host) -> Iterator[Probe]:
    for what in host.pick(tuple(TAMPERINGS), ("random bytes", "a shorter slice")):
        for name in host.pick(tuple(_OPTIONS), ("Zstd",)):
            yield f"{name}: {what}", partial(_observed, host, name, what)


def _observed(host: Host, name: str, what: str) -> Mapping[str, Any]:
    device, coder = host.device(), TAMPERED_CODERS[name]
    frame = TAMPERINGS[what](bytes(coder.encoder()(memoryview(a_slice()))), coder)
    encoded = torch.zeros(padded(len(frame)) + _BESIDE_NBYTES, dtype=torch.uint8)
    encoded[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    encoded = encoded.to(host.torch_device)
    out = torch.full((SLICE_NBYTES + _BESIDE_NBYTES,), 0xA5, dtype=torch.uint8, device=host.torch_device)
    device.arena.set_limit(_SCRATCH_NBYTES)
    with device.current():
        codec = device.nvcomp.Codec(
            bitstream_kind=device.nvcomp.BitstreamKind.RAW,
            uncomp_chunk_size=SLICE_NBYTES,
            device_id=device.torch_device.index or 0,
            cuda_stream=device.stream_handle,
            **_OPTIONS[name],
        )
    config = codec.decompression_config(codec.compression_config([SLICE_NBYTES]))
    found: dict[str, Any] = {}
    try:
        with device.session([encoded, out]):
            source = device.nvcomp.as_arrays(encoded, [0], [len(frame)], cuda_stream=device.stream_handle)
            target = device.nvcomp.as_arrays(out, [0], [SLICE_NBYTES], cuda_stream=device.stream_handle)
            slices = codec.decode(source, out=target, decompression_config=config)
            found["sizes"] = [int(size) for size in slices.buffer_sizes]
    except Exception as error:
        found["raised"] = f"{type(error).__name__}: {error}"[:1000]
    found["trouble"] = host.trouble()
    if found["trouble"] is None:
        memory = out.cpu()
        found["slice_is_right"] = memory[:SLICE_NBYTES].numpy().tobytes() == a_slice()
        found["wrote_beside"] = bool((memory[SLICE_NBYTES:] != 0xA5).any())
    return found

"""Slice sizes from 64 KiB to 4 MiB and nvCOMP's coders: the table that the defaults follow from.

    python -m benchmarks.slices [--quick] [--json FILE] [--state FILE]

Zstd, Deflate and GDeflate code the exponent plane; the rest of a float is stored, so the ratio of whole floats follows.
ANS codes whole floats. All rates are of whole floats, so that coders can be compared, and of the coder alone: without
planes, checksums and transfers. GDeflate is for comparison only: zlib can't decode it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.gpu_device import RawCoder
from benchmarks.measuring import NotHere, Settings, Spread
from benchmarks.results import Plot, Report
from benchmarks.states import State, build_state
from dcp_nvcomp.codecs import Planes
from dcp_nvcomp.codecs.coders import ANS_DATA_TYPES
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from tests.codecs import planes_reference

SLICES = tuple(1 << power for power in range(16, 23))
EXPONENT_CODERS: dict[str, dict[str, Any]] = {
    "Deflate 0": {"algorithm": "Deflate", "algorithm_type": 0},
    "GDeflate 0": {"algorithm": "GDeflate", "algorithm_type": 0},
}
ANS_STATES = (1, 2)


def exponents(state: State, dtype: torch.dtype) -> torch.Tensor:
    """The exponent plane of all floats of this type."""
    codec = Planes(dtype.itemsize)
    planes = []
    for tensor in state.values():
        if tensor.dtype == dtype:
            _, split = planes_reference.split(tensor.view(torch.uint8).reshape(-1), codec, pack=False)
            planes.append(split["exponent"])
    return torch.cat(planes)


def measure(report: Report, device: Device, coders: dict[str, dict[str, Any]] | None = None) -> None:
    """Fill a table with all combinations."""
    settings = report.settings
    repeats = settings.repeats_or(7)
    state = build_state(settings.nbytes_or(512 << 20), settings.state, device=device.torch_device)
    table = report.table(
        "slices",
        f"nvCOMP's coders alone on {device.torch_device}, GB/s of whole floats: median (lowest-highest) of {repeats}",
        dtype=("dtype", ""),
        coder=("coder", ""),
        slice_kib=("slice, KiB", "d"),
        ratio=("ratio", ".3f"),
        encode_rate=("encode, GB/s", ".1f"),
        decode_rate=("decode, GB/s", ".1f"),
    )
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        plane = exponents(state, dtype)
        whole = torch.cat([t.view(torch.uint8).reshape(-1) for t in state.values() if t.dtype == dtype])
        work: list[tuple[str, dict[str, Any], torch.Tensor]] = [
            (coder, options, plane) for coder, options in (EXPONENT_CODERS if coders is None else coders).items()
        ]
        for states in ANS_STATES:
            options = {"algorithm": "ANS", "data_type": ANS_DATA_TYPES[name], "states_per_lane": states}
            work.append((f"ANS, {states} state{'s' if states > 1 else ''}", options, whole))
        for coder, options, data in work:
            for slice_nbytes in SLICES[::3] if settings.quick else SLICES:
                settings.say(f"{name}, {coder}, slices of {slice_nbytes >> 10} KiB")
                stored, encode, decode = RawCoder(device, slice_nbytes, **options).measure(data, repeats)
                table.add(
                    dtype=name,
                    coder=coder,
                    slice_kib=slice_nbytes >> 10,
                    ratio=whole.numel() / (whole.numel() - data.numel() + stored),
                    encode_rate=Spread(tuple(encode)).rate(whole.numel() / 1e9),
                    decode_rate=Spread(tuple(decode)).rate(whole.numel() / 1e9),
                )
    for cell in ("ratio", "encode_rate", "decode_rate"):
        for dtype in ("bfloat16", "float32"):
            series: dict[str, list[tuple[int, Any]]] = {}
            for row in table.rows:
                if row["dtype"] == dtype:
                    series.setdefault(row["coder"], []).append((row["slice_kib"], row[cell]))
            label = "ratio" if cell == "ratio" else "GB/s of floats"
            report.plots.append(Plot(f"{dtype}: {cell.replace('_', ' ')}", "slice, KiB", label, series, log_x=True))


def run(settings: Settings) -> Report:
    """Measure on the GPU."""
    reason = cuda_unavailable_reason()
    if reason is not None:
        raise NotHere(reason)
    report = Report("slices", settings)
    device = CudaDevice(torch.device("cuda"))
    measure(report, device)
    return report


if __name__ == "__main__":
    from benchmarks.__main__ import app

    sys.argv.insert(1, "slices")
    app(prog_name="python -m benchmarks")

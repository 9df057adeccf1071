"""Step: the coders alone, by slice size and by how many slices one call has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from benchmarks.gpu_acceptance.host import Host
from benchmarks.gpu_acceptance.literals import rates
from benchmarks.gpu_acceptance.made import exponents, moments, weights
from benchmarks.gpu_acceptance.results import Probe
from benchmarks.gpu_device import RawCoder
from benchmarks.measuring import Spread
from benchmarks.slices import EXPONENT_CODERS
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.literals import LiteralCoders

_KIB = 1 << 10
_COUNTS = (32, 132, 528, 2112, 8448)
_SMALL_COUNTS = (2, 8)
_SLICES = (128 * _KIB, 64 * _KIB, 32 * _KIB)
_ANS_SLICES = (1024 * _KIB, 256 * _KIB)
_MOST_NBYTES = 1 << 30
_MADE = {"ANS <f2": weights, "ANS <f4": moments}


def probes(host: Host) -> Iterator[Probe]:
    device = cache(host.device)
    ours = cache(lambda: host.device(compiled=True))
    coders = cache(lambda: LiteralCoders(ours()))
    # what the writer's defaults are first: the time may end before they do
    for slice_nbytes in _SLICES:
        if slice_nbytes in host.pick(_SLICES, _SLICES[-1:]):
            yield f"ours, {slice_nbytes >> 10} KiB", partial(_ours, host, ours, coders, slice_nbytes)
        if slice_nbytes == _SLICES[0]:
            for data_type in ("<f2", "<f4"):
                for ans_nbytes in _ANS_SLICES:
                    options = {"algorithm": "ANS", "data_type": data_type}
                    yield _probe(host, device, f"ANS {data_type}", ans_nbytes, options)
    for name, options in EXPONENT_CODERS.items():
        if host.stand_in and name.startswith("GDeflate"):
            continue  # no CPU library has GDeflate
        for slice_nbytes in _SLICES:
            yield _probe(host, device, name, slice_nbytes, options)


def _probe(host: Host, device: Callable[[], Device], name: str, slice_nbytes: int, options: Mapping[str, Any]) -> Probe:
    return f"{name}, {slice_nbytes >> 10} KiB", partial(_coder, host, device, name, slice_nbytes, options)


def _counts(host: Host, slice_nbytes: int) -> list[int]:
    return [count for count in host.pick(_COUNTS, _SMALL_COUNTS) if count * slice_nbytes <= _MOST_NBYTES]


def _row(name: str, slice_nbytes: int, count: int, measured: tuple[int, list[float], list[float]]) -> dict[str, Any]:
    stored, encode, decode = measured
    nbytes = count * slice_nbytes
    return {
        "coder": name,
        "slice_kib": slice_nbytes >> 10,
        "slices": count,
        "ratio": nbytes / stored,
        "encode_rate": Spread(tuple(encode)).rate(nbytes / 1e9),
        "decode_rate": Spread(tuple(decode)).rate(nbytes / 1e9),
    }


def _coder(
    host: Host, device: Callable[[], Device], name: str, slice_nbytes: int, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    rows = []
    for count in _counts(host, slice_nbytes):
        data = _MADE.get(name, exponents)(count * slice_nbytes, host.torch_device)
        measured = RawCoder(device(), slice_nbytes, **options).measure(data, host.pick(5, 1))
        rows.append(_row(name, slice_nbytes, count, measured))
    return {"rows": {"raw": rows}}


def _ours(
    host: Host, device: Callable[[], Device], coders: Callable[[], LiteralCoders], slice_nbytes: int
) -> Mapping[str, Any]:
    rows = []
    for count in _counts(host, slice_nbytes):
        measured = rates(host, device(), coders(), slice_nbytes, count, host.pick(5, 1))
        rows.append(_row("ours", slice_nbytes, count, measured))
    return {"rows": {"raw": rows}}

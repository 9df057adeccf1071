"""What was measured of zstd on each kind of GPU: nvCOMP beside our own kernels.

`zstd_rates.json` has for each GPU, by the name that its driver gives it, the rates in bytes of slices per second. Only
`python -m benchmarks.gpu_rates` writes it, from a run of benchmarks.gpu_acceptance on such a GPU.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

RATES_NAME = "zstd_rates.json"


@functools.cache
def _rates() -> dict[str, Any]:
    text = importlib.resources.files("dcp_nvcomp.engines.cuda").joinpath(RATES_NAME).read_text(encoding="utf-8")
    rates: dict[str, Any] = json.loads(text)
    return rates


def faster_literals(gpu: str) -> frozenset[str]:
    """Return the directions, `"encode"` and `"decode"`, in which our kernels were measured to be faster on a GPU."""
    measured = _rates().get(gpu, {})
    return frozenset(direction for direction, rates in measured.items() if rates["literals"] > rates["nvcomp"])

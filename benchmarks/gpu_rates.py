"""Keep in the package what a run of benchmarks.gpu_acceptance measured of zstd on a GPU: nvCOMP, and our own kernels.

    python -m benchmarks.gpu_rates     # from benchmarks/results/gpu-acceptance.json to the package's zstd_rates.json

`cuda_zstd="auto"` decides by it; see dcp_nvcomp/engines/cuda/slice_coders.py. Compared are the coders alone on
slices as the writer cuts them, many at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance.results import median_of
from benchmarks.gpu_pages import RESULT_NAME, checked_result
from dcp_nvcomp.codecs.coders import DEFAULT_SLICE_NBYTES
from dcp_nvcomp.engines.cuda.slice_coders import RATES_NAME

__all__ = ["main", "rates_of"]

ROOT = Path(__file__).resolve().parent.parent
_PACKAGE_RATES = ROOT / "dcp_nvcomp" / "engines" / "cuda" / RATES_NAME
_NAMES = {"nvcomp": "Zstd", "literals": "ours"}
_SLICE_KIB = DEFAULT_SLICE_NBYTES >> 10


def rates_of(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the rates of both in each direction, in bytes a second.

    Args:
        result: of an acceptance run on a GPU.

    Raises:
        ValueError: it did not measure both.
    """
    rows = [row for row in result["tables"].get("raw", {}).get("rows", []) if row["slice_kib"] == _SLICE_KIB]
    best: dict[str, dict[str, float]] = {"encode": {}, "decode": {}}
    for who, name in _NAMES.items():
        own = [row for row in rows if row["coder"] == name]
        if not own:
            raise ValueError(f"{name} was not measured on slices of {_SLICE_KIB} KiB: run the step `raw`.")
        most = max(own, key=lambda row: row["slices"])
        for direction, found in best.items():
            found[who] = 1e9 * median_of(most[f"{direction}_rate"])
    return best


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    result = checked_result(parser.parse_args().results)
    if result is None:
        parser.error(f"there is no {RESULT_NAME}: run benchmarks.gpu_acceptance on a GPU first")
    kept = json.loads(_PACKAGE_RATES.read_text())
    kept[result["machine"]["gpu"]] = rates_of(result)
    _PACKAGE_RATES.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

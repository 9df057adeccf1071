"""Where an engine's time goes on a GPU: its kernels, how long the GPU is busy, and the gaps between.

    python -m benchmarks.gpu_acceptance.timeline --out DIR [--stand-in]

Writes timeline.json after each measurement, and traces for chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import made_state
from benchmarks.gpu_codecs import EngineWork
from benchmarks.gpu_device import host_memory
from benchmarks.measuring import invocation, machine, versions
from benchmarks.states import nbytes_of
from dcp_nvcomp.engines.cuda.engine import EnginePolicy

_GAP_MICROSECONDS = 50
_TOP = 14


def _events(profile: Any) -> list[tuple[float, float, str]]:
    """Return what ran on the GPU, in order of time: start and end in microseconds, and its name."""
    found = [(one.time_range.start, one.time_range.end, one.name) for one in profile.events() if _on_gpu(one)]
    return sorted(found)


def _on_gpu(event: Any) -> bool:
    return "CUDA" in str(event.device_type)


def _row(nbytes: int, wall_seconds: float, events: list[tuple[float, float, str]]) -> dict[str, Any]:
    busy = latest = 0.0
    gaps: list[float] = []
    spent: dict[str, list[float]] = {}
    for start, end, name in events:
        spent.setdefault(name[:60], []).append(end - start)
        if latest and start > latest:
            gaps.append(start - latest)
        busy += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    top = sorted(spent.items(), key=lambda item: -sum(item[1]))[:_TOP]
    return {
        "rate": nbytes / wall_seconds / 1e9,
        "wall_milliseconds": wall_seconds * 1e3,
        "busy_milliseconds": busy / 1e3,
        "long_gaps": sum(gap > _GAP_MICROSECONDS for gap in gaps),
        "gaps_milliseconds": sum(gaps) / 1e3,
        "kernels": {name: {"count": len(all_of), "milliseconds": sum(all_of) / 1e3} for name, all_of in top},
    }


def _measured(host: Host, nbytes: int, run: Callable[[], Any], trace: Path | None) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not host.stand_in:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(2):
        run()
    host.synchronize()
    start = time.perf_counter()
    run()
    host.synchronize()
    wall_seconds = time.perf_counter() - start
    with torch.profiler.profile(activities=activities) as profile:
        run()
        host.synchronize()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    return _row(nbytes, wall_seconds, _events(profile))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--stand-in", action="store_true", help="run it small, on the CPU stand-in for a GPU")
    options = parser.parse_args()
    host = Host(options.stand_in)
    state = made_state(host.pick(1024, 3) * MIB, host.torch_device)
    nbytes = nbytes_of(state)
    arena = host_memory(nbytes * 5 // 4 + 64 * MIB, host.torch_device)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"quick": host.stand_in, **invocation([]), "machine": machine(), "versions": versions()}
    found |= {"nbytes": nbytes, "stand_in": host.stand_in, "rows": {}}
    policy = EnginePolicy(host.pick(4096, 64) * MIB)
    work = EngineWork(state, "auto", host.device(), host.pick(160, 1) * MIB, arena, policy)
    ways = {"encode, 1 engine": work.encode, "decode, 1 engine": work.decode}
    ways["encode, 2 engines"] = work.encode_overlapped
    for name, run in ways.items():
        trace = options.out / "trace.json.gz" if name == "encode, 2 engines" else None
        try:
            row = _measured(host, nbytes, run, trace)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        found["rows"][name] = row
        (options.out / "timeline.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()

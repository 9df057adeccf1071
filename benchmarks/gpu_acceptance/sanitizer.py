"""Step: our kernels under compute-sanitizer, which sees accesses outside of memory and races in shared memory.

torch gets its memory straight from CUDA meanwhile: in a pool, what lies beside a tensor is valid memory too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance.host import ROOT, Host
from benchmarks.gpu_acceptance.results import Probe, Skipped

_TOOLS = ("memcheck", "racecheck")
_SECONDS = 45.0
_FOUND = 86  # the exit status that the tool is asked for
_WORKLOAD = (sys.executable, "-m", "benchmarks.gpu_acceptance.sanitized")


def probes(host: Host) -> Iterator[Probe]:
    yield "without a tool", partial(_run, host, [])
    for tool in _TOOLS:
        yield tool, partial(_checked, host, tool)


def _sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home, "bin", "compute-sanitizer") for home in homes if home]
    return found or next((str(path) for path in candidates if path.exists()), None)


def _checked(host: Host, tool: str) -> Mapping[str, Any]:
    path = _sanitizer()
    if path is None or host.stand_in:
        raise Skipped("compute-sanitizer is not installed here" if path is None else "the stand-in has no kernels")
    return _run(host, [path, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20"])


def _run(host: Host, prefix: list[str]) -> Mapping[str, Any]:
    command = [*prefix, *_WORKLOAD, *["--stand-in"] * host.stand_in]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    output = done.stdout + done.stderr
    if done.returncode == _FOUND:
        raise AssertionError(f"the tool found errors:\n{output[-3000:]}")
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}:\n{output[-3000:]}")
    return {"summary": re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output), "output": output[-500:]}

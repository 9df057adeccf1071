"""The compiled kernels of the CPU engine: a host that has only this repository and wheels has none."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from pathlib import Path

__all__ = ["build_cpu_kernels", "missing_cpu_kernels"]

ROOT = Path(__file__).resolve().parents[2]

_KERNELS = [
    "dcp_nvcomp.codecs.transforms._planes",
    "dcp_nvcomp.codecs.coders._literals",
    *(["dcp_nvcomp.codecs._planes_literals"] if platform.machine() == "x86_64" else []),
]


def missing_cpu_kernels() -> list[str]:
    """Return the names of the kernels that are not built for this interpreter, or do not load in it."""
    return [name for name in _KERNELS if not _loads(name)]


def _loads(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def build_cpu_kernels(seconds: float) -> str:
    """Build them in place if they are missing; returns what there is to say about it.

    Args:
        seconds: the time that it may take.
    """
    if not missing_cpu_kernels():
        return "the CPU engine's kernels are built"
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "building the CPU engine's kernels took too long"
    importlib.invalidate_caches()
    if missing_cpu_kernels():
        return f"the CPU engine's kernels could not be built: {(done.stdout + done.stderr)[-500:].strip()}"
    return "the CPU engine's kernels were built"

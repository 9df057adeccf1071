"""Step: what is installed and imports, what compiles, what the GPU is, and how fast it copies."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_acceptance.build import missing_cpu_kernels
from benchmarks.gpu_acceptance.host import MIB, ROOT, Host
from benchmarks.gpu_acceptance.results import Probe, Skipped
from benchmarks.gpu_device import DeviceClock, host_memory
from benchmarks.measuring import Spread, machine, versions
from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, kernel_source
from dcp_nvcomp.engines.cuda.literals import LITERALS_KERNELS, LITERALS_OPTIONS, LITERALS_SOURCES
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason, load_cupy

# Each with the distributions that may bring it.
_MODULES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x"),
    "nvidia.nvcomp": ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12"),
    "zstandard": ("zstandard",),
    "crc32c": ("crc32c",),
    "xxhash": ("xxhash",),
    "fsspec": ("fsspec",),
    "pytest": ("pytest",),
    "hypothesis": ("hypothesis",),
}
_ONLY_ON_A_GPU = ("cupy", "nvidia.nvcomp")


def probes(host: Host) -> Iterator[Probe]:
    yield "machine", lambda: {"facts": {"machine": machine(), "versions": versions()}}
    for module, packages in _MODULES.items():
        yield f"import {module}", partial(_import, host, module, packages)
    yield "compiled kernels of the CPU engine", _cpu_kernels
    yield "gpu", partial(_gpu, host)
    yield "the engine can run", partial(_available, host)
    yield "warnings as errors", partial(_warnings_as_errors, host)
    yield "kernels", partial(_kernels, host)
    yield "copies", partial(_copies, host)


def _import(host: Host, module: str, packages: tuple[str, ...]) -> Mapping[str, Any]:
    start = time.perf_counter()
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        if host.stand_in and module in _ONLY_ON_A_GPU:
            raise Skipped("the stand-in replaces it") from None
        raise
    found: dict[str, Any] = {"import_seconds": time.perf_counter() - start}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_kernels() -> Mapping[str, Any]:
    """Report which kernels are missing: the run has tried to build them before it began."""
    missing = missing_cpu_kernels()
    if missing:
        raise Skipped(f"{', '.join(missing)} could not be built: numpy and libzstd do the work")
    return {}


def _gpu(host: Host) -> Mapping[str, Any]:
    if host.stand_in:
        raise Skipped("the stand-in is a CPU")
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    found = {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "total_nbytes": total,
        "free_nbytes": free,
        "count": torch.cuda.device_count(),
        "torch_cuda": torch.version.cuda,
        "driver_cuda": _driver_version(),
    }
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit",
        "--format=csv,noheader",
    ]
    try:
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia_smi"] = str(error)
    return found


def _driver_version() -> str:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _available(host: Host) -> Mapping[str, Any]:
    reason = cuda_unavailable_reason()
    if host.stand_in:
        raise Skipped(f"the stand-in is a CPU; CUDA: {reason}")
    if reason is not None:
        raise RuntimeError(reason)
    return {}


def _warnings_as_errors(host: Host) -> Mapping[str, Any]:
    """Look for the GPU under `-W error`: a package that warns when it is imported must not make it unavailable."""
    program = "from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason as why; print(why())"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    if done.returncode or (not host.stand_in and done.stdout.strip() != "None"):
        raise RuntimeError(f"{done.stdout}{done.stderr[-2000:]}")
    return {"reason": done.stdout.strip()}


def _kernels(host: Host) -> Mapping[str, Any]:
    """Compile our kernels, and record their registers and memory."""
    if host.stand_in:
        raise Skipped("the step kernels compiles them as C++")
    start = time.perf_counter()
    host.device()
    found: dict[str, Any] = {"device_seconds": time.perf_counter() - start}
    texts = (
        (("blocks.cu",), KERNEL_OPTIONS, ("inspect_blocks", "split_blocks", "merge_blocks", "copy_pieces")),
        (LITERALS_SOURCES, LITERALS_OPTIONS, LITERALS_KERNELS),
    )
    for sources, options, names in texts:
        start = time.perf_counter()
        module = load_cupy().RawModule(code=kernel_source(*sources), options=tuple(options))
        for name in names:
            attributes = module.get_function(name).attributes
            found[name] = {
                "registers": attributes["num_regs"],
                "local_nbytes": attributes["local_size_bytes"],
                "shared_nbytes": attributes["shared_size_bytes"],
                "most_threads": attributes["max_threads_per_block"],
            }
        found[f"{sources[0]}, compile_seconds"] = time.perf_counter() - start
    return found


def _copies(host: Host) -> Mapping[str, Any]:
    """Measure plain copies, the ceilings of everything else."""
    device, nbytes = host.torch_device, host.pick(1024, 8) * MIB
    memory, other = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    pinned, plain = host_memory(nbytes, device), torch.zeros(nbytes, dtype=torch.uint8)
    ways: dict[str, Callable[[], Any]] = {
        "GPU to pinned memory": lambda: pinned.copy_(memory, non_blocking=True),
        "pinned memory to GPU": lambda: memory.copy_(pinned, non_blocking=True),
        "GPU to ordinary memory": lambda: plain.copy_(memory),
        "on the GPU, read and written": lambda: other.copy_(memory),
    }
    rows = []
    for what, copy in ways.items():
        clock, seconds = DeviceClock(device), []
        for _ in range(4):
            with clock.running():
                copy()
            seconds.append(clock.take())
        moved = nbytes * (2 if "read and written" in what else 1)
        rows.append({"what": what, "rate": Spread(tuple(seconds[1:])).rate(moved / 1e9)})
    return {"rows": {"copies": rows}}

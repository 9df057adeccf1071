"""What the kernels take of a GPU, as its compiler says: registers, shared memory, spills.

    python -m tests.engines.kernel_resources --nvrtc libnvrtc.so.12 --json benchmarks/results/kernels.json

Compiles all programs with NVRTC for every kind of GPU that they are for, and fails if there is a warning. No GPU is
needed. `--nvrtc` names further versions of the library beside the one that is installed, as often as needed, such as

    pip install --no-deps --target DIR nvidia-cuda-nvrtc-cu12==12.9.*      # libnvrtc.so.12 is in it
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, kernel_source
from dcp_nvcomp.engines.cuda.hashing import HASH_NAMES, HASH_OPTIONS, HASH_SOURCES
from dcp_nvcomp.engines.cuda.literals import LITERALS_KERNELS, LITERALS_OPTIONS, LITERALS_SOURCES

__all__ = ["ARCHITECTURES", "PROGRAMS", "Resources", "compile_to_cubin", "load_nvrtc", "resources_of"]

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# By name: files of kernels/, options, kernels.
PROGRAMS = {
    "blocks": (("blocks.cu",), KERNEL_OPTIONS, ("inspect_blocks", "split_blocks", "merge_blocks", "copy_pieces")),
    "literals": (LITERALS_SOURCES, LITERALS_OPTIONS, LITERALS_KERNELS),
    "hash": (HASH_SOURCES, HASH_OPTIONS, HASH_NAMES),
}

_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<used>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What a kernel takes.

    Attributes:
        registers: of a thread.
        shared_nbytes: of a thread block.
        stack_nbytes: of a thread, in local memory.
        spilled_nbytes: how much of that is registers that did not fit, stored and loaded.
    """

    registers: int
    shared_nbytes: int
    stack_nbytes: int
    spilled_nbytes: int


def resources_of(nvrtc: ctypes.CDLL, program: str, architecture: str) -> dict[str, Resources]:
    """Return what each kernel of a program takes.

    Raises:
        ValueError: it does not compile, or with a warning.
    """
    sources, options, names = PROGRAMS[program]
    arguments = [*options, f"-arch={architecture}", "--ptxas-options=-v"]
    _, log = compile_program(nvrtc, kernel_source(*sources), arguments)
    if "warning" in log:
        raise ValueError(log)
    found = {}
    for entry in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["used"])
        found[entry["kernel"]] = Resources(
            registers=int(entry["registers"]),
            shared_nbytes=int(shared[1]) if shared else 0,
            stack_nbytes=int(entry["stack"]),
            spilled_nbytes=int(entry["stores"]) + int(entry["loads"]),
        )
    assert sorted(found) == sorted(names), log
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What the kernels take of a GPU, as its compiler says.")
    parser.add_argument("--nvrtc", action="append", default=[], help="a library beside the installed one")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    installed = load_nvrtc()
    assert installed is not None
    rows: list[dict[str, Any]] = []
    for nvrtc in (installed, *map(ctypes.CDLL, arguments.nvrtc)):
        for program in PROGRAMS:
            for architecture in ARCHITECTURES:
                for kernel, resources in resources_of(nvrtc, program, architecture).items():
                    where = {"nvrtc": version_of(nvrtc), "program": program, "architecture": architecture}
                    rows.append({**where, "kernel": kernel, **asdict(resources)})
    rows.sort(key=lambda row: (row["nvrtc"], row["program"], row["kernel"], int(row["architecture"][3:])))
    content = {
        "what": "what ptxas reports while NVRTC compiles (--ptxas-options=-v); no GPU was used",
        "command": f"python -m tests.engines.kernel_resources --nvrtc libnvrtc.so.12 --json {arguments.json}",
        "options": {name: " ".join(options) for name, (_, options, _) in PROGRAMS.items()},
    }
    arguments.json.write_text(_text(content, rows))


def _text(content: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return JSON with a line for each kernel."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return json.dumps(content, indent=1).removesuffix("\n}") + f',\n "kernels": [\n  {lines}\n ]\n}}\n'


# ---- NVRTC, NVIDIA's run-time compiler -------------------------------------------------------------------------------

_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def load_nvrtc() -> ctypes.CDLL | None:
    """NVRTC from its pip package, or None where none is installed."""
    for package in _PACKAGES:
        try:
            names = files(package) or []
        except PackageNotFoundError:
            continue
        for name in names:
            if name.name.startswith("libnvrtc.so"):
                return ctypes.CDLL(str(name.locate()))
    return None


def version_of(nvrtc: ctypes.CDLL) -> str:
    """Return the version of CUDA that NVRTC is of, such as `13.0`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def compile_to_cubin(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    """Return machine code for the architecture that the options name.

    Raises:
        ValueError: the source does not compile; the message is the compiler's.
    """
    return compile_program(nvrtc, source, options)[0]


def compile_program(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Return machine code, and what the compiler said of it.

    Raises:
        ValueError: the source does not compile; the message is the compiler's.
    """
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    log = _content(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
    if status:
        raise ValueError(log)
    cubin = _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


def _content(get_nbytes: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    nbytes = ctypes.c_size_t()
    _check(get_nbytes(program, ctypes.byref(nbytes)))
    content = ctypes.create_string_buffer(nbytes.value)
    _check(get(program, content))
    return content.raw


def _check(status: int) -> None:
    assert status == 0, f"NVRTC returned {status}"


if __name__ == "__main__":
    main()

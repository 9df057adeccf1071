"""Compile CUDA kernels for a CPU: as a library for this process, or as a program that finds races."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

__all__ = ["CHECKED", "RacesBuild", "build_library", "compiler", "kernel_names"]

_HERE = Path(__file__).parent

# NVCC does not take two pointers for different ones by their types, as C++ may
_OPTIONS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-I", str(_HERE))
# GPUs unroll; and not every text needs all that it shares with others
_KERNEL_OPTIONS = ("-Wno-unknown-pragmas", "-Wno-unused-function")

# undefined behaviour ends the process; a misaligned access is some too
CHECKED: Final = ("-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")


def compiler() -> str | None:
    """Return a C++ compiler, or None."""
    if sys.platform != "linux":  # elsewhere the fibers and the thread-local memory are different
        return None
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def kernel_names(source: str) -> list[str]:
    """Return the names of the kernels of a CUDA text."""
    without_bounds = re.sub(r"__launch_bounds__\([^)]*\)", "", source)
    return re.findall(r"__global__\s+void\s+(\w+)", without_bounds)


def build_library(folder: Path, source: str, options: Sequence[str], checks: Sequence[str] = CHECKED) -> ctypes.CDLL:
    """Return a CUDA text as a library that runs its kernels.

    Args:
        folder: where the library goes.
        source: the text, as NVRTC gets it.
        options: NVRTC's options.
        checks: how the C++ compiler optimises and checks it.
    """
    text, library = folder / "kernels.cpp", folder / "kernels.so"
    text.write_text(_translation_unit(source))
    objects = [folder / "kernels.o", folder / "scheduler.o"]
    _compile("-fPIC", *_OPTIONS, *_KERNEL_OPTIONS, *checks, *options, "-c", text, "-o", objects[0])
    _compile("-fPIC", *_OPTIONS, "-O2", "-c", _HERE / "scheduler.cpp", "-o", objects[1])
    _compile("-shared", *objects, "-o", library)
    return ctypes.CDLL(str(library))


class RacesBuild:
    """Programs that run kernels under ThreadSanitizer; what they have in common is compiled once.

    Args:
        folder: where everything goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix: list[str] | None = None

    @cached_property
    def _common(self) -> list[Path]:
        objects = []
        for name in ("scheduler", "races"):
            objects.append(self._folder / f"{name}.o")
            _compile(*_OPTIONS, "-O1", "-g1", "-DEMULATION_RACES", "-c", _HERE / f"{name}.cpp", "-o", objects[-1])
        return objects

    def program(self, name: str, source: str, options: Sequence[str]) -> list[str]:
        """Return the command that starts the program for a CUDA text.

        Args:
            name: of the files that are made.
            source: the text.
            options: NVRTC's options.
        """
        text, made, program = (self._folder / f"{name}{suffix}" for suffix in (".cpp", ".o", ""))
        text.write_text(_translation_unit(source))
        # not optimised, so that no access to memory is left out
        common = (*_OPTIONS, *_KERNEL_OPTIONS, "-O0", "-g1", "-DEMULATION_RACES", "-fsanitize=thread")
        _compile(*common, *options, "-c", text, "-o", made)
        _compile("-fsanitize=thread", "-pthread", *self._common, made, "-o", program)
        if self._prefix is None:
            self._prefix = _prefix_of(program)
        return [*self._prefix, str(program)]


def _prefix_of(program: Path) -> list[str]:
    """What has to stand before it: ThreadSanitizer of some compilers does not start at too random addresses."""
    for prefix in ([], ["setarch", "-R"]):
        done = subprocess.run([*prefix, program], capture_output=True, text=True, check=False)
        if done.stderr.startswith("usage: races"):
            return prefix
    raise OSError(f"ThreadSanitizer does not run here:\n{done.stderr}")


def _translation_unit(source: str) -> str:
    # without a name its functions are this text's own, though other texts have some of the same name
    kernels = "".join(f"EMULATED_KERNEL({name});\n" for name in kernel_names(source))
    return f'#include "emulation.hpp"\nnamespace {{\n#line 1 "kernels.cu"\n{source}\n}}\n{kernels}'


def _compile(*arguments: str | Path) -> None:
    path = compiler()
    assert path is not None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, arguments))}\n{done.stderr}")

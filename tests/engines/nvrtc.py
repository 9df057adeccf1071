"""NVIDIA's run-time compiler through ctypes: what CuPy compiles with, and it needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from typing import Any

__all__ = ["compile_program", "compile_to_cubin", "load_nvrtc", "version_of"]

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

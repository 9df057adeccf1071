"""NVIDIA's run-time compiler through ctypes: what CuPy compiles with, and it needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files

__all__ = ["compile_to_cubin", "load_nvrtc"]

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


def compile_to_cubin(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    """Machine code for the architecture that the options name.

    Raises:
        ValueError: the source does not compile; the message is the compiler's.
    """
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    if status:
        nbytes = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(nbytes)))
        log = ctypes.create_string_buffer(nbytes.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise ValueError(log.value.decode())
    nbytes = ctypes.c_size_t()
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(nbytes)))
    cubin = ctypes.create_string_buffer(nbytes.value)
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _check(status: int) -> None:
    assert status == 0, f"NVRTC returned {status}"

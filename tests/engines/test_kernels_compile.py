"""The kernels compile for the GPUs that this package is for, with the compiler and the options that CuPy uses."""

from __future__ import annotations

import ctypes
import sys

import pytest

from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, kernel_source
from dcp_nvcomp.engines.cuda.literals import LITERALS_KERNELS, LITERALS_OPTIONS, LITERALS_SOURCES

from .nvrtc import compile_to_cubin, load_nvrtc


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    library = load_nvrtc()
    if library is None:
        # the `test` extra brings it on Linux, so its absence there is a broken set-up and no reason to skip
        assert sys.platform != "linux", "nvidia-cuda-nvrtc is not installed: pip install 'dcp-nvcomp[test]'"
        pytest.skip("NVRTC is installed on Linux only")
    return library


PROGRAMS = {
    "blocks": (("blocks.cu",), KERNEL_OPTIONS, ("inspect_blocks", "split_blocks", "merge_blocks", "copy_pieces")),
    "literals": (LITERALS_SOURCES, LITERALS_OPTIONS, LITERALS_KERNELS),
}


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiles(nvrtc: ctypes.CDLL, program: str, architecture: str) -> None:
    sources, options, names = PROGRAMS[program]
    cubin = compile_to_cubin(
        nvrtc, kernel_source(*sources), [*options, f"-arch={architecture}", "-Werror=all-warnings"]
    )
    assert cubin.startswith(b"\x7fELF")
    for name in names:
        assert name.encode() in cubin


def test_a_broken_source_is_refused(nvrtc: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="error"):
        compile_to_cubin(nvrtc, kernel_source("blocks.cu") + "\n}", [*KERNEL_OPTIONS, "-arch=sm_90"])

"""The kernels compile for the GPUs that this package is for, with the compiler and the options that CuPy uses."""

from __future__ import annotations

import ctypes
import sys

import pytest

from dcp_nvcomp.engines.cuda.batches import THREADS
from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, kernel_source

from .kernel_resources import ARCHITECTURES, PROGRAMS, compile_to_cubin, load_nvrtc, resources_of


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    library = load_nvrtc()
    if library is None:
        # the `test` extra brings it on Linux, so its absence there is a broken set-up and no reason to skip
        assert sys.platform != "linux", "nvidia-cuda-nvrtc is not installed: pip install 'dcp-nvcomp[test]'"
        pytest.skip("NVRTC is installed on Linux only")
    return library


@pytest.mark.ci
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiles(nvrtc: ctypes.CDLL, program: str, architecture: str) -> None:
    sources, options, names = PROGRAMS[program]
    cubin = compile_to_cubin(
        nvrtc, kernel_source(*sources), [*options, f"-arch={architecture}", "-Werror=all-warnings"]
    )
    assert cubin.startswith(b"\x7fELF")
    for name in names:
        assert name.encode() in cubin


@pytest.mark.parametrize("program", PROGRAMS)
def test_registers_and_shared_memory(nvrtc: ctypes.CDLL, program: str) -> None:
    """A thread block fits onto any GPU, and no kernel spills registers."""
    for kernel, resources in resources_of(nvrtc, program, "sm_90").items():
        assert resources.registers * THREADS <= 65_536, kernel
        assert resources.shared_nbytes <= 48 << 10, kernel
        assert resources.spilled_nbytes == resources.stack_nbytes == 0, kernel


def test_a_broken_source_is_refused(nvrtc: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="error"):
        compile_to_cubin(nvrtc, kernel_source("blocks.cu") + "\n}", [*KERNEL_OPTIONS, "-arch=sm_90"])

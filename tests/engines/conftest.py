"""The kernels on a CPU, in both forms."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dcp_nvcomp.engines.cuda.device import Kernels

from .emulation.build import compiler
from .kernels_on_cpu import ReferenceKernels, compile_for_cpu, compile_literals_for_cpu, compiled_kernels


@pytest.fixture(scope="session")
def compiled_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if compiler() is None:
        pytest.skip("there is no C++ compiler, with which a CPU could run the kernels")
    folder: Path = tmp_path_factory.mktemp("kernels")
    return compile_for_cpu(folder)


@pytest.fixture(scope="session")
def literals_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if compiler() is None:
        pytest.skip("there is no C++ compiler, with which a CPU could run the kernels")
    return compile_literals_for_cpu(tmp_path_factory.mktemp("literals"))


@pytest.fixture(scope="session", params=["reference", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels as torch operations, and the real ones compiled as C++."""
    if request.param == "reference":
        return ReferenceKernels()
    library: ctypes.CDLL = request.getfixturevalue("compiled_library")
    return compiled_kernels(library)

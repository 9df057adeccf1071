"""The kernels on a CPU, in both forms."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from dcp_nvcomp.engines.cuda.device import Kernels
from dcp_nvcomp.engines.cuda.literals import LiteralCoders

from .emulation.build import compiler
from .kernels_on_cpu import ReferenceKernels, compile_for_cpu, compile_literals_for_cpu, compiled_kernels
from .literal_coding import GuardedDevice
from .literal_slices import exponent_planes


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


@pytest.fixture(scope="module")
def device(literals_library: ctypes.CDLL) -> GuardedDevice:
    return GuardedDevice(literals_library)


@pytest.fixture(scope="module")
def coders(device: GuardedDevice) -> LiteralCoders:
    return LiteralCoders(device)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture(scope="session")
def planes() -> list[np.ndarray]:
    """Exponent planes of real tensors in all types."""
    return list(exponent_planes().values())

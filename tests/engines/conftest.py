"""The kernels on a CPU, in both forms."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_nvcomp.engines import notices
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
def nothing_falls_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail where the engine leaves a block to the CPU; a test that expects that says so.

    The result would be right, and show nothing of the GPU. The engine logs it, as warnings are errors here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
    said = [record.getMessage() for record in caplog.get_records("call") if record.name == notices.__name__]
    assert not said, said


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture(scope="session")
def planes() -> list[np.ndarray]:
    """Exponent planes of real tensors in all types."""
    return list(exponent_planes().values())

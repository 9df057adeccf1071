"""literals*.cu, run thread by thread on a CPU: libzstd decodes what they encode, and they what any of ours encoded."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dcp_nvcomp.engines.cuda.literals import LiteralCoders
from tests.effort import THOROUGH

from .literal_coding import GuardedDevice, check, too_long
from .literal_slices import exponent_planes, made_slice

# compiled where there is a C compiler
pytest.importorskip("dcp_nvcomp.codecs.coders._literals")

U8 = np.ndarray


@pytest.fixture(scope="module")
def device(literals_library: ctypes.CDLL) -> GuardedDevice:
    return GuardedDevice(literals_library)


@pytest.fixture(scope="module")
def coders(device: GuardedDevice) -> LiteralCoders:
    return LiteralCoders(device)


@pytest.fixture(scope="module")
def planes() -> list[U8]:
    return list(exponent_planes().values())


def test_made_and_real_slices(device: GuardedDevice, coders: LiteralCoders, planes: list[U8]) -> None:
    random = np.random.default_rng(17)
    frames = slices = 0
    for _ in range(200 if THOROUGH else 2):
        encoded = check(device, coders, [made_slice(random, planes) for _ in range(100)])
        assert too_long(encoded) == 0
        frames += len(encoded.framed().frames)
        slices += len(encoded.slices)
    assert slices // 2 < frames < slices

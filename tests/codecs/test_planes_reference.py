"""The reference of the planes transform and the numpy code of the CPU engine make the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs.base import ScratchArrays
from dcp_nvcomp.codecs.transforms import Planes
from tests.codecs import planes_reference
from tests.effort import examples
from tests.engines.cases import SIGNS, floats


@settings(max_examples=examples(150), deadline=None)
@given(
    width=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 70) | st.sampled_from([1023, 4096]),
    signs=st.sampled_from(SIGNS),
    pack=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_same_planes_and_back(width: int, count: int, signs: str, pack: bool, seed: int) -> None:
    block, codec = floats(width, count, signs, seed), Planes(width, ("exponent",) if pack else ("rest", "exponent"))
    outputs = {plane.name: np.empty(plane.nbytes, np.uint8) for plane in codec.layout(block.size, 0, True)}
    flags = codec.split(block, list(outputs.values()))
    expected = {plane.name: outputs[plane.name][: plane.nbytes] for plane in codec.layout(block.size, flags, True)}

    found_flags, found = planes_reference.split(torch.from_numpy(block), codec, pack=pack)

    assert found_flags == flags
    assert list(found) == list(codec.plane_names)
    for name, plane in found.items():
        assert plane.numpy().tobytes() == expected[name].tobytes(), name
    assert planes_reference.merge(found, flags, codec).numpy().tobytes() == block.tobytes()
    again = np.empty_like(block)
    codec.merge([plane.contiguous().numpy() for plane in found.values()], flags, again, ScratchArrays())
    assert again.tobytes() == block.tobytes()


@pytest.mark.parametrize(("signs", "flags"), [("mixed", 0), ("positive", 1), ("negative", 3)])
def test_flags(signs: str, flags: int) -> None:
    block = torch.from_numpy(floats(4, 64, "positive", 1))
    if signs == "negative":
        block = block | torch.tensor([0, 0, 0, 0x80], dtype=torch.uint8).repeat(64)
    elif signs == "mixed":
        block[-1] |= 0x80
    assert planes_reference.split(block, Planes(4), pack=True)[0] == flags

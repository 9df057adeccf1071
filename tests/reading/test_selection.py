"""Indices select what NumPy's basic indexing does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_nvcomp.reading.stored_tensor import select


@st.composite
def arrays_and_indices(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    number = draw(st.integers(0, len(shape)))
    parts: list[Any] = []
    for dim in range(number):
        length = shape[dim]
        some = st.slices(length).filter(lambda one: one.step is None or one.step > 0)
        parts.append(draw(some if not length else some | st.integers(-length, length - 1)))
    has_ellipsis = draw(st.booleans())
    if has_ellipsis:
        parts.append(...)
        for dim in range(number, len(shape)):
            if draw(st.booleans()):
                rest = [slice(None)] * (len(shape) - dim)
                parts += rest
                break
    array = np.arange(int(np.prod(shape))).reshape(shape)
    index: Any = parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)
    return array, index


@given(arrays_and_indices())
def test_a_box_and_what_is_taken_of_it_are_numpys(case: tuple[np.ndarray[Any, Any], Any]) -> None:
    array, index = case
    selection = select(index, array.shape)
    box = array[selection.box.index]
    assert box.size == selection.box.elements
    assert np.array_equal(box[selection.taken], array[index])
    if selection.is_whole_box:
        assert box.shape == array[index].shape


@pytest.mark.parametrize("index", [[0, 1], None, True, 1.0, np.ones(3, bool), slice(None, None, -1), (0, [1])])
def test_other_indices_are_refused(index: Any) -> None:
    with pytest.raises(TypeError):
        select(index, (3, 3))


@pytest.mark.parametrize("index", [3, -4, (0, 0, 0), (..., ...), (0, 3), slice(0, 2, 0)])
def test_indices_that_are_out_of_range(index: Any) -> None:
    with pytest.raises(IndexError):
        select(index, (3, 3))

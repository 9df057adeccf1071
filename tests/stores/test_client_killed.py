"""A process is killed at each call of a save: the earlier checkpoint or the new one loads, and `clean` tidies up."""

from __future__ import annotations

import pytest

from tests.effort import sampled

from .children import run_killed
from .places import PART_NBYTES, Place


@pytest.mark.ci
def test_killed_at_each_call(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it or while it is under way, in turns: before one is after the one before."""
    place = place.with_nbytes(2 * PART_NBYTES + 800)
    names = run_killed(place, 1, None)
    assert names is not None and place.loaded() == 2
    number, found, left = 2, set(), set()
    for turn, at in enumerate(sampled(range(len(names)), 3)):
        number += 2
        run_killed(place, number - 1, at, within=bool(turn % 2))
        loaded = place.loaded()
        assert loaded in (number - 1, number), f"killed at call {at}, {names[at]}"
        found.add(loaded - number)
        left |= place.left()
    assert found == {-1, 0}, "it was never killed before, or never after, its checkpoint was there"
    assert left, "nothing was ever left, so nothing was cleaned"
    place.clean(monkeypatch)
    assert place.left() == set() and place.loaded() == loaded
    assert place.save(number + 1) is None and place.loaded() == number + 1
    assert len(place.names()) == 3

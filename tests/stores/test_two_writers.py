"""Two processes save to one path at the same time: what is there afterwards is of one of them, whole."""

from __future__ import annotations

from typing import Any

import pytest

from .children import run_two_writers
from .places import Place


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_the_survivor_is_one_of_the_two(place: Place, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.save(1000) is None
    survivors = []

    def look(number: int, outcomes: list[Any]) -> None:
        pair = (2 * number, 2 * number + 1)
        survivor = place.loaded()
        assert survivor in pair, f"round {number}: {outcomes}"
        assert None in outcomes, f"round {number}: neither saved: {outcomes}"
        for saved, outcome in zip(pair, outcomes, strict=True):
            if outcome is not None:  # whose answer was lost, or that came second at the same moment
                name, unknown, text = outcome
                assert name == "ConcurrentSaveError" and unknown, f"round {number}: {text}"
                assert survivor != saved, f"round {number}: {text}"
        survivors.append(survivor - pair[0])

    run_two_writers(place, rounds, seed=rounds, look=look)
    assert len(survivors) == rounds
    assert rounds < 100 or set(survivors) == {0, 1}, "one of them always won: they never competed"
    place.clean(monkeypatch)
    assert place.left() == set() and place.loaded() == 2 * rounds - 2 + survivors[-1]

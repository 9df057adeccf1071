"""Two processes save to one path at the same time: what is there afterwards is of one of them, whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_nvcomp.errors import ConcurrentSaveError

from .children import run_two_writers
from .places import Place


@pytest.mark.ci
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


@pytest.mark.ci
def test_one_of_many_wins_without_overwriting(place: Place) -> None:
    """Each publishes on connections of its own, at the same moment."""
    filesystems = [place.filesystem() for _ in range(3)]
    filesystems[0].create_directory()
    start = threading.Barrier(len(filesystems))

    def publish(number: int, name: str) -> bool:
        filesystems[number].publish(f"{name}-{number}", b"a file of its own")  # it has logged in now
        start.wait(120)
        try:
            filesystems[number].publish(name, bytes([number]), overwrite=False)
        except ConcurrentSaveError:
            return False
        return True

    with ThreadPoolExecutor(len(filesystems)) as pool:
        for round_ in range(40):
            name = f"metadata-{round_}"
            won = list(pool.map(publish, range(len(filesystems)), [name] * len(filesystems)))
            assert sum(won) == 1, won
            assert filesystems[0].read_all(name, limit_nbytes=10) == bytes([won.index(True)])
    assert not {name for name in place.names() if not name.startswith("metadata-")}

"""The room in a fast tier, beside what is being saved there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_nvcomp.runs.steps import StepNames
from dcp_nvcomp.runs.tiers.fast import FastTier, Room


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastTier:
    """A tier with 100 bytes left."""
    tier = FastTier(str(tmp_path), StepNames())
    monkeypatch.setattr(tier, "free_nbytes", lambda: 100)
    return tier


@pytest.fixture
def room(tier: FastTier) -> Room:
    return Room(tier, lambda: (), lambda event: None)


def _write(tier: FastTier, step: int, name: str, nbytes: int) -> None:
    place = Path(tier.path_of(step))
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(bytes(nbytes))


def test_what_is_still_to_be_written_is_no_room(tier: FastTier, room: Room) -> None:
    assert room.make(70)
    room.begun(5, 60)
    assert not room.make(70) and room.make(30)
    _write(tier, 5, "a.distcp", 50)
    assert room.make(70), "10 are still to be written"
    room.ended(5)
    assert room.make(99)


def test_of_a_step_that_is_saved_twice_each_save_counts(room: Room) -> None:
    room.begun(5, 60)
    room.begun(5, 60)
    assert room.make(0) is False
    room.ended(5)
    assert not room.make(70) and room.make(30)
    room.ended(5)
    assert room.make(99)


def test_what_lies_there_of_an_earlier_save_is_not_what_this_one_has_written(tier: FastTier, room: Room) -> None:
    _write(tier, 7, "old.distcp", 60)
    room.begun(7, 60)
    assert not room.make(70)
    _write(tier, 7, "new.distcp", 60)
    assert room.make(70)


def test_what_a_step_comes_to_is_known_before_its_copies_are_made(tier: FastTier, room: Room) -> None:
    room.begun(5, 90)
    _write(tier, 5, "a.distcp", 40)
    assert not room.make(60)
    room.expects(5, 50)
    assert room.make(60)

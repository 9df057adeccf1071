"""Data files written once, by version 0.1.0 and by what came after it, decode to what was put in, for ever."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.format.independent_reader import read_data_file
from tests.format.library import read_file, read_footer
from tests.format.make_golden import GOLDEN, INDEX, described

NAMES = list(json.loads(INDEX.read_text()))


def test_none_is_missing() -> None:
    assert {path.stem for path in GOLDEN.glob("*.distcp")} == set(NAMES)
    assert len(NAMES) >= 19


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reader", [read_file, read_data_file], ids=["library", "independent"])
def test_golden_file(name: str, reader: object) -> None:
    contents = reader((GOLDEN / f"{name}.distcp").read_bytes())  # type: ignore[operator]
    assert described(contents) == json.loads(INDEX.read_text())[name]


def test_the_files_use_what_they_are_there_for() -> None:
    """Coded and stored slices, packed rests of both signs: a reader that lacks one of them must fail here."""
    flags, coded, stored = set(), 0, 0
    for name in NAMES:
        footer = read_footer((GOLDEN / f"{name}.distcp").read_bytes())
        flags |= set(footer.tables.flags.tolist())
        sizes = footer.tables.slice_nbytes
        coded += int(np.sum(sizes % 16 != 0))
        stored += int(np.sum(sizes == 256))
    assert flags == {0, 1, 3}
    assert coded > 100
    assert stored > 10

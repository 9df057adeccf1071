"""Data files written once, by version 0.1.0 and by what came after it, decode to what was put in, for ever.

A file in git is never written again: that today's reader still reads it is what it is there for. `golden/index.json`
names, for each file, the SHA-256 of every record. `write_golden` is called once for each codec that is added.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_nvcomp.codecs import CodecChain
from tests.format.independent_reader import read_data_file
from tests.format.library import Contents, read_file, read_footer, write_file

GOLDEN = Path(__file__).parent / "golden"
INDEX = GOLDEN / "index.json"
NAMES = list(json.loads(INDEX.read_text()))


def described(contents: Contents) -> list[dict[str, Any]]:
    """What the index says of a file."""
    return [
        {
            "fqn": fqn,
            "offsets": list(offsets),
            "kind": kind,
            "dtype": dtype,
            "shape": list(shape),
            "global_shape": list(global_shape),
            "sha256": hashlib.sha256(elements).hexdigest(),
        }
        for (fqn, offsets), (kind, dtype, shape, global_shape, elements) in contents.items()
    ]


def write_golden(name: str, records: list[tuple[dict[str, Any], CodecChain, bytes]]) -> None:
    """Write one more golden file, of records as `write_file` takes them, none in a pack, and add it to the index."""
    path, index = GOLDEN / f"{name}.distcp", json.loads(INDEX.read_text())
    assert not path.exists(), "a golden file is never written again"
    data = write_file(records)
    contents = read_file(data)
    assert [one[4] for one in contents.values()] == [raw for *_, raw in records], "the index is of what was put in"
    path.write_bytes(data)
    index[name] = described(contents)
    lines = [
        f"{json.dumps(one)}: [\n" + ",\n".join(json.dumps(record) for record in index[one]) + "\n]"
        for one in sorted(index)
    ]
    INDEX.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_none_is_missing() -> None:
    assert {path.stem for path in GOLDEN.glob("*.distcp")} == set(NAMES)
    assert len(NAMES) >= 24


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
    assert {one & 0xFF for one in flags} == {0, 1, 3, 4, 5, 7, 12, 13, 15}
    assert any(one >> 8 for one in flags), "floats that were not as predicted"
    assert coded > 100
    assert stored > 10

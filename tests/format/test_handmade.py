"""A data file that only docs/format.md made: both readers take it, and agree on what is in it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from tests.format import independent_reader
from tests.format.forgery import SMALL_CONTENTS, small_forgery
from tests.format.library import read_file, read_footer


def test_the_library_reads_it() -> None:
    assert read_file(small_forgery().build()) == SMALL_CONTENTS


def test_the_independent_reader_reads_it() -> None:
    assert independent_reader.read_data_file(small_forgery().build()) == SMALL_CONTENTS


def test_where_the_blocks_lie() -> None:
    forgery = small_forgery()
    footer = read_footer(forgery.build())
    assert footer.block_offsets[0] == 64
    assert np.diff(footer.block_offsets).tolist() == [len(row[0]) for row in forgery.rows]
    assert footer.block_nbytes.tolist() == [len(row[2]) for row in forgery.rows]
    assert np.diff(footer.slice_starts).tolist() == [2, 1, 2, 0, 1]
    assert (footer.save_id, footer.file_id, footer.rank) == ("1" * 32, "2" * 32, 3)
    assert footer.record_encoded_nbytes(footer.records[0]) == len(forgery.rows[0][0]) + len(forgery.rows[1][0])
    assert footer.record_encoded_nbytes(footer.records[3]) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 63, 64, 65, 100_000])
def test_the_independent_crc(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert independent_reader.crc32c(data) == crc32c(data)


@pytest.mark.parametrize("what", ["encoded_crc", "uncompressed_crc", "footer_crc"])
def test_the_independent_reader_checks_every_crc(what: str) -> None:
    forgery = small_forgery()
    forgery.overrides[what] = 0 if what == "footer_crc" else [0] * len(forgery.rows)
    with pytest.raises(ValueError, match=what):
        independent_reader.read_data_file(forgery.build())


def test_the_independent_reader_is_short_and_independent() -> None:
    text = Path(independent_reader.__file__).read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert len(text.splitlines()) < 150
    assert imported == {"numpy", "zstandard", "zlib", "struct", "json"}

"""Tables fit the terminal: columns are left out, keys stay whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dcp_nvcomp.cli.output import Column, left, table_lines

COLUMNS = (left("key"), left("dtype", drop=2), Column("size", drop=1), Column("ratio"))


def lines(width: int, *keys: str) -> tuple[list[str], list[str]]:
    return table_lines(COLUMNS, [(key, "bfloat16", "12.3 MB", "1.500") for key in keys], width)


def test_all_columns_where_there_is_room() -> None:
    found, left_out = lines(80, "model.w", "b")
    assert found == [
        "key      dtype        size  ratio",
        "model.w  bfloat16  12.3 MB  1.500",
        "b        bfloat16  12.3 MB  1.500",
    ]
    assert left_out == []


def test_the_least_important_ones_are_left_out_first() -> None:
    assert lines(32, "model.w")[1] == ["dtype"]
    assert lines(20, "model.w")[1] == ["dtype", "size"]
    found, left_out = lines(10, "model.layers.0.weight")
    assert found[1] == "model.layers.0.weight  1.500", "keys are never folded or cut"
    assert left_out == ["dtype", "size"]


@given(st.lists(st.text("aé漢.", min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 100))
def test_lines_fit_unless_what_stays_does_not(keys: list[str], width: int) -> None:
    found, left_out = lines(width, *keys)
    longest = max(map(cell_len, found))
    assert longest <= width or left_out == ["dtype", "size"]
    for key, line in zip(keys, found[1:], strict=True):
        assert line.startswith(key)

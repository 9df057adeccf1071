"""Tables fit the terminal: columns are left out, keys stay whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dcp_nvcomp.cli.tables import Column, Table

COLUMNS = (
    Column("key", is_left=True),
    Column("dtype", is_left=True, drop=2),
    Column("size", drop=1),
    Column("ratio"),
)


def table(*keys: str) -> Table:
    made = Table(*COLUMNS)
    for key in keys:
        made.add(key, "bfloat16", "12.3 MB", "1.500")
    return made


def test_all_columns_where_there_is_room() -> None:
    lines, left_out = table("model.w", "b").lines(80)
    assert lines == [
        "key      dtype        size  ratio",
        "model.w  bfloat16  12.3 MB  1.500",
        "b        bfloat16  12.3 MB  1.500",
    ]
    assert left_out == []


def test_the_least_important_ones_are_left_out_first() -> None:
    assert table("model.w").lines(32)[1] == ["dtype"]
    assert table("model.w").lines(20)[1] == ["dtype", "size"]
    lines, left_out = table("model.layers.0.weight").lines(10)
    assert lines[1] == "model.layers.0.weight  1.500", "keys are never folded or cut"
    assert left_out == ["dtype", "size"]


@given(st.lists(st.text("aé漢.", min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 100))
def test_lines_fit_unless_what_stays_does_not(keys: list[str], width: int) -> None:
    lines, left_out = table(*keys).lines(width)
    longest = max(map(cell_len, lines))
    assert longest <= width or left_out == ["dtype", "size"]
    for key, line in zip(keys, lines[1:], strict=True):
        assert line.startswith(key)

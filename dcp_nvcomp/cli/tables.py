"""Tables of the command line that fit the terminal: columns are dropped, keys are never folded or cut.

columns and rows  ->  the columns that fit, the least important ones left out first  ->  lines
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: its heading.
        is_left: True if its text begins at the left.
        drop: the higher, the sooner it is left out where there is no room; 0 for columns that always stay.
    """

    name: str
    is_left: bool = False
    drop: int = 0


class Table:
    """Rows under columns."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Add a row, one cell for each column."""
        assert len(cells) == len(self._columns)
        self._rows.append(cells)

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """Return the lines, the heading first, and the names of the columns that were left out."""
        widths = [
            max([cell_len(column.name), *(cell_len(row[at]) for row in self._rows)])
            for at, column in enumerate(self._columns)
        ]
        shown = list(range(len(self._columns)))
        for at in sorted(shown, key=lambda at: -self._columns[at].drop):
            if self._columns[at].drop and _total(widths, shown) > width:
                shown.remove(at)
        heading = tuple(column.name for column in self._columns)
        left_out = [column.name for at, column in enumerate(self._columns) if at not in shown]
        return [self._line(row, widths, shown) for row in [heading, *self._rows]], left_out

    def _line(self, row: Sequence[str], widths: Sequence[int], shown: Sequence[int]) -> str:
        return _GAP.join(_padded(row[at], widths[at], is_left=self._columns[at].is_left) for at in shown).rstrip()


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + len(_GAP) * (len(shown) - 1)


def _padded(text: str, width: int, *, is_left: bool) -> str:
    space = " " * (width - cell_len(text))
    return text + space if is_left else space + text

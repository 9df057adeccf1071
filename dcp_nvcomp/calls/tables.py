"""Tables, and values that are shown as tables: printed, in a notebook, and by the command.

What a value shows are lines and tables, in their order. `print` writes them as text; a notebook displays them as HTML,
in which everything is escaped; the command fits them to the terminal (cli/common.py). Long tables are cut but there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Final, NamedTuple

from dcp_nvcomp.redaction import printable

_GAP: Final = "  "
_MOST_ROWS: Final = 60  # of a table that is printed or displayed: half of them from each end
_MOST_LETTERS: Final = 1000  # of a line
_NO_LIMIT: Final = 1 << 30


class Column(NamedTuple):
    """A column of a table."""

    name: str  # its heading
    drop: int = 0  # the higher, the sooner it is left out where there is no room; 0 for columns that always stay
    is_left: bool = False  # whether its text begins at the left


def left(name: str, drop: int = 0) -> Column:
    """Return a column whose text begins at the left."""
    return Column(name, drop, is_left=True)


@dataclass(frozen=True)
class Table:
    """Columns and rows of text."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    def lines(self, width: int = _NO_LIMIT) -> tuple[list[str], list[str]]:
        """Return the lines, the heading first, and the names of the columns that there is no room for."""
        from rich.cells import cell_len  # a GPU host that only saves need not have it

        cells = [[column.name for column in self.columns], *self.rows]
        widths = [max(map(cell_len, of_column)) for of_column in zip(*cells, strict=True)]
        shown = list(range(len(self.columns)))
        for at in sorted(shown, key=lambda at: -self.columns[at].drop):
            if self.columns[at].drop and sum(widths[one] + len(_GAP) for one in shown) - len(_GAP) > width:
                shown.remove(at)

        def padded(text: str, at: int) -> str:
            space = " " * (widths[at] - cell_len(text))
            return text + space if self.columns[at].is_left else space + text

        lines = [_GAP.join(padded(row[at], at) for at in shown).rstrip() for row in cells]
        return lines, [column.name for at, column in enumerate(self.columns) if at not in shown]

    def shortened(self) -> Table:
        """Return the first and the last rows of a long table, with a row between them that counts the others."""
        left_out = len(self.rows) - _MOST_ROWS
        if left_out <= 0:
            return self
        half = _MOST_ROWS // 2
        gap = [f"... {left_out:,} more", *[""] * (len(self.columns) - 1)]
        return Table(self.columns, [*self.rows[:half], gap, *self.rows[-half:]])

    def html(self) -> str:
        """Return it for a notebook."""

        def row(tag: str, texts: Iterable[str]) -> str:
            sides = ("left" if column.is_left else "right" for column in self.columns)
            cells = (
                f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'
                for side, text in zip(sides, texts, strict=True)
            )
            return f"<tr>{''.join(cells)}</tr>"

        heading = row("th", (column.name for column in self.columns))
        return f"<table><thead>{heading}</thead><tbody>{''.join(row('td', one) for one in self.rows)}</tbody></table>"


class Shown:
    """A value that is shown as lines and tables."""

    def shown(self) -> Iterable[str | Table]:
        """Return the lines and tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        lines: list[str] = []
        for one in _cut(self.shown()):
            lines += [one] if isinstance(one, str) else one.lines()[0]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        parts = [one for one in _cut(self.shown()) if one]
        return "".join(f"<p>{escape(one)}</p>" if isinstance(one, str) else one.html() for one in parts)


def _cut(parts: Iterable[str | Table]) -> list[str | Table]:
    """Leave out the middle of long tables and of many lines, and the ends of long lines."""
    cut = [one.shortened() if isinstance(one, Table) else _cut_line(one) for one in parts]
    left_out, half = len(cut) - _MOST_ROWS, _MOST_ROWS // 2
    return cut if left_out <= 0 else [*cut[:half], f"... {left_out:,} more", *cut[-half:]]


def _cut_line(line: str) -> str:
    return line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS]}..."


def counted(count: int, what: str) -> str:
    """Return a number of things, such as `1 file` or `2 files`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def local_time(seconds: float | None) -> str:
    """Return a time as the reader's clock shows it; `-` if it is not known, and the seconds if no calendar has it."""
    if seconds is None:
        return "-"
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no date: files have what times people and accidents give them
        return f"{seconds:.3g} s"

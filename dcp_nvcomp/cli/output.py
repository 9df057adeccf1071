"""What goes to standard output: lines, tables that fit the terminal, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dcp_nvcomp.redaction import printable

_GAP = "  "


class Column(NamedTuple):
    """A column of a table."""

    name: str  # its heading
    drop: int = 0  # the higher, the sooner it is left out where there is no room; 0 for columns that always stay
    is_left: bool = False  # whether its text begins at the left


def left(name: str, drop: int = 0) -> Column:
    """Return a column whose text begins at the left."""
    return Column(name, drop, is_left=True)


class Output:
    """Standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 1 << 16

    def print(self, line: str = "", *, style: str = "") -> None:
        """Print a line. One that is longer than the terminal is wide goes on in the next."""
        encoding = self._console.encoding
        text = printable(line).encode(encoding, "backslashreplace").decode(encoding)
        # Text, not str: rich would take "[...]" for markup
        self._console.print(Text(text, style=style), soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, without the columns that there is no room for."""
        lines, left_out = table_lines(columns, rows, self._console.width)
        self.print(lines[0], style="bold")
        for line in lines[1:]:
            self.print(line)
        if left_out:
            self.print(f"(no room for {', '.join(left_out)}: widen the terminal, or use --json)", style="dim")


def show(found: Any, as_json: bool, print_found: Callable[[Output, Any], None]) -> None:
    """Print what was found, as one JSON document or for people."""
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        print_found(Output(), found)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[str]]:
    """Return the lines of a table, the heading first, and the names of the columns that were left out."""
    cells = [[column.name for column in columns], *rows]
    widths = [max(map(cell_len, of_column)) for of_column in zip(*cells, strict=True)]
    shown = list(range(len(columns)))
    for at in sorted(shown, key=lambda at: -columns[at].drop):
        if columns[at].drop and sum(widths[one] + len(_GAP) for one in shown) - len(_GAP) > width:
            shown.remove(at)

    def padded(text: str, at: int) -> str:
        space = " " * (widths[at] - cell_len(text))
        return text + space if columns[at].is_left else space + text

    lines = [_GAP.join(padded(row[at], at) for at in shown).rstrip() for row in cells]
    return lines, [column.name for at, column in enumerate(columns) if at not in shown]


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


def readable_nbytes(nbytes: float) -> str:
    """Return a size in units of 10^n, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def readable_rate(rate: float) -> str:
    """Return bytes a second as GB/s or MB/s."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def readable_seconds(seconds: float) -> str:
    """Return a time with as many digits as matter."""
    for unit, factor, least in (("d", 86400, 2 * 86400), ("h", 3600, 2 * 3600), ("min", 60, 120), ("s", 1, 1)):
        if seconds >= least:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds * 1e3:.3g} ms"

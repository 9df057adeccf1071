"""What goes to standard output: lines, tables that fit the terminal, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dcp_nvcomp.calls.tables import Table
from dcp_nvcomp.redaction import printable


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

    def table(self, table: Table) -> None:
        """Print a table, without the columns that there is no room for."""
        lines, left_out = table.lines(self._console.width)
        self.print(lines[0], style="bold")
        for line in lines[1:]:
            self.print(line)
        if left_out:
            self.print(f"(no room for {', '.join(left_out)}: widen the terminal, or use --json)", style="dim")

    def show(self, parts: Iterable[str | Table]) -> None:
        """Print lines and tables."""
        for part in parts:
            if isinstance(part, str):
                self.print(part)
            else:
                self.table(part)


def show(found: Any, as_json: bool, print_found: Callable[[Output, Any], None] | None = None) -> None:
    """Print what was found, as one JSON document or for people."""
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    elif print_found is None:
        Output().show(found.shown())
    else:
        print_found(Output(), found)


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

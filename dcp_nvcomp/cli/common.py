"""Shared by the commands of `dcp-nvcomp`: arguments, storage options, one-line errors, a safe console."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_nvcomp.errors import CheckpointError

__all__ = ["AsJson", "Options", "Output", "Url", "one_line_errors", "parse_storage_options", "printable", "table"]

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A local path, or any fsspec URL such as s3://bucket/run/step.")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the storage, such as anon=true; may be repeated. VALUE is JSON if it parses as such, "
        """e.g. client_kwargs='{"endpoint_url": "http://127.0.0.1:9000"}', else text.""",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]


def parse_storage_options(given: list[str] | None) -> dict[str, Any]:
    """Return the storage options given on the command line."""
    options: dict[str, Any] = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not key.isidentifier() or not equals:
            # without the text, which may hold a password
            raise typer.BadParameter("An option has the form KEY=VALUE, and KEY is a name.", param_hint="--option")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with status 1 and one line instead of a traceback if a checkpoint or its storage is at fault."""
    try:
        yield
    except CheckpointError as error:
        typer.echo(f"Error: {printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(1) from None


def printable(text: str) -> str:
    """Return text from a checkpoint without anything that a terminal would obey or an encoding would choke on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Output:
    """Standard output, for lines and tables with text that comes from a checkpoint."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 1 << 16  # a file or a pipe has no edge to cut lines at

    def cell(self, text: str) -> Text:
        """Text for a table."""
        # Text, not str: rich would take "[...]" for markup
        encoding = self._console.encoding
        return Text(printable(text).encode(encoding, "backslashreplace").decode(encoding))

    def print(self, what: str | Table = "") -> None:
        """A line, or a table."""
        self._console.print(self.cell(what) if isinstance(what, str) else what)


def table(left: Iterable[str], *columns: str) -> Table:
    """An empty table.

    Args:
        left: the columns whose text begins at the left, and may be folded.
        columns: all columns.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold", no_wrap=name not in left)
    return made

"""Shared by the commands of `dcp-nvcomp`: arguments, storage options, one-line errors, a safe console."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from dcp_nvcomp.cli.tables import Table
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.redaction import is_secret, printable

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
        """e.g. client_kwargs='{"endpoint_url": "http://127.0.0.1:9000"}', else text; so is a secret of digits.""",
    ),
]
_NAMES: Final = ("username", "user", "key", "account_name", "domain", "project")
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]


def parse_storage_options(given: list[str] | None) -> dict[str, Any]:
    """Return the storage options given on the command line."""
    options: dict[str, Any] = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not key.isidentifier() or not equals:
            # without the text, which may hold a password
            raise typer.BadParameter("An option has the form KEY=VALUE, and KEY is a name.", param_hint="--option")
        options[key] = _value_of(key, value)
    return options


def _value_of(key: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # a password of digits is text: as a number, 1e5 or 1.10 would be another one
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if is_number and (key in _NAMES or is_secret(key)) else value


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with status 1 and one line instead of a traceback if a checkpoint or its storage is at fault."""
    try:
        yield
    except CheckpointError as error:
        typer.echo(f"Error: {printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(1) from None


def local_time(seconds: float | None) -> str:
    """Return a time as the reader's clock shows it; `-` if it is not known, and the seconds if no calendar has it."""
    if seconds is None:
        return "-"
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no date: files have what times people and accidents give them
        return f"{seconds:.3g} s"


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Provide a bar on standard error, if that is a terminal; call it with the bytes done, and of how many."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Output:
    """Standard output, for lines and tables with text that comes from a checkpoint."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 1 << 16  # a file or a pipe has no edge to cut lines at

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

"""What the commands share: arguments, lines, tables and JSON on standard output, and progress on standard error."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from dcp_nvcomp.calls.tables import Table
from dcp_nvcomp.redaction import is_secret, printable

Url = Annotated[str, Argument(metavar="URL", help="A local path, or any fsspec URL such as s3://bucket/run/step.")]
Options = Annotated[
    list[str] | None,
    Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the storage, such as anon=true; may be repeated. VALUE is JSON if it parses as such, "
        """e.g. client_kwargs='{"endpoint_url": "http://127.0.0.1:9000"}', else text; so is a secret of digits.""",
    ),
]
AsJson = Annotated[bool, Option("--json", help="One JSON document instead of tables.")]

_NAMES: Final = ("username", "user", "key", "account_name", "domain", "project")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NBYTES: Final = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgtp", 1)
}


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


def parse_nbytes(text: str, option: str) -> int:
    """Return a size such as 70GB, 1.5TB or 512MiB in bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.lower())
    nbytes = 0 if match is None else round(float(match[1]) * _NBYTES.get(match[2], 0))
    if not nbytes:
        raise typer.BadParameter(f"{text!r} is not a size such as 70GB, 1.5TB or 512MiB.", param_hint=option)
    return nbytes


def parse_seconds(text: str, option: str) -> float:
    """Return a time such as 90s, 30m, 12h or 7d in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 30m, 12h or 7d.", param_hint=option)
    return float(match[1]) * _SECONDS[match[2]]


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

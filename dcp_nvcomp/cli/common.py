"""Shared by the commands: arguments, what is parsed of them, and progress on standard error."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer import Argument, Option

from dcp_nvcomp.redaction import is_secret

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

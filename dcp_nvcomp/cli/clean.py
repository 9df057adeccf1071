"""`dcp-nvcomp recover` and `dcp-nvcomp clean`: the commands that change a checkpoint's directory."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, one_line_errors, parse_storage_options
from dcp_nvcomp.maintenance.cleaning import MIN_AGE_SECONDS, Cleaning, clean_checkpoint

__all__ = ["clean_command"]

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

OlderThan = Annotated[
    str,
    typer.Option(
        "--older-than",
        metavar="AGE",
        help="What is younger stays, such as 90m, 12h or 1d; at least 1h. It must be longer than the longest save "
        "takes: nothing else tells a save under way from a dead one.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


def clean_command(
    url: Url,
    older_than: OlderThan = "1d",
    dry_run: DryRun = False,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Remove files and unfinished uploads that failed or killed saves left. Refuses where a checkpoint is damaged."""
    seconds = _seconds(older_than)
    storage_options = parse_storage_options(option)
    with one_line_errors():
        found = clean_checkpoint(url, older_than_seconds=seconds, dry_run=dry_run, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print_cleaning(found)


def _seconds(age: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", age)
    if match is None:
        raise typer.BadParameter(f"{age!r} is not an age such as 90m, 12h or 1d.", param_hint="--older-than")
    seconds = float(match[1]) * UNIT_SECONDS[match[2]]
    if seconds < MIN_AGE_SECONDS:
        raise typer.BadParameter(f"{age!r} is less than 1h, the least that is safe.", param_hint="--older-than")
    return seconds


def _print_cleaning(found: Cleaning) -> None:
    output = Output()
    done = "would remove" if found.dry_run else "removed"
    for orphan in found.orphans:
        output.print(f"{done} {orphan.kind} {orphan.name}, {decimal(orphan.nbytes)}")
    count = f"{len(found.orphans)} orphan{'' if len(found.orphans) == 1 else 's'}"
    output.print(f"{found.path}: {done} {count}, {decimal(found.nbytes)}; {found.young} too young to tell.")
    if found.foreign:
        output.print(f"{len(found.foreign)} unused files of stock DCP stay: {', '.join(found.foreign)}")

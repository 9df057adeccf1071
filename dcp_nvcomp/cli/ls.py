"""`dcp-nvcomp ls`: the checkpoints of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, local_time, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.run_listing import RunListing

__all__ = ["ls_command", "print_steps"]


def ls_command(url: Url, option: Options = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: date, size, ratio, ranks, and whether each is complete.

    Reads a few KB of each. Exit status 1 if there is none.
    """
    from dcp_nvcomp.maintenance.run_listing import list_run

    storage_options = parse_storage_options(option)
    with one_line_errors():
        found = list_run(url, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        print_steps(Output(), found)


def print_steps(output: Output, found: RunListing) -> None:
    """Print the steps of a run as a table."""
    table = Table(
        Column("checkpoint", is_left=True),
        Column("saved", is_left=True, drop=2),
        Column("before", drop=5),
        Column("size", drop=1),
        Column("ratio", drop=3),
        Column("ranks", drop=4),
        Column("keys", drop=6),
        Column("state", is_left=True),
    )
    for step in found.steps:
        table.add(
            step.name or ".",
            local_time(step.saved_seconds),
            "-" if step.uncompressed_nbytes is None else decimal(step.uncompressed_nbytes),
            decimal(step.stored_nbytes),
            "-" if step.ratio is None else f"{step.ratio:.3f}",
            str(step.ranks),
            "-" if step.keys is None else str(step.keys),
            step.state,
        )
    output.table(table)
    for path, error in found.failed.items():
        output.print(f"{path} could not be listed: {error}")

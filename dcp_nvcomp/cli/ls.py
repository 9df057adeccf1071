"""`dcp-nvcomp ls`: the checkpoints of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, local_time, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.run_listing import RunListing


def ls_command(url: Url, option: Options = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: date, size, ratio, ranks, whether each is complete, metrics, and why it is kept.

    Opens those that were not seen complete before, and reads a few KB of the others. Exit status 1 if nothing is found.
    """
    from dcp_nvcomp.maintenance.run_listing import list_run
    from dcp_nvcomp.runs.pruning import reasons_of

    storage_options = parse_storage_options(option)
    with one_line_errors():
        found = list_run(url, storage_options=storage_options)
        kept = reasons_of(url, storage_options=storage_options)
    if as_json:
        document = found.to_json()
        for step in document["steps"]:
            step["kept"] = list(kept.get(step["step"], ()))
        typer.echo(json.dumps(document, indent=1))
    else:
        print_steps(Output(), found, kept)


def print_steps(output: Output, found: RunListing, kept: Mapping[int, tuple[str, ...]] | None = None) -> None:
    """Print the steps of a run as a table."""
    kept = kept or {}
    with_metrics = any(step.metrics for step in found.steps)
    table = Table(
        Column("checkpoint", is_left=True),
        Column("saved", is_left=True, drop=2),
        Column("before", drop=5),
        Column("size", drop=1),
        Column("ratio", drop=3),
        Column("ranks", drop=4),
        Column("keys", drop=6),
        Column("state", is_left=True),
        *([Column("metrics", is_left=True, drop=7)] if with_metrics else []),
        *([Column("kept", is_left=True, drop=8)] if kept else []),
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
            *([", ".join(f"{name} {value:.6g}" for name, value in step.metrics.items())] if with_metrics else []),
            *([", ".join(kept.get(step.step, ()) if step.step is not None else ())] if kept else []),
        )
    output.table(table)
    for step in found.steps:
        if step.problem:
            output.print(f"{step.name or '.'} is {step.state}: {step.problem}")
    for path, error in found.failed.items():
        output.print(f"{path} could not be listed: {error}")

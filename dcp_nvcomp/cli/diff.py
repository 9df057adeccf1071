"""`dcp-nvcomp diff`: how two checkpoints differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_nvcomp.cli.common import AsJson, Options, Output, one_line_errors, parse_storage_options, progress_bar
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.reading.comparison import Comparison

First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a local path, or any fsspec URL.")]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one.")]
KeysOnly = Annotated[bool, typer.Option("--keys-only", help="Compare keys, shapes and dtypes; read no tensor.")]


def diff_command(
    a: First, b: Second, keys_only: KeysOnly = False, option: Options = None, as_json: AsJson = False
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, and values bit for bit. Exit status 1 if anything differs."""
    from dcp_nvcomp.reading.comparison import compare_checkpoints

    storage_options = parse_storage_options(option)
    with one_line_errors(), progress_bar("comparing") as progress:
        found = compare_checkpoints(a, b, values=not keys_only, storage_options=storage_options, progress=progress)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print(found, "values" if not keys_only else "shapes and dtypes")
    if not found.is_equal:
        raise typer.Exit(1)


def _print(found: Comparison, compared: str) -> None:
    output = Output()
    if found.differences:
        table = Table(Column("key", is_left=True), Column("differs", is_left=True), Column("how", is_left=True, drop=1))
        for one in found.differences:
            table.add(one.fqn, one.kind, one.what)
        output.table(table)
    output.print(
        f"{found.equal} keys are equal in their {compared}"
        f"{f', {len(found.differences)} differ' if found.differences else ''}."
    )

"""`dcp-nvcomp recover`: restore `.metadata`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, local_time, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.recovery import Recovery


SaveId = Annotated[
    str | None, typer.Option("--save-id", metavar="ID", help="The save to restore, if several are possible, as listed.")
]


def recover_command(url: Url, save_id: SaveId = None, option: Options = None, as_json: AsJson = False) -> None:
    """Restore a lost or corrupt `.metadata` from the copy that each save leaves.

    Never replaces a good checkpoint. Exit status 1 if nothing could be restored, or a save must be named.
    """
    from dcp_nvcomp.maintenance.recovery import INTACT, RECOVERED, is_save_id, recover_checkpoint

    if save_id is not None and not is_save_id(save_id):
        message = f"{save_id!r} is not of 32 hexadecimal digits, and no `.metadata.<id>.tmp`."
        raise typer.BadParameter(message, param_hint="--save-id")
    storage_options = parse_storage_options(option)
    with one_line_errors():
        found = recover_checkpoint(url, save_id=save_id, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print_recovery(found)
    if found.outcome not in (RECOVERED, INTACT):
        raise typer.Exit(1)


def _print_recovery(found: Recovery) -> None:
    from dcp_nvcomp.maintenance.recovery import RECOVERED

    output = Output()
    output.print(found.reason)
    if found.outcome == RECOVERED:
        what = f"save {found.save_id}" if found.save_id is not None else "the checkpoint of stock DCP"
        output.print(f"Published {what} as .metadata again.")
    elif found.candidates:
        rows = Table(
            Column("save id", is_left=True),
            Column("written", drop=2),
            Column("keys", drop=3),
            Column("size", drop=1),
            Column("state", is_left=True),
        )
        for one in found.candidates:
            state = "; ".join(one.problems) or "complete"
            rows.add(one.save_id, local_time(one.modified_seconds), str(one.keys), decimal(one.nbytes), state)
        output.table(rows)

"""`dcp-nvcomp recover`: restore `.metadata`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import Options, Output, Url, one_line_errors, parse_storage_options, table
from dcp_nvcomp.maintenance.recovery import INTACT, RECOVERED, Candidate, Recovery, is_save_id, recover_checkpoint

__all__ = ["recover_command"]


SaveId = Annotated[
    str | None, typer.Option("--save-id", metavar="ID", help="The save to restore, if several are possible, as listed.")
]


def recover_command(url: Url, save_id: SaveId = None, option: Options = None) -> None:
    """Restore a lost or corrupt `.metadata` from the copy that each save leaves.

    Never replaces a good checkpoint. Exit status 1 if nothing could be restored, or a save must be named.
    """
    if save_id is not None and not is_save_id(save_id):
        message = f"{save_id!r} is not of 32 hexadecimal digits, and no `.metadata.<id>.tmp`."
        raise typer.BadParameter(message, param_hint="--save-id")
    storage_options = parse_storage_options(option)
    with one_line_errors():
        found = recover_checkpoint(url, save_id=save_id, storage_options=storage_options)
    _print_recovery(found)
    if found.outcome not in (RECOVERED, INTACT):
        raise typer.Exit(1)


def _print_recovery(found: Recovery) -> None:
    output = Output()
    output.print(found.reason)
    if found.outcome == RECOVERED:
        what = f"save {found.save_id}" if found.save_id is not None else "the checkpoint of stock DCP"
        output.print(f"Published {what} as .metadata again.")
    elif found.candidates:
        rows = table(("save id", "state"), "save id", "written", "keys", "size", "state")
        for one in found.candidates:
            time, state = _time(one), "; ".join(one.problems) or "complete"
            cells = (one.save_id, time, str(one.keys), decimal(one.nbytes), state)
            rows.add_row(*(output.cell(cell) for cell in cells))
        output.print(rows)


def _time(one: Candidate) -> str:
    if one.modified_seconds is None:
        return "?"
    return datetime.fromtimestamp(one.modified_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")

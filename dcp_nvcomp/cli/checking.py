"""`dcp-nvcomp verify`, `recover`, `consolidate` and `diff`: what is wrong with a checkpoint, or missing from it."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from dcp_nvcomp.cli.common import AsJson, Options, Url, parse_storage_options, progress_bar
from dcp_nvcomp.cli.output import show

Full = Annotated[bool, Option("--full", help="Decode every block too, and check the decoded bytes.")]
SaveId = Annotated[
    str | None, Option("--save-id", metavar="ID", help="The save to restore, if several are possible, as listed.")
]
First = Annotated[str, Argument(metavar="A", help="A checkpoint: a local path, or any fsspec URL.")]
Second = Annotated[str, Argument(metavar="B", help="Another one.")]
KeysOnly = Annotated[bool, Option("--keys-only", help="Compare keys, shapes and dtypes; read no tensor.")]


def verify_command(url: Url, full: Full = False, option: Options = None, as_json: AsJson = False) -> None:
    """Check every byte of a checkpoint against its checksums, and name all that is corrupt or missing.

    Exit status 1 if anything is; warnings do not count, nor do blocks that only a GPU could decode.
    """
    from dcp_nvcomp import tools

    storage_options = parse_storage_options(option)
    with progress_bar("verifying") as progress:
        found = tools.verify(url, full=full, storage_options=storage_options, progress=progress)
    show(found, as_json)
    if not found.is_sound:
        raise typer.Exit(1)


def recover_command(url: Url, save_id: SaveId = None, option: Options = None, as_json: AsJson = False) -> None:
    """Restore a lost or corrupt `.metadata` from the copy that each save leaves.

    Never replaces a good checkpoint. Exit status 1 if nothing could be restored, or a save must be named.
    """
    from dcp_nvcomp import tools
    from dcp_nvcomp.maintenance.recovery import INTACT, RECOVERED, is_save_id

    if save_id is not None and not is_save_id(save_id):
        message = f"{save_id!r} is not of 32 hexadecimal digits, and no `.metadata.<id>.tmp`."
        raise typer.BadParameter(message, param_hint="--save-id")
    found = tools.recover(url, save_id=save_id, storage_options=parse_storage_options(option))
    show(found, as_json)
    if found.outcome not in (RECOVERED, INTACT):
        raise typer.Exit(1)


def consolidate_command(url: Url, option: Options = None, as_json: AsJson = False) -> None:
    """Copy into a checkpoint what it shares with others beside it, so that it needs them no more."""
    from dcp_nvcomp import tools

    show(tools.consolidate(url, storage_options=parse_storage_options(option)), as_json)


def diff_command(
    a: First, b: Second, keys_only: KeysOnly = False, option: Options = None, as_json: AsJson = False
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, and values bit for bit. Exit status 1 if anything differs."""
    from dcp_nvcomp import tools

    storage_options = parse_storage_options(option)
    with progress_bar("comparing") as progress:
        found = tools.compare(a, b, values=not keys_only, storage_options=storage_options, progress=progress)
    show(found, as_json)
    if not found.is_equal:
        raise typer.Exit(1)

"""`dcp-nvcomp verify`, `recover` and `diff`: what is wrong with a checkpoint, its `.metadata`, another checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from typer import Argument, Option

from dcp_nvcomp.cli.common import AsJson, Options, Url, parse_storage_options, progress_bar
from dcp_nvcomp.cli.output import Column, Output, counted, left, local_time, show

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.checks import Finding, Verification
    from dcp_nvcomp.maintenance.recovery import Recovery
    from dcp_nvcomp.reading.comparison import Comparison

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
    show(found, as_json, _print_verification)
    if not found.is_sound:
        raise typer.Exit(1)


def _print_verification(output: Output, found: Verification) -> None:
    from dcp_nvcomp.maintenance.inspection import LAYOUT_STOCK

    for finding in found.findings:
        output.print(_line(finding))
    is_stock = found.layout == LAYOUT_STOCK
    checked = f"{counted(found.blocks, 'item' if is_stock else 'block')}, {decimal(found.nbytes)} in "
    checked += f"{counted(found.files, 'data file')} checked"
    output.print(f"{found.path} is {'sound' if found.is_sound else 'DAMAGED'}: {checked}.")
    if is_stock:
        output.print("Stock DCP stores no checksums of its own, so some corruption can't be found.")
    if found.undecoded_blocks:
        output.print(
            f"{found.undecoded_blocks} of the blocks were not decoded, as that takes a GPU (codec ans); their stored "
            "bytes were checked."
        )


def _line(finding: Finding) -> str:
    where = [finding.file] if finding.file else []
    if finding.byte_range is not None:
        where.append(f"bytes {finding.byte_range[0]} to {finding.byte_range[1]}")
    if finding.fqns:
        where.append(f"key{'' if len(finding.fqns) == 1 else 's'} " + ", ".join(map(repr, finding.fqns)))
    return f"{finding.severity.upper()} {', '.join(where)}: {finding.what}"


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
    show(found, as_json, _print_recovery)
    if found.outcome not in (RECOVERED, INTACT):
        raise typer.Exit(1)


def _print_recovery(output: Output, found: Recovery) -> None:
    from dcp_nvcomp.maintenance.recovery import RECOVERED

    output.print(found.reason)
    if found.outcome == RECOVERED:
        what = f"save {found.save_id}" if found.save_id is not None else "the checkpoint of stock DCP"
        output.print(f"Published {what} as .metadata again.")
    elif found.candidates:
        output.table(
            [left("save id"), Column("written", 2), Column("keys", 3), Column("size", 1), left("state")],
            [
                (
                    one.save_id,
                    local_time(one.modified_seconds),
                    str(one.keys),
                    decimal(one.nbytes),
                    "; ".join(one.problems) or "complete",
                )
                for one in found.candidates
            ],
        )


def diff_command(
    a: First, b: Second, keys_only: KeysOnly = False, option: Options = None, as_json: AsJson = False
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, and values bit for bit. Exit status 1 if anything differs."""
    from dcp_nvcomp import tools

    def print_comparison(output: Output, found: Comparison) -> None:
        if found.differences:
            rows = [(one.fqn, one.kind, one.what) for one in found.differences]
            output.table([left("key"), left("differs"), left("how", 1)], rows)
        differ = f", {len(found.differences)} differ" if found.differences else ""
        output.print(f"{found.equal} keys are equal in their {'shapes and dtypes' if keys_only else 'values'}{differ}.")

    storage_options = parse_storage_options(option)
    with progress_bar("comparing") as progress:
        found = tools.compare(a, b, values=not keys_only, storage_options=storage_options, progress=progress)
    show(found, as_json, print_comparison)
    if not found.is_equal:
        raise typer.Exit(1)

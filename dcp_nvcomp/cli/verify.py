"""`dcp-nvcomp verify`: list what is wrong with a checkpoint, one line each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, one_line_errors, parse_storage_options, progress_bar

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.verification.findings import Finding, Verification

Full = Annotated[bool, typer.Option("--full", help="Decode every block too, and check the decoded bytes.")]


def verify_command(url: Url, full: Full = False, option: Options = None, as_json: AsJson = False) -> None:
    """Check every byte of a checkpoint against its checksums, and name all that is corrupt or missing.

    Exit status 1 if anything is; warnings do not count, nor do blocks that only a GPU could decode.
    """
    from dcp_nvcomp.maintenance.verification.verify import verify_checkpoint

    storage_options = parse_storage_options(option)
    with one_line_errors(), progress_bar("verifying") as progress:
        found = verify_checkpoint(url, full=full, storage_options=storage_options, progress=progress)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print(found)
    if not found.is_sound:
        raise typer.Exit(1)


def _print(found: Verification) -> None:
    from dcp_nvcomp.maintenance.inspection import LAYOUT_STOCK

    output = Output()
    for finding in found.findings:
        output.print(_line(finding))
    is_stock = found.layout == LAYOUT_STOCK
    counted = f"{found.blocks} {'item' if is_stock else 'block'}{'' if found.blocks == 1 else 's'}"
    files = f"{found.files} data file{'' if found.files == 1 else 's'}"
    state = "sound" if found.is_sound else "DAMAGED"
    output.print(f"{found.path} is {state}: {counted}, {decimal(found.nbytes)} in {files} checked.")
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

"""`dcp-nvcomp clean`: remove what dead saves left."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.tables import Column, Table
from dcp_nvcomp.format.names import is_metadata_temporary

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.cleaning import Cleaning
    from dcp_nvcomp.maintenance.run_cleaning import RunCleaning

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

OlderThan = Annotated[
    str,
    typer.Option(
        "--older-than",
        metavar="AGE",
        help="Keep what is younger, such as 90m, 12h or 1d; at least 1h. It must be longer than the longest save "
        "takes: nothing else distinguishes a running save from a dead one.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only report what would be removed.")]
Recursive = Annotated[bool, typer.Option("--recursive", help="Clean every checkpoint at or below URL, such as a run.")]


def clean_command(
    url: Url,
    older_than: OlderThan = "1d",
    dry_run: DryRun = False,
    recursive: Recursive = False,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Remove files and unfinished uploads of failed or killed saves. Refuses if the checkpoint is corrupt.

    Don't clean a checkpoint while it is being restored or copied there: its files may not be recognized as needed.

    Exit status 1 if nothing could be cleaned, with --recursive if any of the checkpoints was refused.
    """
    from dcp_nvcomp.maintenance.cleaning import clean_checkpoint
    from dcp_nvcomp.maintenance.run_cleaning import RunCleaning, clean_run

    seconds = _seconds(older_than)
    storage_options = parse_storage_options(option)
    clean = clean_run if recursive else clean_checkpoint
    with one_line_errors():
        found = clean(url, older_than_seconds=seconds, dry_run=dry_run, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    elif isinstance(found, RunCleaning):
        _print_run(found)
    else:
        _print_cleaning(found)
    if isinstance(found, RunCleaning) and found.refused:
        raise typer.Exit(1)


def _seconds(age: str) -> float:
    from dcp_nvcomp.maintenance.cleaning import MIN_AGE_SECONDS

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
    output.print(f"{found.path}: {done} {count}, {decimal(found.nbytes)}; {found.young} too young to remove.")
    for save_id in found.recoverable:
        what = save_id if is_metadata_temporary(save_id) else f"save {save_id}"
        output.print(f"Kept {what}: there is no `.metadata`, but `dcp-nvcomp recover` can bring it back.")
    if found.foreign:
        output.print(f"{len(found.foreign)} unused files of stock DCP kept: {', '.join(found.foreign)}")


def _print_run(found: RunCleaning) -> None:
    output = Output()
    done = "would remove" if found.dry_run else "removed"
    rows = Table(
        Column("checkpoint", is_left=True),
        Column(done),
        Column("size", drop=1),
        Column("too young", drop=2),
        Column("note", is_left=True),
    )
    for one in found.checkpoints:
        note = f"`recover` can bring back {', '.join(one.recoverable)}" if one.recoverable else ""
        rows.add(one.path, str(len(one.orphans)), decimal(one.nbytes), str(one.young), note)
    for refusal in found.refused:
        rows.add(refusal.path, "-", "-", "-", f"refused: {refusal.error}")
    output.table(rows)
    count = sum(len(one.orphans) for one in found.checkpoints)
    output.print(f"{found.path}: {done} {count} orphan{'' if count == 1 else 's'}, {decimal(found.nbytes)}.")

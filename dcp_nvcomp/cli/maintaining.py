"""`dcp-nvcomp clean`, `recover`, `consolidate`, `prune` and `pin`: commands that change checkpoints and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from typer import Argument, Option

from dcp_nvcomp.calls.tables import Column, Table, counted, left
from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, parse_seconds, parse_storage_options, show

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.cleaning import Cleaning, RunCleaning
    from dcp_nvcomp.runs.pruning import Pruning
    from dcp_nvcomp.runs.retention import Best

OlderThan = Annotated[
    str,
    Option(
        "--older-than",
        metavar="AGE",
        help="Keep what is younger, such as 90m, 12h or 1d; at least 1h. It must be longer than the longest save "
        "takes: nothing else distinguishes a running save from a dead one.",
    ),
]
DryRun = Annotated[bool, Option("--dry-run", help="Only report what would be removed.")]
Recursive = Annotated[bool, Option("--recursive", help="Clean every checkpoint at or below URL, such as a run.")]
Run = Annotated[str, Argument(metavar="RUN", help="The run: a local path, or an fsspec URL such as s3://bucket/run.")]
KeepLast = Annotated[int, Option("--keep-last", min=1, help="Keep the newest steps, this many.")]
KeepEvery = Annotated[int | None, Option("--keep-every", min=1, help="Keep multiples of this step.")]
NewerThan = Annotated[
    str | None,
    Option(
        "--newer-than", metavar="AGE", help="Keep what was saved less than this long before the newest, such as 12h."
    ),
]
KeepBest = Annotated[
    list[str] | None,
    Option("--keep-best", metavar="METRIC[:MODE[:COUNT]]", help="Keep the best, such as loss:min:2; may be repeated."),
]
Milestone = Annotated[list[int] | None, Option("--milestone", help="Keep this step; may be repeated.")]
Template = Annotated[str, Option("--step-template", help="Name of a step's directory.")]
Steps = Annotated[int, Argument(metavar="STEP", min=0, help="The step.")]
Remove = Annotated[bool, Option("--remove", help="Unpin the step.")]
SaveId = Annotated[
    str | None, Option("--save-id", metavar="ID", help="The save to restore, if several are possible, as listed.")
]


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
    from dcp_nvcomp import tools
    from dcp_nvcomp.maintenance.cleaning import MIN_AGE_SECONDS, RunCleaning, clean_run

    seconds = parse_seconds(older_than, "--older-than")
    if seconds < MIN_AGE_SECONDS:
        raise typer.BadParameter(f"{older_than!r} is less than 1h, the least that is safe.", param_hint="--older-than")
    clean = clean_run if recursive else tools.clean
    found = clean(url, older_than_seconds=seconds, dry_run=dry_run, storage_options=parse_storage_options(option))
    show(found, as_json, _print_run if isinstance(found, RunCleaning) else _print_cleaning)
    if isinstance(found, RunCleaning) and found.refused:
        raise typer.Exit(1)


def _print_cleaning(output: Output, found: Cleaning) -> None:
    from dcp_nvcomp.format.names import is_metadata_temporary

    done = "would remove" if found.dry_run else "removed"
    for orphan in found.orphans:
        output.print(f"{done} {orphan.kind} {orphan.name}, {decimal(orphan.nbytes)}")
    count = counted(len(found.orphans), "orphan")
    output.print(f"{found.path}: {done} {count}, {decimal(found.nbytes)}; {found.young} too young to remove.")
    for save_id in found.recoverable:
        what = save_id if is_metadata_temporary(save_id) else f"save {save_id}"
        output.print(f"Kept {what}: there is no `.metadata`, but `dcp-nvcomp recover` can bring it back.")
    if found.foreign:
        output.print(f"{len(found.foreign)} unused files of stock DCP kept: {', '.join(found.foreign)}")


def _print_run(output: Output, found: RunCleaning) -> None:
    done = "would remove" if found.dry_run else "removed"
    rows = [
        (
            one.path,
            str(len(one.orphans)),
            decimal(one.nbytes),
            str(one.young),
            f"`recover` can bring back {', '.join(one.recoverable)}" if one.recoverable else "",
        )
        for one in found.checkpoints
    ]
    rows += [(refusal.path, "-", "-", "-", f"refused: {refusal.error}") for refusal in found.refused]
    columns = [left("checkpoint"), Column(done), Column("size", 1), Column("too young", 2), left("note")]
    output.table(Table(columns, rows))
    count = counted(sum(len(one.orphans) for one in found.checkpoints), "orphan")
    output.print(f"{found.path}: {done} {count}, {decimal(found.nbytes)}.")


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


def prune_command(
    url: Run,
    keep_last: KeepLast,
    keep_every: KeepEvery = None,
    newer_than: NewerThan = None,
    keep_best: KeepBest = None,
    milestone: Milestone = None,
    dry_run: DryRun = False,
    step_template: Template = "step-{step}",
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Remove the steps of a run that no rule keeps. Never the newest complete one, nor what is pinned.

    Exit status 1 if there is no complete step, or if a step could not be removed.
    """
    from dcp_nvcomp.runs.pruning import prune_run
    from dcp_nvcomp.runs.retention import Keep

    rule = Keep(
        last=keep_last,
        every=keep_every,
        newer_than=None if newer_than is None else parse_seconds(newer_than, "--newer-than"),
        best=tuple(map(_best, keep_best or [])) or None,
        milestones=milestone or [],
    )
    storage_options = parse_storage_options(option)
    found = prune_run(url, rule, dry_run=dry_run, step_template=step_template, storage_options=storage_options)
    show(found, as_json, _print_pruning)
    if found.failed:
        raise typer.Exit(1)


def _best(text: str) -> Best:
    from dcp_nvcomp.runs.retention import Best

    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    if count and not count.isdecimal():
        raise typer.BadParameter(
            f"{text!r} is not METRIC[:MODE[:COUNT]], such as loss:min:2.", param_hint="--keep-best"
        )
    return Best(metric, mode or "min", int(count or 1))  # type: ignore[arg-type]


def _print_pruning(output: Output, found: Pruning) -> None:
    done = "would go" if found.dry_run else "removed"
    rows = [(saved.step, decimal(saved.nbytes), done, found.why.get(saved.step, "")) for saved in found.removed]
    rows += [(step, "", "kept", ", ".join(reasons)) for step, reasons in found.kept.items()]
    rows += [(step, "", "could not be removed", error) for step, error in found.failed.items()]
    columns = [Column("step"), Column("size", 1), left(""), left("why")]
    output.table(Table(columns, [(str(step), *others) for step, *others in sorted(rows)]))
    output.print(
        f"{found.path}: {counted(len(found.removed), 'step')} {done}, {decimal(found.nbytes)}; {len(found.kept)} kept."
    )


def pin_command(
    url: Run, step: Steps, remove: Remove = False, step_template: Template = "step-{step}", option: Options = None
) -> None:
    """Keep a step of a run, whatever the rules of its manager or of `prune` say.

    Exit status 1 if there is no complete checkpoint of this step.
    """
    from dcp_nvcomp.runs.pruning import pin_step, unpin_step

    storage_options = parse_storage_options(option)
    if remove:
        unpin_step(url, step, storage_options=storage_options)
    else:
        pin_step(url, step, step_template=step_template, storage_options=storage_options)
    Output().print(f"step {step} is {'not pinned any more' if remove else 'pinned'}")

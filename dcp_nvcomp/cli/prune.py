"""`dcp-nvcomp prune` and `dcp-nvcomp pin`: which steps of a run stay."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.clean import UNIT_SECONDS, DryRun
from dcp_nvcomp.cli.common import AsJson, Options, Output, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.runs.keep import Best, Keep
    from dcp_nvcomp.runs.pruning import Pruning

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="The run: a local path, or an fsspec URL such as s3://bucket/run.")
]
KeepLast = Annotated[int, typer.Option("--keep-last", min=1, help="Keep the newest steps, this many.")]
KeepEvery = Annotated[int | None, typer.Option("--keep-every", min=1, help="Keep multiples of this step.")]
NewerThan = Annotated[
    str | None,
    typer.Option(
        "--newer-than", metavar="AGE", help="Keep what was saved less than this long before the newest, such as 12h."
    ),
]
KeepBest = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-best", metavar="METRIC[:MODE[:COUNT]]", help="Keep the best, such as loss:min:2; may be repeated."
    ),
]
Milestone = Annotated[list[int] | None, typer.Option("--milestone", help="Keep this step; may be repeated.")]
Template = Annotated[str, typer.Option("--step-template", help="Name of a step's directory.")]
Steps = Annotated[int, typer.Argument(metavar="STEP", min=0, help="The step.")]
Remove = Annotated[bool, typer.Option("--remove", help="Unpin the step.")]


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

    storage_options = parse_storage_options(option)
    with one_line_errors():
        rule = _rule(keep_last, keep_every, newer_than, keep_best or [], milestone or [])
        found = prune_run(url, rule, dry_run=dry_run, step_template=step_template, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print(found)
    if found.failed:
        raise typer.Exit(1)


def pin_command(
    url: Run, step: Steps, remove: Remove = False, step_template: Template = "step-{step}", option: Options = None
) -> None:
    """Keep a step of a run, whatever the rules of its manager or of `prune` say.

    Exit status 1 if there is no complete checkpoint of this step.
    """
    from dcp_nvcomp.runs.pruning import pin_step, unpin_step

    storage_options = parse_storage_options(option)
    with one_line_errors():
        if remove:
            unpin_step(url, step, storage_options=storage_options)
        else:
            pin_step(url, step, step_template=step_template, storage_options=storage_options)
    Output().print(f"step {step} is {'not pinned any more' if remove else 'pinned'}")


def _rule(last: int, every: int | None, newer_than: str | None, best: list[str], milestones: list[int]) -> Keep:
    from dcp_nvcomp.runs.keep import Keep

    return Keep(
        last=last,
        every=every,
        newer_than=None if newer_than is None else _seconds(newer_than),
        best=tuple(map(_best, best)) or None,
        milestones=milestones,
    )


def _best(text: str) -> Best:
    from dcp_nvcomp.runs.keep import Best

    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    if count and not count.isdecimal():
        raise typer.BadParameter(
            f"{text!r} is not METRIC[:MODE[:COUNT]], such as loss:min:2.", param_hint="--keep-best"
        )
    return Best(metric, mode or "min", int(count or 1))  # type: ignore[arg-type]


def _seconds(age: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", age)
    if match is None:
        raise typer.BadParameter(f"{age!r} is not an age such as 90m, 12h or 7d.", param_hint="--newer-than")
    return float(match[1]) * UNIT_SECONDS[match[2]]


def _print(found: Pruning) -> None:
    output = Output()
    done = "would go" if found.dry_run else "removed"
    table = Table(Column("step"), Column("size", drop=1), Column("", is_left=True), Column("why", is_left=True))
    rows = [(saved.step, decimal(saved.nbytes), done, found.why.get(saved.step, "")) for saved in found.removed]
    rows += [(step, "", "kept", ", ".join(reasons)) for step, reasons in found.kept.items()]
    rows += [(step, "", "could not be removed", error) for step, error in found.failed.items()]
    for step, size, what, why in sorted(rows):
        table.add(str(step), size, what, why)
    output.table(table)
    output.print(f"{found.path}: {len(found.removed)} steps {done}, {decimal(found.nbytes)}; {len(found.kept)} kept.")

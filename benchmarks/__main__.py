"""The command line: runs one suite, prints its tables, and writes JSON and a picture if asked to."""

from __future__ import annotations

import importlib
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.measuring import NotHere, Settings
from benchmarks.processes import quiet
from benchmarks.results import Report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Suite(str, Enum):
    """The suites; each is the module of its name."""

    ratio = "ratio"
    cpu = "cpu"
    overlap = "overlap"
    asynchronous = "asynchronous"
    runs = "runs"
    plans = "plans"
    loads = "loads"
    incremental = "incremental"
    reshard = "reshard"
    scale = "scale"
    s3 = "s3"
    stores = "stores"
    gpu = "gpu"
    slices = "slices"
    tensors = "tensors"
    limits = "limits"
    predictions = "predictions"
    codecs = "codecs"
    rowcol = "rowcol"
    masters = "masters"
    torch_checkpointing = "torch_checkpointing"


@app.command()
def main(
    suite: Annotated[Suite, typer.Argument(help="what to measure")],
    quick: Annotated[bool, typer.Option("--quick", help="small and once: shows that it works")] = False,
    json: Annotated[Path | None, typer.Option(help="write all measurements there")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw them into this PNG")] = None,
    part: Annotated[list[str] | None, typer.Option(help="only this part of the suite; may be repeated")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="how often to measure each case")] = None,
    megabytes: Annotated[int | None, typer.Option(min=1, help="size of the state, in 10^6 bytes")] = None,
    directory: Annotated[Path | None, typer.Option(help="where checkpoints go, instead of memory")] = None,
    state: Annotated[Path | None, typer.Option(help="safetensors file to take the state from")] = None,
    s3: Annotated[str | None, typer.Option(envvar="DCP_NVCOMP_TEST_S3", help="endpoint of an S3 server")] = None,
) -> None:
    """Measure dcp_nvcomp and its peers."""
    console = Console(width=max(170, Console().width))
    settings = Settings(
        quick=quick,
        repeats=repeats,
        nbytes=None if megabytes is None else megabytes * 10**6,
        directory=directory,
        state=state,
        parts=tuple(part or ()),
        s3=s3,
        say=lambda text: console.print(f"... {text}", highlight=False),
    )
    try:
        report = run_suite(suite.value, settings)
    except NotHere as reason:
        console.print(f"{suite.value} can't run here: {reason}", highlight=False)
        raise typer.Exit(2) from None
    report.show(console)
    if json is not None:
        report.write_json(json)
    if plot is not None:
        from benchmarks.plots import draw

        draw(report.plots, report.facts["machine"], plot)


def run_suite(suite: str, settings: Settings) -> Report:
    """Run a suite.

    Raises:
        NotHere: this machine lacks what it needs.
    """
    quiet()
    report: Report = importlib.import_module(f"benchmarks.{suite}").run(settings)
    return report


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")

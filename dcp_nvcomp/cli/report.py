"""`dcp-nvcomp report`: statistics of a save or load as a page for a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dcp_nvcomp.cli.common import Output, one_line_errors

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="STATS.json...", help="What to_dict() of a SaveStats returned, or of each rank's LoadStats."
    ),
]
To = Annotated[Path, typer.Option("--output", help="The page.")]


def report_command(stats: Files, output: To = Path("report.html")) -> None:
    """Make a page of a save or load: per rank and stage, who was slow, sizes by component and codec.

    The page is one file that needs nothing else. From Python: `write_report`.
    """
    from dcp_nvcomp.reporting.report import write_report

    documents = [_read(path) for path in stats]
    with one_line_errors():
        write_report(documents, output)
    Output().print(f"wrote {output}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"No JSON: {path}: {error}", param_hint="STATS.json") from None

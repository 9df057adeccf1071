"""`dcp-nvcomp info` and `report`: this machine, and a page of a save or load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dcp_nvcomp.cli.common import AsJson
from dcp_nvcomp.cli.output import Output, show

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.environment import Environment

Files = Annotated[
    list[Path],
    Argument(metavar="STATS.json...", help="What to_dict() of a SaveStats returned, or of each rank's LoadStats."),
]
To = Annotated[Path, Option("--output", help="The page.")]


def info_command(as_json: AsJson = False) -> None:
    """Show versions, which engines run here, whether the compiled kernels are there, and if not, why not."""
    from dcp_nvcomp.maintenance.environment import info

    show(info(), as_json, _print_info)


def _print_info(output: Output, found: Environment) -> None:
    versions = {name: version or "not installed" for name, version in found.versions.items()}
    rows = {**versions, "CPU engine": found.cpu, "CUDA engine": found.cuda, **found.kernels}
    width = max(map(len, rows))
    for name, state in rows.items():
        output.print(f"{name:<{width}}  {state}")


def report_command(stats: Files, output: To = Path("report.html")) -> None:
    """Make a page of a save or load: per rank and stage, who was slow, sizes by component and codec.

    The page is one file that needs nothing else. From Python: `write_report`.
    """
    from dcp_nvcomp.reporting import write_report

    write_report([_read(path) for path in stats], output)
    Output().print(f"wrote {output}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"No JSON: {path}: {error}", param_hint="STATS.json") from None

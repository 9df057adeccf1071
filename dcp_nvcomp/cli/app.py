"""The command `dcp-nvcomp`: look into, verify, convert and repair checkpoints.

Commands import what they need when they run: torch takes seconds, and `--help` and completion need none of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from dcp_nvcomp.cli.advising import advise_command, bench_command, savings_command
from dcp_nvcomp.cli.common import AsJson, Output, show
from dcp_nvcomp.cli.convert import convert_command
from dcp_nvcomp.cli.looking import cat_command, diff_command, inspect_command, ls_command, verify_command
from dcp_nvcomp.cli.maintaining import clean_command, consolidate_command, pin_command, prune_command, recover_command
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.redaction import printable
from dcp_nvcomp.version import VERSION

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
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be read: {error.strerror}", param_hint="STATS.json") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not a JSON document: {error}", param_hint="STATS.json") from None


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with status 1 and one line instead of a traceback if a checkpoint is at fault."""
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            typer.echo(f"Error: {printable(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    name="dcp-nvcomp",
    help="Look into, verify, convert and repair compressed PyTorch distributed checkpoints.",
    no_args_is_help=True,
    # a traceback is for our own mistakes; it must not show the values of options, which may be secrets
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(ls_command, inspect_command, cat_command, diff_command, convert_command, verify_command, recover_command),
    *(consolidate_command, clean_command, prune_command, pin_command, bench_command, advise_command, savings_command),
    *(report_command, info_command),
)
for _command in _COMMANDS:
    app.command(_command.__name__.removesuffix("_command"))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dcp-nvcomp {VERSION}")
        raise typer.Exit


Version = Annotated[
    bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def _common(version: Version = False) -> None:
    pass


def main() -> None:
    """Entry point of the command `dcp-nvcomp`."""
    app(prog_name="dcp-nvcomp")


if __name__ == "__main__":
    main()

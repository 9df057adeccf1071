"""The command `dcp-nvcomp`: look into, verify, convert and repair checkpoints.

Results go to stdout, errors to stderr in one line. Exit status: 0, 1 if the checkpoint or the storage is at fault,
2 for a wrong command line.

Commands import what they need when they run: torch takes seconds, and `--help` and completion need none of it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dcp_nvcomp.cli.advise import advise_command
from dcp_nvcomp.cli.bench import bench_command
from dcp_nvcomp.cli.cat import cat_command
from dcp_nvcomp.cli.clean import clean_command
from dcp_nvcomp.cli.convert import convert_command
from dcp_nvcomp.cli.diff import diff_command
from dcp_nvcomp.cli.info import info_command
from dcp_nvcomp.cli.inspect import inspect_command
from dcp_nvcomp.cli.ls import ls_command
from dcp_nvcomp.cli.prune import pin_command, prune_command
from dcp_nvcomp.cli.recover import recover_command
from dcp_nvcomp.cli.report import report_command
from dcp_nvcomp.cli.savings import savings_command
from dcp_nvcomp.cli.verify import verify_command
from dcp_nvcomp.version import VERSION

app = typer.Typer(
    name="dcp-nvcomp",
    help="Look into, verify, convert and repair compressed PyTorch distributed checkpoints.",
    no_args_is_help=True,
    # a traceback is for our own mistakes; it must not show the values of options, which may be secrets
    pretty_exceptions_enable=False,
)
app.command("ls")(ls_command)
app.command("inspect")(inspect_command)
app.command("cat")(cat_command)
app.command("diff")(diff_command)
app.command("convert")(convert_command)
app.command("verify")(verify_command)
app.command("recover")(recover_command)
app.command("clean")(clean_command)
app.command("prune")(prune_command)
app.command("pin")(pin_command)
app.command("bench")(bench_command)
app.command("advise")(advise_command)
app.command("savings")(savings_command)
app.command("report")(report_command)
app.command("info")(info_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dcp-nvcomp {VERSION}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def _common(version: Version = False) -> None:
    pass


def main() -> None:
    """Entry point of the command `dcp-nvcomp`."""
    app(prog_name="dcp-nvcomp")


if __name__ == "__main__":
    main()

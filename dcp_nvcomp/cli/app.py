"""The command `dcp-nvcomp`: look into, verify, convert and repair checkpoints.

Commands import what they need when they run: torch takes seconds, and `--help` and completion need none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from dcp_nvcomp.cli.cat import cat_command
from dcp_nvcomp.cli.checking import diff_command, recover_command, verify_command
from dcp_nvcomp.cli.choosing import advise_command, bench_command, savings_command
from dcp_nvcomp.cli.convert import convert_command
from dcp_nvcomp.cli.info import info_command, report_command
from dcp_nvcomp.cli.listing import inspect_command, ls_command
from dcp_nvcomp.cli.removing import clean_command, pin_command, prune_command
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.redaction import printable
from dcp_nvcomp.version import VERSION


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
    ls_command,
    inspect_command,
    cat_command,
    diff_command,
    convert_command,
    verify_command,
    recover_command,
    clean_command,
    prune_command,
    pin_command,
    bench_command,
    advise_command,
    savings_command,
    report_command,
    info_command,
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

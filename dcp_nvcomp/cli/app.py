"""The command `dcp-nvcomp`: inspect, verify and repair checkpoints.

Results go to stdout, errors to stderr in one line. Exit status: 0, 1 if the checkpoint or the storage is at fault,
2 for a wrong command line.
"""

from __future__ import annotations

import typer

from dcp_nvcomp.cli.clean import clean_command
from dcp_nvcomp.cli.inspect import inspect_command
from dcp_nvcomp.cli.recover import recover_command
from dcp_nvcomp.cli.verify import verify_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="dcp-nvcomp",
    help="Look into, verify and repair compressed PyTorch distributed checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    # a traceback is for our own mistakes; it must not show the values of options, which may be secrets
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("recover")(recover_command)
app.command("clean")(clean_command)


def main() -> None:
    """Entry point of the command `dcp-nvcomp`."""
    app(prog_name="dcp-nvcomp")


if __name__ == "__main__":
    main()

"""The command `dcp-nvcomp`: what is in a checkpoint.

Results go to stdout, errors to stderr in one line. Exit status: 0, 1 where the checkpoint or the storage is at fault,
2 for a wrong command line.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.inspection import Inspection, Item, inspect_checkpoint
from dcp_nvcomp.stats import Totals

__all__ = ["app", "main"]

app = typer.Typer(
    name="dcp-nvcomp",
    help="Look into compressed PyTorch distributed checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    # a traceback is for our own mistakes; it must not show the values of options, which may be secrets
    pretty_exceptions_enable=False,
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A local path, or any fsspec URL such as s3://bucket/run/step.")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the storage, such as anon=true; may be repeated. VALUE is JSON where it parses as such, "
        """e.g. client_kwargs='{"endpoint_url": "http://127.0.0.1:9000"}', else text.""",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]


@app.callback()
def _commands() -> None:
    # makes `inspect` a command of its own name: Typer would drop the name of an only command
    """Look into compressed PyTorch distributed checkpoints."""


@app.command("inspect")
def inspect_command(url: Url, option: Options = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: keys, shapes, codecs and sizes. Reads metadata and footers, never payloads."""
    storage_options = _storage_options(option or [])
    with _one_line_errors():
        found = inspect_checkpoint(url, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print_tables(found)


def _storage_options(given: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key.isidentifier() or not equals:
            raise typer.BadParameter(f"{text!r} is not of the form KEY=VALUE.", param_hint="--option")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Exit with status 1 and one line instead of a traceback where a checkpoint or its storage is at fault."""
    try:
        yield
    except CheckpointError as error:
        typer.echo(f"Error: {_printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(1) from None


def _printable(text: str) -> str:
    """Text from a checkpoint, without anything that a terminal would obey or an encoding would choke on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _print_tables(found: Inspection) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1 << 16  # a file or a pipe has no edge to cut lines at

    def cell(text: str) -> Text:
        # Text, not str: rich would take "[...]" for markup
        return Text(_printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding))

    console.print(cell(_headline(found)))
    _print_items(console, found, cell)
    for title, by in (("dtype", found.by_dtype), ("codec", found.by_codec)):
        if by:
            console.print()
            _print_totals(console, title, by, cell)


def _headline(found: Inspection) -> str:
    whose = "a stock DCP checkpoint" if found.layout == "stock" else "a dcp-nvcomp checkpoint"
    files = f"{len(found.files)} data file{'' if len(found.files) == 1 else 's'}"
    return (
        f"{found.path} is {whose}: {decimal(found.totals.uncompressed_nbytes)} in {files} of "
        f"{decimal(found.file_nbytes)}, ratio {found.ratio:.3f}"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        left = name in ("key", "dtype", "shape", "codec")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return table


def _print_items(console: Console, found: Inspection, cell: Any) -> None:
    table = _table("key", "dtype", "shape", "shards", "codec", "before", "after", "ratio")
    for item in found.items:
        shape = "" if item.shape is None else str(list(item.shape))
        table.add_row(cell(item.fqn), cell(_dtype(item)), cell(shape), *_sizes(item.totals, cell(_codec(item))))
    table.add_section()
    table.add_row(Text("total"), Text(f"{len(found.items)} keys"), Text(), *_sizes(found.totals, Text()))
    console.print(table)


def _print_totals(console: Console, title: str, by: Mapping[str, Totals], cell: Any) -> None:
    table = _table(title, "shards", "before", "after", "ratio")
    for name, totals in by.items():
        shards, _, *sizes = _sizes(totals, Text())
        table.add_row(cell(name), shards, *sizes)
    console.print(table)


def _dtype(item: Item) -> str:
    return f"{item.dtype} (torch.save)" if item.kind == "torch_save" else item.dtype


def _codec(item: Item) -> str:
    return ", ".join(item.codecs) + (" (packed)" if item.packed else "")


def _sizes(totals: Totals, codec: Text) -> tuple[Text, Text, Text, Text, Text]:
    """The cells of the columns shards, codec, before, after and ratio."""
    before, after = decimal(totals.uncompressed_nbytes), decimal(totals.encoded_nbytes)
    return Text(f"{totals.records}"), codec, Text(before), Text(after), Text(f"{totals.ratio:.3f}")


def main() -> None:
    """Entry point of the command `dcp-nvcomp`."""
    app(prog_name="dcp-nvcomp")


if __name__ == "__main__":
    main()

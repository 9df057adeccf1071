"""`dcp-nvcomp inspect`: keys, shapes, codecs and sizes as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping

import typer
from rich.filesize import decimal
from rich.text import Text

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, one_line_errors, parse_storage_options, table
from dcp_nvcomp.maintenance.inspection import Inspection, Item, inspect_checkpoint
from dcp_nvcomp.saving.stats import Totals

__all__ = ["inspect_command"]

LEFT = ("key", "dtype", "shape", "codec")


def inspect_command(url: Url, option: Options = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: keys, shapes, codecs and sizes. Reads metadata and footers, never payloads."""
    storage_options = parse_storage_options(option)
    with one_line_errors():
        found = inspect_checkpoint(url, storage_options=storage_options)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        _print_tables(found)


def _print_tables(found: Inspection) -> None:
    output = Output()
    output.print(_headline(found))
    _print_items(output, found)
    for title, by in (("dtype", found.by_dtype), ("codec", found.by_codec)):
        if by:
            output.print()
            _print_totals(output, title, by)


def _headline(found: Inspection) -> str:
    whose = "a stock DCP checkpoint" if found.layout == "stock" else "a dcp-nvcomp checkpoint"
    files = f"{len(found.files)} data file{'' if len(found.files) == 1 else 's'}"
    return (
        f"{found.path} is {whose}: {decimal(found.totals.uncompressed_nbytes)} in {files} of "
        f"{decimal(found.file_nbytes)}, ratio {found.ratio:.3f}"
    )


def _print_items(output: Output, found: Inspection) -> None:
    rows = table(LEFT, "key", "dtype", "shape", "shards", "codec", "before", "after", "ratio")
    for item in found.items:
        shape = "" if item.shape is None else str(list(item.shape))
        rows.add_row(
            output.cell(item.fqn),
            output.cell(_dtype(item)),
            output.cell(shape),
            *_sizes(item.totals, output.cell(_codec(item))),
        )
    rows.add_section()
    rows.add_row(Text("total"), Text(f"{len(found.items)} keys"), Text(), *_sizes(found.totals, Text()))
    output.print(rows)


def _print_totals(output: Output, title: str, by: Mapping[str, Totals]) -> None:
    rows = table(LEFT, title, "shards", "before", "after", "ratio")
    for name, totals in by.items():
        shards, _, *sizes = _sizes(totals, Text())
        rows.add_row(output.cell(name), shards, *sizes)
    output.print(rows)


def _dtype(item: Item) -> str:
    return f"{item.dtype} (torch.save)" if item.kind == "torch_save" else item.dtype


def _codec(item: Item) -> str:
    return ", ".join(item.codecs) + (" (packed)" if item.packed else "")


def _sizes(totals: Totals, codec: Text) -> tuple[Text, Text, Text, Text, Text]:
    """The cells of the columns shards, codec, before, after and ratio."""
    before, after = decimal(totals.uncompressed_nbytes), decimal(totals.encoded_nbytes)
    return Text(f"{totals.records}"), codec, Text(before), Text(after), Text(f"{totals.ratio:.3f}")

"""`dcp-nvcomp inspect`: keys, shapes, codecs and sizes as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.ls import print_steps
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.inspection import Inspection, Item
    from dcp_nvcomp.saving.stats import Totals


class SortKey(str, Enum):
    """What the rows are sorted by."""

    key = "key"
    size = "size"
    ratio = "ratio"


Summary = Annotated[bool, typer.Option("--summary", help="Only sums: by dtype and by codec.")]
Depth = Annotated[
    int | None, typer.Option("--depth", min=1, help="Sum up keys by their first N parts, such as model.layers for 2.")
]
Sort = Annotated[SortKey, typer.Option("--sort", help="Rows by key, largest first, or least compressed first.")]
Filter = Annotated[
    str | None, typer.Option("--filter", metavar="PATTERN", help="Only keys that match, such as '*.weight'.")
]


def inspect_command(
    url: Url,
    summary: Summary = False,
    depth: Depth = None,
    sort: Sort = SortKey.key,
    pattern: Filter = None,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: keys, shapes, codecs and sizes. Reads metadata and footers, never payloads.

    Of a run, lists its checkpoints instead, as `ls` does.
    """
    from dcp_nvcomp.errors import CheckpointNotFoundError, IncompleteCheckpointError
    from dcp_nvcomp.maintenance.inspection import inspect_checkpoint
    from dcp_nvcomp.maintenance.run_listing import list_run

    storage_options = parse_storage_options(option)
    with one_line_errors():
        try:
            found = inspect_checkpoint(url, storage_options=storage_options)
        except CheckpointNotFoundError as error:
            if as_json or isinstance(error, IncompleteCheckpointError):
                raise
            try:
                run = list_run(url, storage_options=storage_options)
            except CheckpointNotFoundError:
                raise error from None
            output = Output()
            output.print(f"{run.path} is no checkpoint itself; these are below it:")
            print_steps(output, run)
            return
    headline = _headline(found)
    if pattern is not None:
        found = found.only([item for item in found.items if fnmatchcase(item.fqn, pattern)])
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    output = Output()
    output.print(headline)
    _print_tables(output, found, summary=summary, depth=depth, sort=sort)


def _print_tables(output: Output, found: Inspection, *, summary: bool, depth: int | None, sort: SortKey) -> None:
    if depth is not None:
        _print_totals(output, "keys", _sorted_totals(found.by_prefix(depth), sort))
    elif not summary:
        _print_items(output, found, _sorted_items(found.items, sort))
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


def _sorted_items(items: Sequence[Item], sort: SortKey) -> list[Item]:
    if sort is SortKey.size:
        return sorted(items, key=lambda item: -item.totals.encoded_nbytes)
    if sort is SortKey.ratio:
        return sorted(items, key=lambda item: item.totals.ratio)
    return list(items)


def _sorted_totals(by: Mapping[str, Totals], sort: SortKey) -> dict[str, Totals]:
    if sort is SortKey.size:
        return dict(sorted(by.items(), key=lambda pair: -pair[1].encoded_nbytes))
    if sort is SortKey.ratio:
        return dict(sorted(by.items(), key=lambda pair: pair[1].ratio))
    return dict(by)


def _print_items(output: Output, found: Inspection, items: Sequence[Item]) -> None:
    table = Table(
        Column("key", is_left=True),
        Column("dtype", is_left=True, drop=4),
        Column("shape", is_left=True, drop=2),
        Column("shards", drop=6),
        Column("codec", is_left=True, drop=5),
        Column("before", drop=3),
        Column("after", drop=1),
        Column("ratio", drop=1),
    )
    for item in items:
        shape = "" if item.shape is None else str(list(item.shape))
        table.add(item.fqn, _dtype(item), shape, str(item.totals.records), _codec(item), *_sizes(item.totals))
    totals = found.totals
    table.add("total", f"{len(found.items)} keys", "", str(totals.records), "", *_sizes(totals))
    output.table(table)


def _print_totals(output: Output, title: str, by: Mapping[str, Totals]) -> None:
    table = Table(
        Column(title, is_left=True),
        Column("shards", drop=2),
        Column("before", drop=1),
        Column("after"),
        Column("ratio"),
    )
    for name, totals in by.items():
        table.add(name, str(totals.records), *_sizes(totals))
    output.table(table)


def _dtype(item: Item) -> str:
    return f"{item.dtype} (torch.save)" if item.kind == "torch_save" else item.dtype


def _codec(item: Item) -> str:
    return ", ".join(item.codecs) + (" (packed)" if item.packed else "")


def _sizes(totals: Totals) -> tuple[str, str, str]:
    """Return the cells of the columns before, after and ratio."""
    return decimal(totals.uncompressed_nbytes), decimal(totals.encoded_nbytes), f"{totals.ratio:.3f}"

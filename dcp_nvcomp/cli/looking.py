"""`dcp-nvcomp ls`, `inspect`, `cat`, `verify` and `diff`: commands that look into checkpoints and change nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Argument, Option

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, parse_storage_options, progress_bar, show

if TYPE_CHECKING:
    import torch

    from dcp_nvcomp.maintenance.inspection import Inspection
    from dcp_nvcomp.reading.checkpoint import Checkpoint
    from dcp_nvcomp.saving.stats import Totals

T = TypeVar("T")


class SortKey(str, Enum):
    """What the rows are sorted by."""

    key = "key"
    size = "size"
    ratio = "ratio"


Summary = Annotated[bool, Option("--summary", help="Only sums: by dtype and by codec.")]
Depth = Annotated[
    int | None, Option("--depth", min=1, help="Sum up keys by their first N parts, such as model.layers for 2.")
]
Sort = Annotated[SortKey, Option("--sort", help="Rows by key, largest first, or least compressed first.")]
Filter = Annotated[str | None, Option("--filter", metavar="PATTERN", help="Only keys that match, such as '*.weight'.")]
Full = Annotated[bool, Option("--full", help="Decode every block too, and check the decoded bytes.")]
First = Annotated[str, Argument(metavar="A", help="A checkpoint: a local path, or any fsspec URL.")]
Second = Annotated[str, Argument(metavar="B", help="Another one.")]
KeysOnly = Annotated[bool, Option("--keys-only", help="Compare keys, shapes and dtypes; read no tensor.")]


def ls_command(url: Url, option: Options = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: date, size, ratio, ranks, whether each is complete, metrics, and why it is kept.

    Opens those that were not seen complete before, and reads a few KB of the others. Exit status 1 if nothing is found.
    """
    from dcp_nvcomp.maintenance.run_listing import list_run
    from dcp_nvcomp.runs.pruning import reasons_of

    storage_options = parse_storage_options(option)
    found = list_run(url, storage_options=storage_options)
    kept = reasons_of(url, storage_options=storage_options)
    if as_json:
        document = found.to_json()
        for step in document["steps"]:
            step["kept"] = list(kept.get(step["step"], ()))
        typer.echo(json.dumps(document, indent=1))
    else:
        Output().show(found.shown(kept))


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
    from dcp_nvcomp import tools
    from dcp_nvcomp.errors import CheckpointNotFoundError, IncompleteCheckpointError
    from dcp_nvcomp.maintenance.run_listing import list_run
    from dcp_nvcomp.saving.stats import table_of_totals

    storage_options = parse_storage_options(option)
    try:
        found = tools.inspect(url, storage_options=storage_options)
    except CheckpointNotFoundError as error:
        if as_json or isinstance(error, IncompleteCheckpointError):
            raise
        try:
            run = list_run(url, storage_options=storage_options)
        except CheckpointNotFoundError:
            raise error from None
        output = Output()
        output.print(f"{run.path} is no checkpoint itself; these are below it:")
        output.show(run.shown())
        return
    headline = found.headline
    if pattern is not None:
        found = found.only([item for item in found.items if fnmatchcase(item.fqn, pattern)])

    def print_inspection(output: Output, found: Inspection) -> None:
        output.print(headline)
        if depth is not None:
            by = found.by_prefix(depth)
            output.table(table_of_totals("keys", dict(_sorted(by.items(), sort, lambda pair: pair[1]))))
        elif not summary:
            output.table(found.table_of(_sorted(found.items, sort, lambda item: item.totals)))
        output.show(found.sums_shown())

    show(found, as_json, print_inspection)


def _sorted(rows: Iterable[T], sort: SortKey, totals: Callable[[T], Totals]) -> list[T]:
    if sort is SortKey.key:
        return list(rows)
    return sorted(rows, key=lambda row: -totals(row).encoded_nbytes if sort is SortKey.size else totals(row).ratio)


_MOST_JSON_VALUES = 100_000

Key = Annotated[str, Argument(metavar="KEY", help="A key, or part of a tensor, such as 'model.weight[10:12, 0]'.")]


def cat_command(url: Url, key: Key, option: Options = None, as_json: AsJson = False) -> None:
    """Print a tensor, some rows of it, or a Python object. Fetches only what it prints; runs no code."""
    from dcp_nvcomp.reading.checkpoint import open_checkpoint

    with open_checkpoint(url, **parse_storage_options(option)) as checkpoint:
        name, index = _split(key, checkpoint)
        stored = checkpoint.stored(name)
        value = checkpoint[name] if stored is None else _part(stored, index)
    if as_json:
        typer.echo(json.dumps(_to_json(name, value), indent=1))
    else:
        _print(Output(), name, value)


def parse_index(text: str) -> Any:
    """Return what is between the brackets of an index, such as `10:12, ..., -1`."""
    parts: list[Any] = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        if part == "...":
            parts.append(...)
        elif re.fullmatch(r"[+-]?[0-9]+", part):
            parts.append(int(part))
        elif re.fullmatch(r"([+-]?[0-9]+)?:([+-]?[0-9]+)?(:([+-]?[0-9]+)?)?", part):
            parts.append(slice(*(int(bound) if bound else None for bound in part.split(":"))))
        else:
            raise typer.BadParameter(f"{part!r} is not an integer, a slice such as 10:12, or ...", param_hint="KEY")
    return tuple(parts)


def _split(key: str, checkpoint: Checkpoint) -> tuple[str, Any]:
    match = re.fullmatch(r"(.*)\[([^\[\]]*)\]", key, re.DOTALL)
    if key in checkpoint or match is None:  # brackets may be part of a key
        return key, ...
    return match[1], parse_index(match[2])


def _part(stored: Any, index: Any) -> torch.Tensor:
    try:
        part: torch.Tensor = stored[index]
    except (IndexError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="KEY") from None
    return part


def _to_json(key: str, value: Any) -> dict[str, Any]:
    import torch

    if not isinstance(value, torch.Tensor):
        try:
            return {"schema": 1, "key": key, "value": _finite(value)}
        except RecursionError:  # it is in itself
            return {"schema": 1, "key": key, "value": repr(value)}
    too_many = value.numel() > _MOST_JSON_VALUES
    return {
        "schema": 1,
        "key": key,
        "dtype": _dtype(value),
        "shape": list(value.shape),
        "statistics": _statistics(value),
        "values": None if too_many else _finite(_computable(value).tolist()),
    }


def _finite(value: Any) -> Any:
    """Return nested values with text for what JSON has no number for, and with the `repr` of what it can't say."""
    if isinstance(value, dict):
        return {key if type(key) is str else repr(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, str | int) else repr(value)


def _computable(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its bytes if torch can't compute with its dtype."""
    import torch

    return value.view(torch.uint8) if value.dtype == torch.float4_e2m1fn_x2 else value


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _statistics(value: torch.Tensor) -> dict[str, Any]:
    """Return by what a broken tensor is known."""
    import torch

    if not value.numel() or value.is_complex() or _computable(value) is not value:
        return {}
    wide = value.to(torch.float64)
    finite = wide[wide.isfinite()]
    found = {"nan": int(wide.isnan().sum()), "inf": int(wide.isinf().sum()), "zeros": int((wide == 0).sum())}
    if not finite.numel():
        return found
    return {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean()), **found}


def _print(output: Output, key: str, value: Any) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        output.print(f"{key}: {type(value).__name__}", style="bold")
        output.print(repr(value))
        return
    output.print(f"{key}: {_dtype(value)} {list(value.shape)}", style="bold")
    statistics = [
        f"{name} {one:.6g}" if isinstance(one, float) else f"{name} {one}" for name, one in _statistics(value).items()
    ]
    if statistics:
        output.print(", ".join(statistics))
    for line in str(_computable(value)).splitlines():
        output.print(line)


def verify_command(url: Url, full: Full = False, option: Options = None, as_json: AsJson = False) -> None:
    """Check every byte of a checkpoint against its checksums, and name all that is corrupt or missing.

    Exit status 1 if anything is; warnings do not count, nor do blocks that only a GPU could decode.
    """
    from dcp_nvcomp import tools

    storage_options = parse_storage_options(option)
    with progress_bar("verifying") as progress:
        found = tools.verify(url, full=full, storage_options=storage_options, progress=progress)
    show(found, as_json)
    if not found.is_sound:
        raise typer.Exit(1)


def diff_command(
    a: First, b: Second, keys_only: KeysOnly = False, option: Options = None, as_json: AsJson = False
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, and values bit for bit. Exit status 1 if anything differs."""
    from dcp_nvcomp import tools

    storage_options = parse_storage_options(option)
    with progress_bar("comparing") as progress:
        found = tools.compare(a, b, values=not keys_only, storage_options=storage_options, progress=progress)
    show(found, as_json)
    if not found.is_equal:
        raise typer.Exit(1)

"""`dcp-nvcomp cat`: the values of one key."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from dcp_nvcomp.cli.common import AsJson, Options, Url, parse_storage_options
from dcp_nvcomp.cli.output import Output

if TYPE_CHECKING:
    import torch

    from dcp_nvcomp.reading.checkpoint import Checkpoint

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

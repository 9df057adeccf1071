"""`dcp-nvcomp convert`: from one checkpoint format to another."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Annotated

import typer
from rich.filesize import decimal

from dcp_nvcomp.cli.common import AsJson, Options, Output, one_line_errors, parse_storage_options, progress_bar

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Format(str, Enum):
    """Formats to write."""

    ours = "dcp-nvcomp"
    dcp = "dcp"
    safetensors = "safetensors"
    torch = "torch"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A checkpoint of this package or of stock DCP, a file of torch.save, or safetensors."
    ),
]
Destination = Annotated[str, typer.Argument(metavar="DST", help="A directory, or a file for torch and safetensors.")]
To = Annotated[Format | None, typer.Option("--to", help="By default what the suffix of DST says, else dcp-nvcomp.")]
Prefix = Annotated[
    str, typer.Option("--prefix", metavar="PREFIX", help="Only keys that begin with it, such as model.; it is cut off.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert floating-point tensors, such as to bfloat16.")
]
MaxShard = Annotated[
    str, typer.Option("--max-shard", metavar="SIZE", help="How large a file of safetensors may be, such as 5GB.")
]
Codec = Annotated[str, typer.Option("--codec", metavar="CODEC", help="For dcp-nvcomp: auto, planes-zstd, zstd, none.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")]


def convert_command(
    source: Source,
    destination: Destination,
    to: To = None,
    prefix: Prefix = "",
    dtype: Dtype = None,
    max_shard: MaxShard = "5GB",
    codec: Codec = "auto",
    overwrite: Overwrite = False,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Convert to and from stock DCP, torch.save and safetensors. Values keep their bits; no code is run.

    All but torch.save, which takes the whole state at once, is converted in pieces. Storage options are for
    URLs, not for local paths.
    """
    import torch

    from dcp_nvcomp.conversion.convert import convert

    wanted = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise typer.BadParameter(f"{dtype!r} is no floating-point dtype of torch.", param_hint="--dtype")
    max_shard_nbytes = _nbytes(max_shard)
    options = parse_storage_options(option)
    with one_line_errors(), progress_bar("converting") as progress:
        found = convert(
            source,
            destination,
            to=None if to is None else to.value,
            prefix=prefix,
            dtype=wanted,
            max_shard_nbytes=max_shard_nbytes,
            codec=codec,
            overwrite=overwrite,
            source_options=options if "://" in source else {},
            storage_options=options if "://" in destination else {},
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    objects = f" and {found.objects} objects" if found.objects else ""
    Output().print(
        f"{found.source} -> {found.destination} ({found.format}): {found.tensors} tensors{objects}, "
        f"{decimal(found.nbytes)}"
    )


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]i?b)?", text.lower())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2] or ""])
    if size <= 0:
        raise typer.BadParameter(f"{text!r} is not a size such as 5GB or 500MiB.", param_hint="--max-shard")
    return size

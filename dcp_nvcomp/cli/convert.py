"""`dcp-nvcomp convert`: from one checkpoint format to another."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from typer import Argument, Option

from dcp_nvcomp.cli.common import AsJson, Options, Output, parse_nbytes, parse_storage_options, progress_bar, show

if TYPE_CHECKING:
    from dcp_nvcomp.conversion.convert import Conversion


class Format(str, Enum):
    """Formats to write."""

    ours = "dcp-nvcomp"
    dcp = "dcp"
    safetensors = "safetensors"
    torch = "torch"


Source = Annotated[
    str,
    Argument(
        metavar="SRC",
        help="A checkpoint of this package or of stock DCP, a file of torch.save, compressed or not, or safetensors.",
    ),
]
Destination = Annotated[str, Argument(metavar="DST", help="A directory, or a file for torch and safetensors.")]
To = Annotated[Format | None, Option("--to", help="By default what the suffix of DST says, else dcp-nvcomp.")]
Prefix = Annotated[
    str, Option("--prefix", metavar="PREFIX", help="Only keys that begin with it, such as model.; it is cut off.")
]
Dtype = Annotated[
    str | None, Option("--dtype", metavar="DTYPE", help="Convert floating-point tensors, such as to bfloat16.")
]
MaxShard = Annotated[
    str, Option("--max-shard", metavar="SIZE", help="How large a file of safetensors may be, such as 5GB.")
]
Codec = Annotated[str, Option("--codec", metavar="CODEC", help="For dcp-nvcomp: auto, planes-zstd, zstd, none.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace what is at DST.")]


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
        raise typer.BadParameter(f"{dtype!r} is not a floating-point dtype of torch.", param_hint="--dtype")
    max_shard_nbytes = parse_nbytes(max_shard, "--max-shard")
    options = parse_storage_options(option)
    with progress_bar("converting") as progress:
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
    show(found, as_json, _print)


def _print(output: Output, found: Conversion) -> None:
    objects = f" and {found.objects} objects" if found.objects else ""
    output.print(
        f"{found.source} -> {found.destination} ({found.format}): {found.tensors} tensors{objects}, "
        f"{decimal(found.nbytes)}"
    )

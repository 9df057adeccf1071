"""`dcp-nvcomp savings`: what a month of checkpoints costs, and what compression saves of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_nvcomp.cli.common import AsJson, Output, one_line_errors
from dcp_nvcomp.cli.quantities import parse_nbytes, parse_seconds, readable_seconds
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.choosing.savings import Codec, Job, Savings

# of the post: bfloat16 weights and gradients, and two float32 moments
_NBYTES_PER_PARAMETER = 12
_GPUS = 8

Parameters = Annotated[
    float | None,
    typer.Option("--parameters", min=1, max=1e18, help="Parameters of the model, such as 70e9: 12 bytes each."),
]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", metavar="SIZE", help="Or the size of a checkpoint, such as 840GB.")
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="GPUs that wait during a save of --parameters or --checkpoint; by default 8."),
]
Interval = Annotated[str, typer.Option("--interval", metavar="TIME", help="Time between saves, such as 30m.")]
GpuHour = Annotated[float, typer.Option("--gpu-hour", min=0, max=1e9, help="Price of a GPU hour in dollars.")]
StorageRate = Annotated[str, typer.Option("--storage-rate", metavar="SIZE", help="What the storage takes a second.")]
StoragePrice = Annotated[float, typer.Option("--storage-price", min=0, max=1e9, help="Price of a GB (2^30) and month.")]
Kept = Annotated[int, typer.Option("--kept", min=0, help="How many checkpoints are kept.")]
Ratio = Annotated[
    float | None, typer.Option("--ratio", min=0.01, max=1e9, help="Of your own codec, with --encode-rate.")
]
EncodeRate = Annotated[
    str | None, typer.Option("--encode-rate", metavar="SIZE", help="What your codec encodes a second, for each GPU.")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it into this PNG or SVG.")]


def savings_command(
    parameters: Parameters = None,
    checkpoint: Checkpoint = None,
    gpus: Gpus = None,
    interval: Interval = "30m",
    gpu_hour: GpuHour = 4.40,
    storage_rate: StorageRate = "5GiB",
    storage_price: StoragePrice = 0.14,
    kept: Kept = 96,
    ratio: Ratio = None,
    encode_rate: EncodeRate = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Count what waiting for saves and storing them costs a month, with and without compression.

    The cost model, its prices and its models are those of NVIDIA's post on compressing checkpoints with nvCOMP; all
    inputs are options. Without --parameters or --checkpoint, the models of the post.
    """
    from dcp_nvcomp.choosing.savings import MEASURED, MODELS, PUBLISHED, Codec, Job, table_of
    from dcp_nvcomp.choosing.savings_plot import draw_savings

    inputs: dict[str, Any] = {
        "interval_minutes": parse_seconds(interval, "--interval") / 60,
        "gpu_hour_price": gpu_hour,
        "storage_gb_per_second": parse_nbytes(storage_rate, "--storage-rate") / 2**30,
        "storage_price": storage_price,
        "kept": kept,
    }
    if parameters is not None and checkpoint is not None:
        raise typer.BadParameter("Give either --parameters or --checkpoint.", param_hint="--checkpoint")
    if gpus is not None and parameters is None and checkpoint is None:
        raise typer.BadParameter(
            "The models of the post have GPUs of their own: give --parameters or --checkpoint too.", param_hint="--gpus"
        )
    if (ratio is None) != (encode_rate is None):
        raise typer.BadParameter("--ratio and --encode-rate belong together.", param_hint="--ratio")
    codecs: list[Codec] = [*PUBLISHED, *MEASURED]
    if ratio is not None and encode_rate is not None:
        codecs.append(Codec("yours", ratio, parse_nbytes(encode_rate, "--encode-rate") / 2**30, per_gpu=True))
    with one_line_errors():
        if parameters is None and checkpoint is None:
            jobs = [replace(job, **inputs) for job in MODELS]
        else:
            nbytes = (
                parse_nbytes(checkpoint, "--checkpoint") if checkpoint else (parameters or 0) * _NBYTES_PER_PARAMETER
            )
            jobs = [Job(_name(parameters, checkpoint), gpus or _GPUS, nbytes / 2**30, **inputs)]
        rows = table_of(jobs, codecs)
        if plot is not None:
            draw_savings(rows, plot)
    if as_json:
        typer.echo(json.dumps({"schema": 1, "inputs": inputs, "rows": [row.to_json() for row in rows]}, indent=1))
        return
    _print(Output(), rows)


def _name(parameters: float | None, checkpoint: str | None) -> str:
    return f"{parameters / 1e9:g}B parameters" if parameters is not None else f"{checkpoint} checkpoint"


def _print(output: Output, rows: list[Savings]) -> None:
    table = Table(
        Column("model", is_left=True), Column("GPUs"), Column("codec", is_left=True), Column("ratio", drop=1),
        Column("before", drop=3), Column("after", drop=2), Column("wait before", drop=3), Column("wait", drop=2),
        Column("idle GPUs", drop=1), Column("storage", drop=1), Column("savings a month"),
    )  # fmt: skip
    last: Job | None = None
    for row in rows:
        is_first, last = row.job is not last, row.job
        table.add(
            row.job.name if is_first else "", str(row.job.gpus) if is_first else "", row.codec.name,
            f"{row.codec.ratio_of(row.job):.2f}", f"{row.job.checkpoint_gb:,.0f} GB",
            f"{row.compressed.stored_gb:,.0f} GB", readable_seconds(row.plain.wait_seconds),
            readable_seconds(row.compressed.wait_seconds), f"${row.idle_savings:,.0f}",
            f"${row.storage_savings:,.0f}", f"${row.total:,.0f}",
        )  # fmt: skip
    output.table(table)
    job = rows[0].job
    output.print()
    output.print(
        f"{job.saves:,.0f} saves a month, one every {job.interval_minutes:g} minutes, while all GPUs wait; "
        f"${job.gpu_hour_price:.2f} a GPU hour; storage {job.storage_gb_per_second:.3g} GB/s and "
        f"${job.storage_price:.2f} a GB and month, {job.kept} checkpoints kept. GB are 2^30 bytes."
    )

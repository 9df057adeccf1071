"""`dcp-nvcomp bench`, `advise` and `savings`: whether compression pays, with which options, and how much."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dcp_nvcomp.calls.tables import Column, Table, counted, left
from dcp_nvcomp.cli.common import (
    AsJson,
    Options,
    Output,
    Url,
    parse_nbytes,
    parse_seconds,
    parse_storage_options,
    readable_nbytes,
    readable_rate,
    readable_seconds,
    show,
)

if TYPE_CHECKING:
    from dcp_nvcomp.advising.advice import Advice
    from dcp_nvcomp.advising.bench import Bench
    from dcp_nvcomp.advising.savings import Job, Savings

_NBYTES_PER_PARAMETER = 10  # bfloat16 weights and two float32 moments
_NBYTES_PER_PARAMETER_OF_POST = 12  # gradients too
_DEFAULT_STATES = ("1GB", "10GB", "100GB")
_GPUS = 8

State = Annotated[
    list[str] | None, Option("--state", metavar="SIZE", help="What one rank saves, such as 70GB; may be repeated.")
]
Parameters = Annotated[
    float | None,
    Option("--parameters", min=1, max=1e18, help="Or its number of parameters, such as 70e9: 10 bytes each."),
]
Seconds = Annotated[float, Option("--seconds", min=0.01, help="About how long to measure.")]
Threads = Annotated[int | None, Option("--threads", min=1, help="Threads that encode and decode.")]
Device = Annotated[str, Option("--device", help="Where the state is: cpu or cuda.")]


What = Annotated[
    str, Argument(metavar="URL_OR_SIZE", help="A checkpoint, or the size of a state such as 840GB, of all its ranks.")
]
Storage = Annotated[
    str | None, Option("--storage", metavar="URL", help="Where to measure; by default beside the checkpoint.")
]
Ranks = Annotated[
    int | None, Option("--ranks", min=1, help="How many ranks save the state; by default those of the checkpoint.")
]
Gpus = Annotated[int | None, Option("--gpus", min=1, help="GPUs of the job, one of which fails; by default ranks.")]
Mtbf = Annotated[
    str | None, Option("--mtbf", metavar="TIME", help="Or the job's mean time between failures, such as 8h.")
]
Stall = Annotated[
    str | None,
    Option("--stall", metavar="TIME", help="What a save costs training; by default all of it. See async_save."),
]


PostParameters = Annotated[
    float | None, Option("--parameters", min=1, max=1e18, help="Parameters of the model, such as 70e9: 12 bytes each.")
]
Checkpoint = Annotated[
    str | None, Option("--checkpoint", metavar="SIZE", help="Or the size of a checkpoint, such as 840GB.")
]
PostGpus = Annotated[
    int | None,
    Option("--gpus", min=1, help="GPUs that wait during a save of --parameters or --checkpoint; by default 8."),
]
Interval = Annotated[str, Option("--interval", metavar="TIME", help="Time between saves, such as 30m.")]
GpuHour = Annotated[float, Option("--gpu-hour", min=0, max=1e9, help="Price of a GPU hour in dollars.")]
StorageRate = Annotated[str, Option("--storage-rate", metavar="SIZE", help="What the storage takes a second.")]
StoragePrice = Annotated[float, Option("--storage-price", min=0, max=1e9, help="Price of a GB (2^30) and month.")]
Kept = Annotated[int, Option("--kept", min=0, help="How many checkpoints are kept.")]
Ratio = Annotated[float | None, Option("--ratio", min=0.01, max=1e9, help="Of your own codec, with --encode-rate.")]
EncodeRate = Annotated[
    str | None, Option("--encode-rate", metavar="SIZE", help="What your codec encodes a second, for each GPU.")
]
Plot = Annotated[Path | None, Option("--plot", help="Draw it into this PNG or SVG.")]


def bench_command(
    url: Url,
    state: State = None,
    parameters: Parameters = None,
    seconds: Seconds = 40.0,
    threads: Threads = None,
    device: Device = "cpu",
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Measure a storage and this machine, and say what a save and a load will take, compressed or not.

    Writes some hundred megabytes into a directory of its own at URL, and removes them.
    """
    sizes = [parse_nbytes(text, "--state") for text in state or []]
    if parameters is not None:
        sizes.append(round(parameters * _NBYTES_PER_PARAMETER))
    sizes = sizes or [parse_nbytes(text, "--state") for text in _DEFAULT_STATES]
    found = _measured(url, seconds, threads, device, parse_storage_options(option))
    if as_json:
        typer.echo(json.dumps(found.to_json(*sizes), indent=1))
    else:
        _print_bench(Output(), found, sizes)


def _measured(url: str, seconds: float, threads: int | None, device: str, storage_options: dict[str, Any]) -> Bench:
    from dcp_nvcomp.advising.bench import bench

    with _say_on_terminal() as say:
        return bench(url, seconds=seconds, threads=threads, device=device, storage_options=storage_options, say=say)


@contextlib.contextmanager
def _say_on_terminal() -> Iterator[Callable[[str], None]]:
    """Provide a line on standard error that shows what is being measured, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("measuring") as status:
        yield lambda text: status.update(f"measuring {text}")


def _print_bench(output: Output, found: Bench, sizes: list[int]) -> None:
    output.print(f"{found.url}, {counted(found.threads, 'thread')}, state on {found.device}")
    output.print()
    storage = [
        (what, str(streams), readable_rate(rate))
        for what, by_streams in (("write", found.storage.write_rates), ("read", found.storage.read_rates))
        for streams, rate in by_streams.items()
    ]
    storage.append(("publish a small file", "", readable_seconds(found.storage.publish_seconds)))
    output.table(Table([left("storage"), Column("streams"), Column("rate")], storage))
    output.print()
    codecs = [
        (one.codec, f"{one.ratio:.3f}", readable_rate(one.encode_rate), readable_rate(one.decode_rate))
        for one in found.codecs.values()
    ]
    output.table(Table([left("codec"), Column("ratio"), Column("encode"), Column("decode")], codecs))
    output.print()
    columns = [
        Column("state"), left("codec"), Column("stored", 2), Column("save"), Column("load"), left("bound by", 1),
    ]  # fmt: skip
    predicted = [
        (
            readable_nbytes(one.state_nbytes),
            one.codec,
            readable_nbytes(one.stored_nbytes),
            readable_seconds(one.save_seconds),
            readable_seconds(one.load_seconds),
            f"{one.save_bound}, {one.load_bound}",
        )
        for one in (found.predict(nbytes, codec) for nbytes in sizes for codec in found.trials)
    ]
    output.table(Table(columns, predicted))
    output.print()
    output.print(found.sentence, style="bold")
    compressed, plain = (found.predict(sizes[-1], codec).save_seconds for codec in ("auto", "none"))
    faster = "less" if compressed < plain else "more"
    output.print(
        f"At this storage a save of {readable_nbytes(sizes[-1])} a rank takes {abs(1 - compressed / plain):.0%} "
        f"{faster} time with auto than with none."
    )


def advise_command(
    what: What,
    storage: Storage = None,
    ranks: Ranks = None,
    gpus: Gpus = None,
    mtbf: Mtbf = None,
    stall: Stall = None,
    seconds: Seconds = 40.0,
    threads: Threads = None,
    device: Device = "cpu",
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Measure the storage and this machine, and advise on codec, threads and the interval between saves."""
    from dcp_nvcomp.advising.advice import Workload, advise, mtbf_of, workload_of_checkpoint

    storage_options = parse_storage_options(option)
    is_size = what[:1].isdigit() and "/" not in what and not os.path.exists(what)
    nbytes = parse_nbytes(what, "URL_OR_SIZE") if is_size else None
    if nbytes is not None and storage is None:
        raise typer.BadParameter(
            "Advice for a size needs a storage to measure: pass its path or URL.", param_hint="--storage"
        )
    mtbf_seconds = None if mtbf is None else parse_seconds(mtbf, "--mtbf")
    stall_seconds = None if stall is None else parse_seconds(stall, "--stall")
    if nbytes is not None:
        workload = Workload(nbytes, ranks or 1)
    else:
        workload = workload_of_checkpoint(what, storage_options=storage_options)
        workload = replace(workload, ranks=ranks or workload.ranks)
    if gpus is not None and mtbf_seconds is None:
        mtbf_seconds = mtbf_of(gpus)
    found = _measured(storage or _beside(what), seconds, threads, device, storage_options)
    advice = advise(workload, found, mtbf_seconds=mtbf_seconds, stall_seconds=stall_seconds)
    whose = "as you say" if mtbf is not None else "if GPUs fail as often as those that trained Llama 3"
    show(advice, as_json, lambda output, advice: _print_advice(output, advice, whose))


def _beside(checkpoint: str) -> str:
    """Return the directory that a checkpoint is in; of a whole bucket or server, which is in none, itself."""
    from dcp_nvcomp.storage.open import place_of

    place = place_of(checkpoint)
    protocol, mark, rest = place.rstrip("/").partition("://")
    if not mark:
        return os.path.dirname(place)
    head, slash, _ = rest.rpartition("/")
    return f"{protocol}://{head}" if slash or protocol == "memory" else place


def _print_advice(output: Output, advice: Advice, whose: str) -> None:
    best, plain, workload = advice.prediction, advice.plain, advice.workload
    each = f", {readable_nbytes(workload.rank_nbytes)} each of {workload.ranks} ranks" if workload.ranks > 1 else ""
    output.print(f"A state of {readable_nbytes(workload.state_nbytes)}{each}.")
    output.print(
        f"Codec: codec={advice.codec!r}. A save takes {readable_seconds(best.save_seconds)} and a load "
        f"{readable_seconds(best.load_seconds)}, uncompressed {readable_seconds(plain.save_seconds)} and "
        f"{readable_seconds(plain.load_seconds)}; it stores {best.stored_nbytes / best.state_nbytes:.0%} of the bytes."
    )
    why = "more would wait for the storage" if best.save_bound == "write" else "encoding takes longest"
    output.print(f"Threads: thread_count={advice.thread_count}; {why}.")
    output.print(
        f"Interval: save every {readable_seconds(advice.interval_seconds)} (Daly 2006; Young 1974 has "
        f"{readable_seconds(advice.young_interval_seconds)}). A save costs training "
        f"{readable_seconds(advice.stall_seconds)}, and a failure comes every "
        f"{readable_seconds(advice.mtbf_seconds)}, {whose}; {advice.lost_part:.1%} of the time is lost then."
    )
    output.print(f"In general, {advice.sentence}.")
    if workload.ranks > 1:
        output.print("The storage was measured by one process alone: ranks that share a link take longer.")


def savings_command(
    parameters: PostParameters = None,
    checkpoint: Checkpoint = None,
    gpus: PostGpus = None,
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
    from dcp_nvcomp.advising.savings import MEASURED, MODELS, PUBLISHED, Codec, Job, draw_savings, savings

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
    jobs = list(MODELS)
    if checkpoint is not None:
        jobs = [Job(f"{checkpoint} checkpoint", gpus or _GPUS, parse_nbytes(checkpoint, "--checkpoint") / 2**30)]
    elif parameters is not None:
        gb = parameters * _NBYTES_PER_PARAMETER_OF_POST / 2**30
        jobs = [Job(f"{parameters / 1e9:g}B parameters", gpus or _GPUS, gb)]
    rows = [savings(job, codec) for job in (replace(job, **inputs) for job in jobs) for codec in codecs]
    if plot is not None:
        draw_savings(rows, plot)
    if as_json:
        typer.echo(json.dumps({"schema": 1, "inputs": inputs, "rows": [row.to_json() for row in rows]}, indent=1))
    else:
        _print_savings(Output(), rows)


def _print_savings(output: Output, rows: list[Savings]) -> None:
    columns = [
        left("model"), Column("GPUs"), left("codec"), Column("ratio", 1), Column("before", 3), Column("after", 2),
        Column("wait before", 3), Column("wait", 2), Column("idle GPUs", 1), Column("storage", 1),
        Column("savings a month"),
    ]  # fmt: skip
    cells = []
    last: Job | None = None
    for row in rows:
        cells.append((
            *(("", "") if row.job is last else (row.job.name, str(row.job.gpus))), row.codec.name,
            f"{row.codec.ratio_of(row.job):.2f}", f"{row.job.checkpoint_gb:,.0f} GB",
            f"{row.compressed.stored_gb:,.0f} GB", readable_seconds(row.plain.wait_seconds),
            readable_seconds(row.compressed.wait_seconds), f"${row.idle_savings:,.0f}",
            f"${row.storage_savings:,.0f}", f"${row.total:,.0f}",
        ))  # fmt: skip
        last = row.job
    output.table(Table(columns, cells))
    job = rows[0].job
    output.print()
    output.print(
        f"{job.saves:,.0f} saves a month, one every {job.interval_minutes:g} minutes, while all GPUs wait; "
        f"${job.gpu_hour_price:.2f} a GPU hour; storage {job.storage_gb_per_second:.3g} GB/s and "
        f"${job.storage_price:.2f} a GB and month, {job.kept} checkpoints kept. GB are 2^30 bytes."
    )

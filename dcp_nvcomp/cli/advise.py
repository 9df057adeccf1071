"""`dcp-nvcomp advise`: which codec, how many threads, and how often to save."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_nvcomp.cli.bench import Device, Seconds, Threads, say_on_terminal
from dcp_nvcomp.cli.common import AsJson, Options, Output, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.quantities import parse_nbytes, parse_seconds, readable_nbytes, readable_seconds

if TYPE_CHECKING:
    from dcp_nvcomp.choosing.advice import Advice

What = Annotated[
    str,
    typer.Argument(metavar="URL_OR_SIZE", help="A checkpoint, or the size of a state such as 840GB, of all its ranks."),
]
Storage = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", help="Where to measure; by default beside the checkpoint."),
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="How many ranks save the state; by default those of the checkpoint."),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, help="GPUs of the job, one of which fails; by default ranks.")
]
Mtbf = Annotated[
    str | None, typer.Option("--mtbf", metavar="TIME", help="Or the job's mean time between failures, such as 8h.")
]
Stall = Annotated[
    str | None,
    typer.Option("--stall", metavar="TIME", help="What a save costs training; by default all of it. See async_save."),
]


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
    from dcp_nvcomp.choosing.advice import Workload, advise, mtbf_of, workload_of_checkpoint
    from dcp_nvcomp.choosing.bench import bench

    storage_options = parse_storage_options(option)
    is_size = what[:1].isdigit() and "/" not in what and not os.path.exists(what)
    nbytes = parse_nbytes(what, "URL_OR_SIZE") if is_size else None
    if nbytes is not None and storage is None:
        raise typer.BadParameter("Of a size, it has to be said where to measure.", param_hint="--storage")
    mtbf_seconds = None if mtbf is None else parse_seconds(mtbf, "--mtbf")
    stall_seconds = None if stall is None else parse_seconds(stall, "--stall")
    with one_line_errors(), say_on_terminal() as say:
        if nbytes is not None:
            workload = Workload(nbytes, ranks or 1)
        else:
            workload = workload_of_checkpoint(what, storage_options=storage_options)
            workload = replace(workload, ranks=ranks or workload.ranks)
        if gpus is not None and mtbf_seconds is None:
            mtbf_seconds = mtbf_of(gpus)
        found = bench(
            storage or _beside(what),
            seconds=seconds,
            threads=threads,
            device=device,
            storage_options=storage_options,
            say=say,
        )
        advice = advise(workload, found, mtbf_seconds=mtbf_seconds, stall_seconds=stall_seconds)
    if as_json:
        typer.echo(json.dumps(advice.to_json(), indent=1))
    else:
        _print(Output(), advice, measured_mtbf=mtbf is not None)


def _beside(checkpoint: str) -> str:
    """Return the directory that a checkpoint is in; of a whole bucket or server, which is in none, itself."""
    from dcp_nvcomp.storage.open import place_of

    place = place_of(checkpoint)
    protocol, mark, rest = place.rstrip("/").partition("://")
    if not mark:
        return os.path.dirname(place)
    head, slash, _ = rest.rpartition("/")
    return f"{protocol}://{head}" if slash or protocol == "memory" else place


def _print(output: Output, advice: Advice, *, measured_mtbf: bool) -> None:
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
    whose = "as you say" if measured_mtbf else "if GPUs fail as often as those that trained Llama 3"
    output.print(
        f"Interval: save every {readable_seconds(advice.interval_seconds)} (Daly 2006; Young 1974 has "
        f"{readable_seconds(advice.young_interval_seconds)}). A save costs training "
        f"{readable_seconds(advice.stall_seconds)}, and a failure comes every "
        f"{readable_seconds(advice.mtbf_seconds)}, {whose}; {advice.lost_part:.1%} of the time is lost then."
    )
    output.print(f"In general, {advice.sentence}.")
    if workload.ranks > 1:
        output.print("The storage was measured by one process alone: ranks that share a link take longer.")

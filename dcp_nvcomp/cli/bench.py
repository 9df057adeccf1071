"""`dcp-nvcomp bench`: what a storage and this machine do, and whether compression pays there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_nvcomp.cli.common import AsJson, Options, Output, Url, one_line_errors, parse_storage_options
from dcp_nvcomp.cli.quantities import parse_nbytes, readable_nbytes, readable_rate, readable_seconds
from dcp_nvcomp.cli.tables import Column, Table

if TYPE_CHECKING:
    from dcp_nvcomp.choosing.bench import Bench

# bfloat16 weights and two float32 moments
NBYTES_PER_PARAMETER = 10
_DEFAULT_STATES = ("1GB", "10GB", "100GB")

State = Annotated[
    list[str] | None,
    typer.Option("--state", metavar="SIZE", help="What one rank saves, such as 70GB; may be repeated."),
]
Parameters = Annotated[
    float | None,
    typer.Option("--parameters", min=1, max=1e18, help="Or its number of parameters, such as 70e9: 10 bytes each."),
]
Seconds = Annotated[float, typer.Option("--seconds", min=0.01, help="About how long to measure.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads that encode and decode.")]
Device = Annotated[str, typer.Option("--device", help="Where the state is: cpu or cuda.")]


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
    from dcp_nvcomp.choosing.bench import bench

    sizes = [parse_nbytes(text, "--state") for text in state or []]
    if parameters is not None:
        sizes.append(round(parameters * NBYTES_PER_PARAMETER))
    sizes = sizes or [parse_nbytes(text, "--state") for text in _DEFAULT_STATES]
    storage_options = parse_storage_options(option)
    with one_line_errors(), say_on_terminal() as say:
        found = bench(url, seconds=seconds, threads=threads, device=device, storage_options=storage_options, say=say)
    if as_json:
        typer.echo(json.dumps(found.to_json(*sizes), indent=1))
    else:
        _print(Output(), found, sizes)


@contextlib.contextmanager
def say_on_terminal() -> Iterator[Callable[[str], None]]:
    """Provide a line on standard error that shows what is being measured, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("measuring") as status:
        yield lambda text: status.update(f"measuring {text}")


def _print(output: Output, found: Bench, sizes: list[int]) -> None:
    output.print(f"{found.url}, {found.threads} thread{'s' if found.threads > 1 else ''}, state on {found.device}")
    output.print()
    storage = Table(Column("storage", is_left=True), Column("streams"), Column("rate"))
    for what, by_streams in (("write", found.storage.write_rates), ("read", found.storage.read_rates)):
        for streams, rate in by_streams.items():
            storage.add(what, str(streams), readable_rate(rate))
    storage.add("publish a small file", "", readable_seconds(found.storage.publish_seconds))
    output.table(storage)
    output.print()
    codecs = Table(Column("codec", is_left=True), Column("ratio"), Column("encode"), Column("decode"))
    for rates in found.codecs.values():
        codecs.add(
            rates.codec, f"{rates.ratio:.3f}", readable_rate(rates.encode_rate), readable_rate(rates.decode_rate)
        )
    output.table(codecs)
    output.print()
    expected = Table(
        Column("state"), Column("codec", is_left=True), Column("stored", drop=2), Column("save"), Column("load"),
        Column("bound by", is_left=True, drop=1),
    )  # fmt: skip
    for nbytes in sizes:
        for codec in found.trials:
            times = found.predict(nbytes, codec)
            bound = f"{times.save_bound}, {times.load_bound}"
            expected.add(
                readable_nbytes(nbytes), codec, readable_nbytes(times.stored_nbytes),
                readable_seconds(times.save_seconds), readable_seconds(times.load_seconds), bound,
            )  # fmt: skip
    output.table(expected)
    output.print()
    output.print(found.sentence, style="bold")
    compressed, plain = (found.predict(sizes[-1], codec).save_seconds for codec in ("auto", "none"))
    faster = "less" if compressed < plain else "more"
    output.print(
        f"At this storage a save of {readable_nbytes(sizes[-1])} a rank takes {abs(1 - compressed / plain):.0%} "
        f"{faster} time with auto than with none."
    )

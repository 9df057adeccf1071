"""Every byte of a small checkpoint is damaged, one at a time: what comes of it, counted.

    python -m tests.faults.damage --json damage.json   every bit of every byte, by both checks
    python -m tests.faults.damage --every 50           one flip of fifty only

Each flip ends in an error, or in the same state bit for bit. Anything else is a lie, and stops the run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcp_nvcomp import NvcompReader, errors
from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from tests.conformance.test_subclasses import HighLow
from tests.states import State, blank

from .small import save_in_order

EXACT = "the same bits"
LIE = "a lie"
HANG_SECONDS = 60.0
VERIFY = ("stored", "full")


class Variety:
    """Chooses another chain for each kind of element, so that a small checkpoint has all of them."""

    def choose(self, element: Any, sample: Any, nbytes: int) -> CodecChain:
        chains = {
            "bfloat16": CodecChain(Planes(2), Zstd(literals_only=True)),
            "float32": CodecChain(Planes(4), Deflate(literals_only=True)),
            "int64": CodecChain(Bytes(), Zstd(level=3)),
        }
        return chains.get(element.name, CodecChain(Bytes()))


def varied_state(seed: int) -> State:
    """Something of everything: codecs, packs, Python objects, a payload of torch.save, a record that is aligned."""
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(200, generator=generator) / 50
    return {
        "bf16": floats.bfloat16().reshape(40, 5),
        "fp32": floats[:60].clone(),
        "small": floats[:3].clone(),
        "bytes": torch.randint(0, 255, (50,), dtype=torch.uint8, generator=generator),
        "object": {"step": seed, "name": "run"},
        "hidden": HighLow(floats[:5].clone(), floats[5:10].clone()),
        "aligned": torch.full((1 << 17,), seed),  # 1 MiB of int64, which zstd makes next to nothing of
    }


def make_checkpoint(path: Path, seed: int) -> State:
    """Save such a state, and return it."""
    state = varied_state(seed)
    save_in_order(path, state, codec=Variety(), sync_files=False)
    return state


def _fingerprint(state: Mapping[str, Any]) -> dict[str, Any]:
    """All the bits of a state, to compare."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, HighLow):
            value = torch.cat([value.high, value.low])
        if isinstance(value, torch.Tensor):
            found[key] = (value.dtype, value.shape, value.contiguous().view(torch.uint8).numpy().tobytes())
        else:
            found[key] = value
    return found


def _blank(state: State) -> State:
    into: State = {}
    for key, value in state.items():
        if isinstance(value, HighLow):
            into[key] = HighLow(torch.zeros_like(value.high), torch.zeros_like(value.low))
        else:
            into[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else blank(value)
    return into


class Probe:
    """Loads a checkpoint that may be damaged, the way dcp.load does but for its gathering of errors."""

    def __init__(self, path: Path, *states: State) -> None:
        self.path = path
        self._blank = states[0]
        self._expected = [_fingerprint(state) for state in states]

    def load(self, verify: str) -> State:
        """Return what the checkpoint holds; may raise only errors of this package and refusals of DCP's planner."""
        into = _blank(self._blank)
        reader, planner = NvcompReader(self.path, thread_count=1, verify=verify), DefaultLoadPlanner()
        metadata = reader.read_metadata()
        try:
            planner.set_up_planner(into, metadata, True)
            reader.set_up_storage_reader(metadata, True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
        except (RuntimeError, ValueError) as error:  # what DCP raises where keys or shapes are not those asked for
            raise errors.MetadataError(f"DCP's planner refused: {error}") from error
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return into

    def outcome(self, verify: str) -> str:
        """EXACT with the number of the state where there are several, the name of an error of ours, or a LIE."""
        start = time.perf_counter()
        try:
            found = _fingerprint(self.load(verify))
        except errors.CheckpointError as error:
            outcome = type(error).__name__
        except Exception as error:
            outcome = f"{LIE}: {type(error).__name__}: {error}"
        else:
            which = [number for number, expected in enumerate(self._expected) if found == expected]
            number = f" {which[0]}" if which and len(self._expected) > 1 else ""
            outcome = EXACT + number if which else f"{LIE}: other bits"
        if time.perf_counter() - start > HANG_SECONDS:
            return f"{LIE}: it took {time.perf_counter() - start:.0f} s"
        return outcome


@dataclass(frozen=True)
class Flip:
    """One byte that is not what it was."""

    name: str  # the file
    at: int  # which byte
    mask: int  # what is flipped in it
    verify: str  # how the load checks


def flips(path: Path, masks: Sequence[int], verify: Sequence[str]) -> list[Flip]:
    """Every byte of every file, with each of the masks."""
    in_order = sorted(path.iterdir(), key=lambda file: kind_of_file(file.name))  # ids differ, and are part of names
    files = [(file.name, file.stat().st_size) for file in in_order]
    return [Flip(n, at, mask, how) for n, nbytes in files for at in range(nbytes) for mask in masks for how in verify]


def kind_of_file(name: str) -> str:
    """Return the kind of a file, as the table names it."""
    if name == ".metadata":
        return name
    return "data file" if name.endswith(".distcp") else "`__<save_id>.metadata`"


def run_flip(probe: Probe, flip: Flip) -> str:
    """Damage a byte, load, mend it."""
    with open(probe.path / flip.name, "r+b", buffering=0) as file:
        file.seek(flip.at)
        (byte,) = file.read(1)
        file.seek(flip.at)
        file.write(bytes([byte ^ flip.mask]))
        outcome = probe.outcome(flip.verify)
        file.seek(flip.at)
        file.write(bytes([byte]))
    return outcome


def count(
    path: Path, state: State, some: Iterable[Flip], told: Callable[[int], None] = lambda done: None
) -> Counter[str]:
    """Outcomes by "file, verify: outcome"."""
    counts: Counter[str] = Counter()
    probe = Probe(path, state)
    with torch.serialization.safe_globals([HighLow]):
        assert {probe.outcome(how) for how in VERIFY} == {EXACT}, "before anything is damaged"
        for done, flip in enumerate(some):
            outcome = run_flip(probe, flip)
            assert not outcome.startswith(LIE), f"{flip}: {outcome}"
            counts[f"{kind_of_file(flip.name)}|{flip.verify}|{outcome}"] += 1
            told(done)
    return counts


def table(counts: Mapping[str, int]) -> str:
    """The counts as a Markdown table: flips, found and harmless, by file and check; then the errors."""
    lines = [
        "| file | `verify` | flips | error | same bits | silent wrong values |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = sorted({key.rsplit("|", 1)[0] for key in counts})
    for row in rows:
        total = sum(number for key, number in counts.items() if key.rsplit("|", 1)[0] == row)
        exact = counts.get(f"{row}|{EXACT}", 0)
        file, verify = row.split("|")
        lines.append(f"| {file} | {verify} | {total:,} | {total - exact:,} | {exact:,} | 0 |")
    return "\n".join(lines)


def _share(arguments: tuple[int, int, int]) -> Counter[str]:
    number, workers, every = arguments
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as folder:
        state = make_checkpoint(Path(folder), 1)
        some = flips(Path(folder), [1 << bit for bit in range(8)], VERIFY)
        some = random.Random(every).sample(some, len(some) // every)[number::workers]

        def tell(done: int) -> None:
            if number == 0 and done % 1000 == 0:
                print(f"{done:,} of {len(some):,}", file=sys.stderr, flush=True)

        return count(Path(folder), state, some, tell)


def main() -> None:
    """Count all flips, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the counts go")
    parser.add_argument("--every", type=int, default=1, help="only one flip of so many")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        counts = sum(pool.map(_share, [(n, given.workers, given.every) for n in range(given.workers)]), Counter[str]())
    result = {
        "seconds": round(time.perf_counter() - start),
        "every": given.every,
        "counts": dict(sorted(counts.items())),
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(counts))


if __name__ == "__main__":
    main()

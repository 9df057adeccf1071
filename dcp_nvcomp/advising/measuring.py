"""Measure the storage without codecs, the codecs without a storage, and whole saves and loads.

Storage is measured through the same `Filesystem`, with as many streams and reads at once as a save and a load have, and
with random bytes. Codecs are measured by the jobs of one rank, without planning and commit, in memory. Whole saves and
loads show what neither does: encoding and writing share cores, and a save has costs that do not grow with it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.format.metadata.shards import ShardIndex, StoredAt
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.load import load
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.saving.data_files import WrittenFile
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.rank_save import RankSave
from dcp_nvcomp.saving.save import save
from dcp_nvcomp.saving.stats import SaveStats
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.in_memory import MemoryFilesystem

State = Mapping[str, torch.Tensor]

_PIECE_NBYTES = 1 << 20  # as an encoded block is handed over
_FIRST_NBYTES = 8 << 20
_MOST_NBYTES = 256 << 20
_LATENCIES = 5
_REPEATS = 3

_SIDE = 1024
# As skewed in their exponents as the tensors of benchmarks/states.py, so that each kind is compressed as much as real
# ones, within a hundredth (tests/advising compares them).
_KINDS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "model": lambda g: (_normal(g) * _scales(g, 0.2) * 2e-2).bfloat16(),
    "grad": lambda g: (_normal(g) * _scales(g, 0.5) * 1e-4).bfloat16(),
    "exp_avg": lambda g: _normal(g) * _scales(g, 0.5) * 1e-5,
    "exp_avg_sq": lambda g: torch.exp(_normal(g) * 0.5) * _scales(g, 0.7, 0.4) * 1e-10,
}


@dataclass(frozen=True)
class StorageRates:
    """What a storage does for one rank; rates are bytes a second with so many streams or reads at once."""

    write_rates: dict[int, float]  # with one, and with as many as a save uses
    read_rates: dict[int, float]  # with one, and with as many as a load uses
    file_seconds: float  # to make a file of one byte, durably
    publish_seconds: float  # to publish a small file, as a commit does
    file_nbytes: int  # state of so many bytes is worth another stream
    streams: tuple[int, ...] = ()  # how many a save uses at most with one thread, two, ...; empty if it is the same

    def write_rate(self, state_nbytes: int, *, threads: int | None = None) -> float:
        """Return the rate for a state of this size, which may be too small for all streams."""
        most = max(self.write_rates)
        if threads is not None and self.streams:
            most = min(most, self.streams[min(threads, len(self.streams)) - 1])
        streams = max(1, min(most, state_nbytes // self.file_nbytes))
        low = max(known for known in self.write_rates if known <= streams)
        high = min(known for known in self.write_rates if known >= streams)
        slow, fast = self.write_rates[low], self.write_rates[high]
        return slow if low == high else slow + (fast - slow) * (streams - low) / (high - low)

    @property
    def read_rate(self) -> float:
        return self.read_rates[max(self.read_rates)]


@dataclass(frozen=True)
class CodecRates:
    """What a codec does with the sample state on this machine, without a storage; rates are bytes of state a second."""

    codec: str
    threads: int
    ratio: float
    encode_rate: float
    decode_rate: float


@dataclass(frozen=True)
class Trial:
    """Median times of whole saves and loads with one codec; the empty ones show what does not grow with the state."""

    codec: str
    nbytes: int
    ratio: float
    save_seconds: float
    load_seconds: float
    empty_save_seconds: float
    empty_load_seconds: float


def _normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(_SIDE, _SIDE, generator=generator)


def _scales(generator: torch.Generator, rows: float, columns: float = 0.0) -> torch.Tensor:
    """Return positive factors for a matrix; the arguments are the deviations of their logarithms."""
    by_row = torch.randn(_SIDE, 1, generator=generator) * rows
    by_column = torch.randn(1, _SIDE, generator=generator) * columns
    return torch.exp(by_row + by_column)


def sample_state(nbytes: int, *, unique_nbytes: int = 24 << 20, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return a state of about this size: bfloat16 weights and gradients, and both moments of Adam in float32."""
    generator = torch.Generator().manual_seed(0)
    layer_nbytes = (2 + 2 + 4 + 4) * _SIDE * _SIDE
    layers = max(1, round(nbytes / layer_nbytes))
    unique = max(1, min(layers, unique_nbytes // layer_nbytes))
    made = [{kind: make(generator).to(device) for kind, make in _KINDS.items()} for _ in range(unique)]
    return {
        f"{kind}.layers.{layer}.weight": tensor if layer < unique else tensor.clone()
        for layer in range(layers)
        for kind, tensor in made[layer % unique].items()
    }


def measure_storage(filesystem: Filesystem, *, threads: int, memory_budget: int, seconds: float) -> StorageRates:
    """Measure a storage. The directory must exist; what is written there is removed again."""
    names: list[str] = []
    by_threads = tuple(filesystem.output_streams(one, memory_budget) for one in range(1, threads + 1))

    def write(streams: int, nbytes: int) -> list[str]:
        made = [f"__0_{number}_{uuid.uuid4().hex}.distcp" for number in range(streams)]
        names.extend(made)
        _at_once(lambda name: _write(filesystem, name, nbytes), made)
        return made

    def publish() -> None:
        names.append(f"{uuid.uuid4().hex}.metadata")
        filesystem.publish(names[-1], bytes(4096))

    def rate(streams: int, nbytes: int) -> tuple[float, list[str]]:
        """Return bytes a second, without the time that a file of one byte takes, and the files."""
        spent, made = _timed(lambda: write(streams, nbytes))
        return nbytes * streams / max(spent - file_seconds, spent / 10), made

    with removing(lambda: filesystem.remove(names)):
        file_seconds, publish_seconds = (
            sorted(_timed(work)[0] for _ in range(_LATENCIES))[_LATENCIES // 2]
            for work in (lambda: write(1, 1), publish)
        )
        wanted = max(_FIRST_NBYTES, min(_MOST_NBYTES, int(rate(1, _FIRST_NBYTES)[0] * seconds / 4)))
        writes: dict[int, float] = {}
        for streams in sorted({1, by_threads[-1]}):
            each = max(_PIECE_NBYTES, wanted // streams)
            writes[streams], written = rate(streams, each)
        reads = {
            parallel: _read_rate(filesystem, written, each, parallel, limit_seconds=seconds / 4)
            for parallel in sorted({1, filesystem.parallel_reads})
        }
    return StorageRates(writes, reads, file_seconds, publish_seconds, filesystem.file_nbytes_worthwhile, by_threads)


@contextlib.contextmanager
def removing(remove: Callable[[], object]) -> Iterator[None]:
    """Remove what was made, also after a failure, which is raised, and not what removing comes to then."""
    try:
        yield
    except BaseException as error:
        # a storage that does not answer would let us wait once more
        if not isinstance(error, StorageError) or error.errno != errno.ETIMEDOUT:
            with contextlib.suppress(CheckpointError):
                remove()
        raise
    remove()


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    done = work()
    return time.perf_counter() - start, done


def _at_once(work: Callable[[Any], Any], each: list[Any]) -> list[Any]:
    if len(each) == 1:
        return [work(each[0])]
    with ThreadPoolExecutor(len(each), "dcp-bench") as pool:
        return list(pool.map(work, each))


def _write(filesystem: Filesystem, name: str, nbytes: int) -> None:
    piece = memoryview(os.urandom(min(nbytes, _PIECE_NBYTES)))
    with filesystem.open_output(name) as stream:
        for start in range(0, nbytes, _PIECE_NBYTES):
            stream.write(piece[: nbytes - start])


def _read_rate(filesystem: Filesystem, names: list[str], nbytes: int, parallel: int, *, limit_seconds: float) -> float:
    """Read files, or as much of them as there is time for."""
    _forget_cached(filesystem, names)
    step = min(filesystem.read_nbytes, nbytes)
    ranges = [(name, start) for start in range(0, nbytes - step + 1, step) for name in names]
    begin = time.perf_counter()

    def read(mine: list[tuple[str, int]]) -> int:
        buffer, done = memoryview(bytearray(step)), 0
        for name, start in mine:
            filesystem.read_into(name, start, buffer)
            done += step
            if time.perf_counter() > begin + limit_seconds:
                break
        return done

    total: int = sum(_at_once(read, [ranges[number::parallel] for number in range(min(parallel, len(ranges)))]))
    filesystem.close()
    return total / (time.perf_counter() - begin)


def _forget_cached(filesystem: Filesystem, names: list[str]) -> None:
    """Drop local files from the page cache; other storage has none on this machine."""
    if not hasattr(os, "posix_fadvise"):
        return
    for name in names:
        with contextlib.suppress(OSError), open(filesystem.location(name).removeprefix("file://"), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_codec(state: State, codec: str, *, threads: int, seconds: float) -> CodecRates:
    """Measure a codec."""
    job = _Job(state, codec, threads)
    encode_seconds = repeated_seconds(lambda: job.encode(MemoryFilesystem(keeps=False)), seconds / 2)
    kept = MemoryFilesystem(keeps=True)
    files = job.encode(kept)
    decode_seconds = repeated_seconds(lambda: job.decode(kept, files), seconds / 2)
    nbytes, encoded_nbytes = job.nbytes, sum(written.file.nbytes for written in files)
    return CodecRates(codec, threads, nbytes / encoded_nbytes, nbytes / encode_seconds, nbytes / decode_seconds)


def repeated_seconds(
    work: Callable[[], object], budget_seconds: float, *, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median time of some work, after one run that is not measured."""
    spent: list[float] = []
    for number in itertools.count():
        before()
        seconds, _ = _timed(work)
        if number:
            spent.append(seconds)
        if spent and sum(spent) >= budget_seconds * (3 if len(spent) < _REPEATS else 1):
            break
    return sorted(spent)[len(spent) // 2]


class _Job:
    """One rank's save and load of a state, planned once."""

    def __init__(self, state: State, codec: str, threads: int) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in state.values())
        self._options = NvcompWriter(".", codec=codec, thread_count=threads).options
        self._load_options = NvcompReader(".", thread_count=threads).load_options
        self._engine = EngineChoice("auto")
        self._engine.check_codec(self._options.chooser)
        self._engine.begin(None)
        self._remembered = RememberedChoices()
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=True)
        plans, self._metadata = planner.create_global_plan([planner.create_local_plan()])
        self._plan, self._planner = planner.finish_plan(plans[0]), planner
        self._into = _empty_like(state)

    def encode(self, filesystem: MemoryFilesystem) -> list[WrittenFile]:
        part = RankSave(".", uuid.uuid4().hex, 0, self._plan.items, self._options)
        files, _ = part.run(
            self._planner.resolve_data, engine=self._engine, remembered=self._remembered, filesystem=filesystem
        )
        return files

    def decode(self, filesystem: MemoryFilesystem, files: list[WrittenFile]) -> None:
        stored = {index: StoredAt(written.file, record) for written in files for index, _, record in written.items}
        keys, data = self._metadata.state_dict_metadata, self._metadata.planner_data
        planner = DefaultLoadPlanner()
        planner.set_up_planner(self._into, Metadata(keys, data, stored), is_coordinator=True)
        shards = ShardIndex(keys)
        wanted = [Wanted.of(item, stored[item.storage_index], shards) for item in planner.create_local_plan().items]
        load_items(filesystem, wanted, planner, self._load_options)


def _empty_like(state: State) -> dict[str, torch.Tensor]:
    # filled: a page that was never touched would take time when it is loaded
    return {name: torch.empty_like(tensor).fill_(0) for name, tensor in state.items()}


def run_trial(
    filesystem: Filesystem,
    path: str,
    state: State,
    codec: str,
    *,
    threads: int,
    seconds: float,
    storage_options: Mapping[str, Any],
) -> Trial:
    """Save and load a state several times."""
    options: dict[str, Any] = {"no_dist": True, "thread_count": threads, **storage_options}

    def save_once(what: State) -> SaveStats:
        return save(dict(what), path, codec=codec, **options)

    def clear() -> None:
        """Remove the checkpoint: a save that replaces one has to remove it, too."""
        filesystem.remove(filesystem.list_names())

    def both(what: State, seconds: float) -> tuple[float, float, SaveStats]:
        into = _empty_like(what)
        with removing(clear):
            saved = repeated_seconds(lambda: save_once(what), seconds * 2 / 3, before=clear)
            clear()
            stats = save_once(what)
            files = list(stats.files)
            loaded = repeated_seconds(
                lambda: load(into, path, **options), seconds / 3, before=lambda: _forget_cached(filesystem, files)
            )
        return saved, loaded, stats

    empty_save, empty_load, _ = both({"w": torch.zeros(1)}, seconds / 8)
    full_save, full_load, stats = both(state, seconds * 7 / 8)
    return Trial(codec, stats.uncompressed_nbytes, stats.ratio, full_save, full_load, empty_save, empty_load)

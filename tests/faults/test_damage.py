"""Damaged, truncated, grown, swapped and missing files: an error, or the same bits; never a wrong value."""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import errors
from dcp_nvcomp.format.framing import TRAILER_NBYTES
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import data_file, failure_of, flip, load, save
from tests.conformance.test_subclasses import HighLow
from tests.format.footers import footers_of
from tests.states import State

from .damage import EXACT, LIE, VERIFY, Flip, Probe, count, flips, make_checkpoint, table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAMPLED = 120


@pytest.fixture(autouse=True)
def trusted() -> Iterator[None]:
    with torch.serialization.safe_globals([HighLow]):
        yield


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """Three checkpoints of the same keys and shapes, in the directories 0 to 2."""
    root = tmp_path_factory.mktemp("saves")
    return root, [make_checkpoint(root / str(number), number) for number in range(3)]


@pytest.fixture
def first(saves: tuple[Path, list[State]], tmp_path: Path) -> tuple[Path, State]:
    """A copy of the first of them."""
    root, states = saves
    shutil.copytree(root / "0", tmp_path / "c")
    return tmp_path / "c", states[0]


def boundaries(path: Path) -> list[int]:
    """Return the positions at which something begins or ends in the data file."""
    (footer,) = footers_of(path)
    nbytes = data_file(path).stat().st_size
    return [0, 8, 12, 16, *footer.block_offsets.tolist(), nbytes - TRAILER_NBYTES, nbytes - 8, nbytes]


def check_counts(counts: Counter[str]) -> None:
    """Every flip of what a load reads is found; the copy of `.metadata` is not read, so nothing comes of it."""
    for key, number in counts.items():
        kind, _, outcome = key.split("|")
        assert number and not outcome.startswith(LIE)
        if kind == "data file":
            assert outcome != EXACT, f"{number} damaged bytes were not noticed"
        elif kind != ".metadata":
            assert outcome == EXACT, key


def test_flipped_bits(first: tuple[Path, State]) -> None:
    """A sample of all bytes; with one of each kind of place, and one that only a CRC notices: torch's version."""
    path, state = first
    every = flips(path, [1 << bit for bit in range(8)], VERIFY)
    some = random.Random(4).sample(every, SAMPLED)
    places = [at for edge in boundaries(path) for at in (edge - 1, edge) if 0 <= at < boundaries(path)[-1]]
    some += [Flip(data_file(path).name, at, 1 << at % 8, VERIFY[at % 2]) for at in places]
    version = data_file(path).read_bytes().index(f'"{torch.__version__}"'.encode()) + 1
    some += [Flip(data_file(path).name, version, 1, verify) for verify in VERIFY]
    counts = count(path, state, some)
    assert sum(counts.values()) == len(some)
    check_counts(counts)
    assert "| data file | full |" in table(counts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_byte_flipped(first: tuple[Path, State]) -> None:
    """All bytes of all files, one bit of each; `python -m tests.faults.damage` flips the others too."""
    path, state = first
    draw = random.Random(5)
    every = [
        Flip(flip.name, flip.at, 1 << draw.randrange(8), draw.choice(VERIFY)) for flip in flips(path, [1], ["stored"])
    ]
    counts = count(path, state, every)
    assert sum(counts.values()) == sum(file.stat().st_size for file in path.iterdir())
    check_counts(counts)


def test_the_checkpoint_has_something_of_everything(first: tuple[Path, State]) -> None:
    path, _ = first
    (footer,) = footers_of(path)
    assert {record.kind for record in footer.records} == {"tensor", "pack", "bytes", "torch_save"}
    chains = {record.chain.label for record in footer.records if record.chain is not None}
    assert {"planes-zstd", "planes-deflate", "zstd", "none"} <= chains
    assert footer.block_offsets[0] == 4096, "aligned"


@pytest.mark.parametrize("verify", VERIFY)
def test_truncated(first: tuple[Path, State], verify: str) -> None:
    path, state = first
    whole = data_file(path).read_bytes()
    draw = random.Random(6)
    sizes = {at + step for at in boundaries(path) for step in (-1, 0, 1) if 0 <= at + step < len(whole)}
    probe = Probe(path, state)
    for nbytes in sorted(sizes | {draw.randrange(len(whole)) for _ in range(10)}):
        data_file(path).write_bytes(whole[:nbytes])
        assert probe.outcome(verify) == "TruncatedFileError", nbytes
    data_file(path).write_bytes(whole)
    assert probe.outcome(verify) == EXACT


def test_truncated_metadata(first: tuple[Path, State]) -> None:
    path, state = first
    whole = (path / ".metadata").read_bytes()
    probe = Probe(path, state)
    for nbytes in (*range(0, len(whole), 29), *range(len(whole) - 20, len(whole))):
        (path / ".metadata").write_bytes(whole[:nbytes])
        outcome = probe.outcome("stored")
        # without any of its trailer it is what earlier versions wrote
        assert outcome == "MetadataError" or (outcome == EXACT and nbytes >= len(whole) - 12), (nbytes, outcome)


@pytest.mark.parametrize("more", ["a byte", "zeros", "itself"])
def test_grown(first: tuple[Path, State], more: str) -> None:
    path, state = first
    whole = data_file(path).read_bytes()
    data_file(path).write_bytes(whole + {"a byte": b"\0", "zeros": bytes(4096), "itself": whole}[more])
    assert Probe(path, state).outcome("stored") == "FileMismatchError"


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_removed_and_emptied(first: tuple[Path, State], how: str) -> None:
    path, state = first
    probe = Probe(path, state)
    for file, outcomes in (
        (data_file(path), ("StorageError", "TruncatedFileError")),
        (path / ".metadata", ("CheckpointNotFoundError", "MetadataError")),
    ):
        file.unlink() if how == "removed" else file.write_bytes(b"")
        assert probe.outcome("stored") == outcomes[how == "emptied"]


@pytest.mark.parametrize(("to", "of"), list(itertools.permutations(range(3), 2)))
def test_swapped_between_saves(saves: tuple[Path, list[State]], tmp_path: Path, to: int, of: int) -> None:
    """Keys, shapes and often sizes are the same: the data file, then `.metadata`, then both."""
    root, states = saves
    path = tmp_path / "c"
    shutil.copytree(root / str(to), path)
    probe = Probe(path, states[to], states[of])
    mine, theirs = data_file(path), data_file(root / str(of))
    shutil.copy(theirs, mine)
    assert probe.outcome("stored") in ("FileMismatchError", "TruncatedFileError")
    shutil.copy(root / str(to) / mine.name, mine)
    assert probe.outcome("stored") == f"{EXACT} 0"
    shutil.copy(root / str(of) / ".metadata", path)
    assert probe.outcome("stored") == "StorageError", "its data file has another name"
    shutil.copy(theirs, path)
    assert probe.outcome("stored") == f"{EXACT} 1", "now it is the other checkpoint"


def test_equal_sizes_do_not_hide_a_swap(tmp_path: Path) -> None:
    """Stored as they are, two saves of one shape differ in nothing but bits."""
    states = [{"w": torch.full((1000,), float(seed))} for seed in range(2)]
    for seed, state in enumerate(states):
        save(tmp_path / str(seed), state, codec="none")
    one, other = (data_file(tmp_path / str(seed)) for seed in range(2))
    assert one.stat().st_size == other.stat().st_size
    shutil.copy(other, one)
    assert Probe(tmp_path / "0", *states).outcome("stored") == "FileMismatchError"


def test_stale_file_put_back(tmp_path: Path) -> None:
    """After an overwrite, the old data file or the old `.metadata` comes back, from a backup, say."""
    states = [make_checkpoint(tmp_path / "c", 0)]
    shutil.copytree(tmp_path / "c", tmp_path / "backup")
    states.append(make_checkpoint(tmp_path / "c", 1))
    probe = Probe(tmp_path / "c", *states)
    shutil.copy(data_file(tmp_path / "backup"), tmp_path / "c")
    assert probe.outcome("stored") == f"{EXACT} 1"
    shutil.copy(tmp_path / "backup" / ".metadata", tmp_path / "c")
    assert probe.outcome("stored") == f"{EXACT} 0"
    (tmp_path / "c" / data_file(tmp_path / "backup").name).unlink()
    assert probe.outcome("stored") == "StorageError"


def test_the_error_says_where(first: tuple[Path, State]) -> None:
    path, _ = first
    start, stop = boundaries(path)[5:7]  # of the second block
    flip(data_file(path), start)
    error = failure_of(lambda: load(path, {"bf16": torch.zeros(40, 5, dtype=torch.bfloat16)}))
    assert isinstance(error, errors.CorruptDataError) and f"bytes {start} to {stop}" in str(error)
    assert error.path == str(data_file(path)) and error.fqn == "bf16" and error.byte_range == (start, stop)
    assert "undefined" in str(error)


# ---- bits that flip on the way --------------------------------------------------------------------------------------


class Flips:
    """Stands before a range read, and flips a bit of what one of the calls returned."""

    def __init__(self, call: int, share: float) -> None:
        self.call, self.share, self.calls = call, share, 0

    def damage(self, data: bytearray | memoryview) -> None:
        self.calls += 1
        if self.calls - 1 == self.call and len(data):
            data[min(int(len(data) * self.share), len(data) - 1)] ^= 16

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("read", "read_all"):
            patch.setattr(PosixFilesystem, name, self._returning(getattr(PosixFilesystem, name)))
        real = PosixFilesystem.read_into

        def read_into(filesystem: PosixFilesystem, name: str, start: int, buffer: memoryview) -> None:
            real(filesystem, name, start, buffer)
            self.damage(buffer)

        patch.setattr(PosixFilesystem, "read_into", read_into)

    def _returning(self, real: Callable[..., bytes]) -> Callable[..., bytes]:
        def read(*args: Any, **kwargs: Any) -> bytes:
            data = bytearray(real(*args, **kwargs))
            self.damage(data)
            return bytes(data)

        return read


@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 0.5, 0.7, 0.9, 1.0])
def test_a_bit_that_flips_on_the_way_is_healed(
    first: tuple[Path, State], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Whichever read it happens to: of `.metadata`, of a footer, of the header, of blocks."""
    path, state = first
    probe, call = Probe(path, state), 0
    while True:
        with monkeypatch.context() as patch:
            flip = Flips(call, share)
            flip.install(patch)
            assert probe.outcome("stored") == EXACT, f"read {call}"
        if flip.calls <= call:
            break
        call += 1
    assert call >= 3

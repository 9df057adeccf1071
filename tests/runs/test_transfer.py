"""Files move as they are: between ranks in pieces that are checked, and to the durable tier once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_nvcomp
from dcp_nvcomp.calls.ranks import Call
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.errors import CheckpointError, RankFailedError
from dcp_nvcomp.format.data_file import find_data_file, read_footer
from dcp_nvcomp.runs.agreement import Ranks, ranks_of_run
from dcp_nvcomp.runs.tiers import nodes as transfer
from dcp_nvcomp.runs.tiers import uploads
from dcp_nvcomp.runs.tiers.nodes import Transfer, move_files, rounds
from dcp_nvcomp.runs.tiers.uploads import SourceError, upload_files
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import flip
from tests.distributed.launch import RankFailure, RankPool

SIZES = {"a": 0, "b": 1, "c": 5000, "d": 4096, "e": 2048}


def _data(name: str) -> bytes:
    generator = torch.Generator().manual_seed(ord(name))
    return bytes(torch.randint(0, 256, (SIZES[name],), dtype=torch.uint8, generator=generator).tolist())


def _ring(place: Path, *, fault: str = "") -> str:
    """Send files around a ring of ranks; return what was raised."""
    rank, count = dist.get_rank(), dist.get_world_size()
    own, other = place / f"from-{rank}", place / f"to-{rank}"
    own.mkdir(), other.mkdir()
    for name in SIZES:
        (own / name).write_bytes(_data(name))
    transfers = {Transfer(source, (source + 1) % count): SIZES for source in range(count)}
    moved: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_PIECE_NBYTES", 1024)
        if fault == "flip" and rank == 0:
            exchange = Ranks.exchange

            def flipped(ranks: Ranks, sent: Any, to: int, received: Any, source: int) -> None:
                exchange(ranks, sent, to, received, source)
                if received is not None and len(received) > 500:
                    received[100] ^= 1

            patch.setattr(Ranks, "exchange", flipped)
        if fault == "unreadable" and rank == 0:
            (own / "c").unlink()
        ranks = Ranks(dist.group.WORLD)
        error = ""
        try:
            here, there = open_filesystem(own), open_filesystem(other)
            outcome = move_files(ranks, transfers, here, there)
            moved = outcome.received
            ranks.together(outcome.check)
        except CheckpointError as raised:
            error = f"{type(raised).__name__}: {raised}"
        ranks.close()
    for path in other.iterdir():
        assert path.read_bytes() == _data(path.name), "what is there is whole"
        assert moved[path.name] == SIZES[path.name]
    if not error:
        assert {path.name for path in other.iterdir()} == {name for name, size in SIZES.items() if size}
    return error


def test_files_go_round_a_ring(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_ring, tmp_path) == [""] * 4


def test_a_wrong_piece_is_noticed_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks.run(_ring, tmp_path, fault="flip")
    assert all("CorruptDataError" in error and "another rank" in error for error in errors)


def test_what_cannot_be_read_is_told_to_all_and_nothing_else_comes_of_it(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks.run(_ring, tmp_path, fault="unreadable")
    assert all(errors)
    assert not (tmp_path / "to-1" / "c").exists()


def _dies_in_a_piece(place: Path, gone: int) -> None:
    ranks, data = Ranks(dist.group.WORLD), torch.ones(512 << 20, dtype=torch.uint8)
    into = data.clone()
    dist.barrier()
    if ranks.rank == gone:
        begin = dist.isend

        def begun(*arguments: Any, **options: Any) -> None:
            begin(*arguments, **options)
            time.sleep(0.02)
            os._exit(9)

        dist.isend = begun
    began = time.monotonic()

    def copy_on_and_on() -> None:
        while True:
            ranks.exchange(data, (ranks.rank + 1) % ranks.count, into, (ranks.rank - 1) % ranks.count)

    with pytest.raises(CheckpointError, match="Another rank is gone"):
        copy_on_and_on()
    with pytest.raises(CheckpointError, match="Another rank is gone"):
        ranks.gather(1)
    (place / str(ranks.rank)).write_text(str(time.monotonic() - began))


@pytest.mark.ci
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_dies_in_a_piece_ends_the_copies_of_the_others(ranks: RankPool, tmp_path: Path, gone: int) -> None:
    with pytest.raises(RankFailure):
        ranks.run(_dies_in_a_piece, tmp_path, gone, world_size=3, timeout_s=60)
    seconds = {int(file.name): float(file.read_text()) for file in tmp_path.iterdir()}
    assert seconds.keys() == {0, 1, 2} - {gone}
    assert max(seconds.values()) < 20


def _dies_beside_other_work(place: Path) -> None:
    """While rank 0 waits on another thread for rank 2, which has not come and will not, as its peer is gone."""
    copying, uploading = ranks_of_run(dist.group.WORLD, Call("test"), 2)
    data = torch.ones(1 << 20, dtype=torch.uint8)
    into, waited = data.clone(), threading.Event()
    dist.barrier()

    def upload() -> None:
        if copying.rank == 2:
            assert waited.wait(50)
        began = time.monotonic()
        with pytest.raises(CheckpointError):
            uploading.gather(1)
        (place / str(copying.rank)).write_text(str(time.monotonic() - began))

    thread = threading.Thread(target=upload)
    thread.start()
    if copying.rank == 1:
        time.sleep(1)
        os._exit(9)

    def copy_on_and_on() -> None:
        while True:
            copying.exchange(data, (copying.rank + 1) % 3, into, (copying.rank - 1) % 3)

    with pytest.raises(CheckpointError, match="Another rank is gone"):
        copy_on_and_on()
    waited.set()
    thread.join()


@pytest.mark.ci
def test_a_rank_that_dies_ends_what_others_wait_for_on_other_threads(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        ranks.run(_dies_beside_other_work, tmp_path, world_size=3, timeout_s=60)
    seconds = {int(file.name): float(file.read_text()) for file in tmp_path.iterdir()}
    assert seconds.keys() == {0, 2}
    assert max(seconds.values()) < 20


def test_copies_that_break_off_leave_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(ranks: Ranks, sent: Any, to: int, received: torch.Tensor, source: int) -> None:
        if any((tmp_path / "to").iterdir()):
            raise RankFailedError("Another rank is gone.")
        crc = checksum(received.zero_().numpy()[:-4])
        received[-4:] = torch.frombuffer(bytearray(crc.to_bytes(4, "little")), dtype=torch.uint8)

    (tmp_path / "to").mkdir()
    monkeypatch.setattr(Ranks, "exchange", breaks)
    monkeypatch.setattr(transfer, "_PIECE_NBYTES", 1024)
    here = open_filesystem(tmp_path / "to")
    with pytest.raises(RankFailedError):
        move_files(Ranks(None), {Transfer(1, 0): {"c": 5000}}, here, here)
    assert not list((tmp_path / "to").iterdir())


def test_in_a_round_no_rank_sends_or_receives_twice() -> None:
    transfers = [Transfer(source, to) for source in range(5) for to in range(5) if source != to]
    made = rounds(transfers)
    assert sorted((one.source, one.to) for each in made for one in each) == sorted((t.source, t.to) for t in transfers)
    for each in made:
        assert len({one.source for one in each}) == len({one.to for one in each}) == len(each)


@pytest.fixture
def tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, dict[str, int]]:
    """The directories of a step in the fast tier and in the durable one, and the sizes of the files in the former."""
    monkeypatch.setattr(uploads, "_PIECE_NBYTES", 1024)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name, count in (("a", 0), ("b", 1), ("c", 5000), ("d", 1_000_000), ("e", 700)):
        dcp_nvcomp.save({"w": torch.randn(count)}, tmp_path / name, no_dist=True)
        (file,) = (tmp_path / name).glob("*.distcp")
        file.rename(source / name)
    return source, target, {file.name: file.stat().st_size for file in source.iterdir()}


def test_an_upload_that_was_cut_short_is_made_again_and_what_is_whole_is_not(
    tiers: tuple[Path, Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, sizes = tiers
    data = {name: (source / name).read_bytes() for name in sizes}
    (target / "b").write_bytes(data["b"] + b"more")
    (target / "c").write_bytes(data["c"][:3000])
    (target / "d").write_bytes(data["d"])
    (target / "e").write_bytes(data["e"])
    flip(target / "e", sizes["e"] - 1)
    opened: list[str] = []
    open_output = PosixFilesystem.open_output

    def counted(filesystem: PosixFilesystem, name: str) -> Any:
        opened.append(name)
        return open_output(filesystem, name)

    monkeypatch.setattr(PosixFilesystem, "open_output", counted)
    sent = upload_files(open_filesystem(source), open_filesystem(target), list(sizes), sizes)
    assert sent == sum(sizes.values()) - sizes["d"] and opened == ["a", "b", "c", "e"]
    assert {file.name: file.read_bytes() for file in target.iterdir()} == data


def test_what_was_sent_long_ago_is_sent_again(
    tiers: tuple[Path, Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clean` would take it for what a dead save has left, perhaps right before the step is published."""
    source, target, sizes = tiers
    for name, hours in (("c", 13), ("d", 11)):
        (target / name).write_bytes((source / name).read_bytes())
        os.utime(target / name, (time.time() - 3600 * hours,) * 2)
    sent = upload_files(open_filesystem(source), open_filesystem(target), ["c", "d"], sizes)
    assert sent == sizes["c"] and (target / "c").stat().st_mtime > time.time() - 60

    def denied(_: Any) -> float:
        raise CheckpointError("forbidden")

    monkeypatch.setattr(PosixFilesystem, "now_seconds", denied)
    os.utime(target / "c", (0, 0))
    assert upload_files(open_filesystem(source), open_filesystem(target), ["c", "d"], sizes) == 0


@pytest.mark.parametrize("place", ["header", "first block", "block", "last block", "footer", "trailer"])
def test_a_file_that_was_damaged_since_is_not_uploaded(tiers: tuple[Path, Path, dict[str, int]], place: str) -> None:
    source, target, sizes = tiers
    footer = read_footer(filesystem := open_filesystem(source), find_data_file(filesystem, "d", sizes["d"]))
    offsets = footer.block_offsets.tolist()
    assert len(offsets) > 3
    at = {"header": 3, "first block": offsets[0], "block": offsets[1] + 500, "last block": offsets[-1] - 1}
    flip(source / "d", {**at, "footer": offsets[-1] + 10, "trailer": sizes["d"] - 1}[place])
    with pytest.raises(SourceError, match="corrupt|not|version"):
        upload_files(filesystem, open_filesystem(target), ["d"], sizes)
    assert not list(target.iterdir())


def test_what_is_whole_there_is_not_replaced_by_a_damaged_file(tiers: tuple[Path, Path, dict[str, int]]) -> None:
    source, target, sizes = tiers
    whole = (source / "d").read_bytes()
    (target / "d").write_bytes(whole)
    flip(source / "d", sizes["d"] // 2)
    with pytest.raises(SourceError, match="corrupt"):
        upload_files(open_filesystem(source), open_filesystem(target), ["d"], sizes)
    assert (target / "d").read_bytes() == whole


@pytest.mark.parametrize("at", [10, -1], ids=["footer", "trailer"])
def test_what_is_sent_is_what_was_checked(
    tiers: tuple[Path, Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The footer is read first, and once more with the rest."""
    source, target, sizes = tiers
    footer = read_footer(filesystem := open_filesystem(source), find_data_file(filesystem, "d", sizes["d"]))
    place = sizes["d"] - 1 if at < 0 else int(footer.block_offsets[-1]) + at
    read_into = PosixFilesystem.read_into

    def flips(self: PosixFilesystem, name: str, start: int, buffer: memoryview) -> None:
        read_into(self, name, start, buffer)
        if name == "d" and start <= place < start + len(buffer):
            buffer[place - start] ^= 1

    monkeypatch.setattr(PosixFilesystem, "read_into", flips)
    with pytest.raises(SourceError):
        upload_files(filesystem, open_filesystem(target), ["d"], sizes)
    assert not list(target.iterdir())

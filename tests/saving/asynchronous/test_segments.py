"""Segments: what is staged takes what it came to, waits for room only where it must, and gives everything back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from dcp_nvcomp.codecs.base import BlockRow, EncodedBlock
from dcp_nvcomp.saving.asynchronous.segments import HOST_SEGMENT_NBYTES, SegmentStores, StagingMemory
from dcp_nvcomp.saving.encode.tasks import HOST_ROOM_NBYTES, Cancelled, Room

LARGE = 1 << 40


def new_memory(stores: SegmentStores, budget_nbytes: int = LARGE) -> StagingMemory:
    return StagingMemory(stores, budget_nbytes, state_nbytes=1 << 30, may_use_cuda=False)


def stage(memory: StagingMemory, nbytes: int, lane: int = 0) -> Room:
    """Reserve, take and fill one room."""
    host = memory.host(lane)
    host.reserve()
    room = host.take()
    assert len(room.view) >= host.room_nbytes
    room.view[:nbytes] = bytes([nbytes % 251]) * nbytes
    keep(room, nbytes)
    return room


def keep(room: Room, *sizes: int, gap_nbytes: int = 0) -> list[EncodedBlock]:
    """Keep blocks of these sizes, with gaps between them."""
    blocks, position = list[EncodedBlock](), 0
    for nbytes in sizes:
        blocks.append(EncodedBlock(room.view[position : position + nbytes], BlockRow(0, (), 0, 0), nbytes))
        position += nbytes + gap_nbytes
    return room.keep(blocks, position - gap_nbytes)


def test_gaps_between_blocks_are_closed() -> None:
    memory = new_memory(SegmentStores())
    host = memory.host(0)
    for _ in range(50):
        host.reserve()
        room, sizes = host.take(), (100, 300_000, 16, 300_000, 0, 5000)
        position = 0
        for number, nbytes in enumerate(sizes):
            room.view[position : position + nbytes] = bytes([number]) * nbytes
            position += nbytes + 77_777
        kept = keep(room, *sizes, gap_nbytes=77_777)
        assert [bytes(block.data) for block in kept] == [bytes([at]) * nbytes for at, nbytes in enumerate(sizes)]
    assert memory.staged_nbytes == 50 * sum(sizes)
    assert len(host._taken) == 2, "30 MB in segments of 16 MiB"  # type: ignore[attr-defined]


def goes_on(work: Callable[[], None], seconds: float = 0.1) -> tuple[threading.Thread, bool]:
    """Start `work` on a thread; tell whether it came to its end by then."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(seconds)
    return thread, not thread.is_alive()


def test_tasks_lie_one_after_the_other_and_keep_what_they_came_to() -> None:
    stores = SegmentStores()
    memory = new_memory(stores)
    sizes = [700_000 + 1000 * number for number in range(60)]
    rooms = [stage(memory, nbytes) for nbytes in sizes]
    for room, nbytes in zip(rooms, sizes, strict=True):
        assert bytes(room.view[:nbytes]) == bytes([nbytes % 251]) * nbytes, "another task's bytes"
    assert memory.staged_nbytes == sum(sizes)
    for room in rooms:
        room.release()
    memory.end()
    # what encoding came to, and a sixteenth: buffers of one size would have been 64 MB
    assert stores.plain.nbytes <= sum(sizes) * 17 / 16 + HOST_SEGMENT_NBYTES


def test_several_threads_fill_a_lane_and_none_writes_into_anothers_room() -> None:
    stores = SegmentStores()
    memory = new_memory(stores)
    host, rooms = memory.host(0), list[tuple[Room, int]]()
    for _ in range(400):
        host.reserve()

    def fill(value: int) -> None:
        for number in range(100):
            room = host.take()
            nbytes = 10_000 + 100 * number + value
            room.view[: host.room_nbytes] = bytes([value]) * host.room_nbytes  # an encoder may use all of it
            keep(room, nbytes)
            rooms.append((room, nbytes))

    threads = [threading.Thread(target=fill, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rooms) == 400
    for room, nbytes in rooms:
        assert set(room.view[:nbytes]) == {nbytes % 100}
        room.release()
    memory.end()


def test_written_segments_serve_the_save_itself() -> None:
    stores = SegmentStores()
    memory = new_memory(stores)
    for _ in range(200):
        stage(memory, 900_000).release()
    memory.end()
    assert stores.plain.nbytes <= 2 * HOST_SEGMENT_NBYTES


def test_who_does_not_fit_waits_until_something_is_written(caplog: pytest.LogCaptureFixture) -> None:
    memory = new_memory(SegmentStores(), 3 * HOST_ROOM_NBYTES)
    rooms = [stage(memory, HOST_ROOM_NBYTES) for _ in range(3)]
    assert not caplog.records
    writing, may_write = goes_on(memory.wait_to_write)
    assert not may_write, "the cores are for encoding"
    with caplog.at_level(logging.WARNING):
        thread, reserved = goes_on(memory.host(0).reserve)
        assert not reserved
        writing.join(10)
        assert not writing.is_alive(), "writing is what makes room"
        rooms.pop(0).release()
        thread.join(10)
        assert not thread.is_alive()
    (record,) = caplog.records
    assert f"staging_budget_nbytes={3 * HOST_ROOM_NBYTES}" in record.getMessage()
    memory.host(0).unreserve()
    for room in rooms:
        room.release()
    memory.end()


def test_tasks_that_are_not_encoded_yet_are_waited_for_first(caplog: pytest.LogCaptureFixture) -> None:
    """They may come to less than is reserved for them: then nothing has to be written to make room."""
    memory = new_memory(SegmentStores(), 2 * HOST_ROOM_NBYTES)
    host = memory.host(0)
    host.reserve()
    host.reserve()
    thread, reserved = goes_on(host.reserve)
    assert not reserved
    keep(host.take(), 1000)
    keep(host.take(), 1000)
    thread.join(10)
    assert not thread.is_alive() and not caplog.records
    writing, may_write = goes_on(memory.wait_to_write)
    assert not may_write
    memory.close()
    writing.join()


def test_all_saves_of_a_process_count_together() -> None:
    stores = SegmentStores()
    one, two = new_memory(stores, 3 * HOST_ROOM_NBYTES), new_memory(stores, 3 * HOST_ROOM_NBYTES)
    rooms = [stage(one, HOST_ROOM_NBYTES) for _ in range(3)]
    thread, reserved = goes_on(two.host(0).reserve)
    assert not reserved
    rooms[0].release()
    thread.join(10)
    assert not thread.is_alive()


def test_a_save_that_fails_wakes_who_waits_and_gives_everything_back() -> None:
    stores = SegmentStores()
    memory = new_memory(stores, 2 * HOST_ROOM_NBYTES)
    stage(memory, HOST_ROOM_NBYTES)
    memory.host(1).reserve()
    memory.host(1).take()  # and then encoding raises
    errors: list[BaseException] = []

    def reserve() -> None:
        try:
            memory.host(0).reserve()
        except Cancelled as error:
            errors.append(error)

    thread, ended = goes_on(reserve)
    assert not ended
    memory.close()
    thread.join(10)
    assert errors
    memory.end()
    assert stores.plain.nbytes == 2 * HOST_SEGMENT_NBYTES, "leases of tasks that were never encoded"
    again = new_memory(stores, 2 * HOST_ROOM_NBYTES)
    for room in [stage(again, HOST_ROOM_NBYTES) for _ in range(2)]:
        room.release()  # none had to wait: nothing is in use any more
    again.end()

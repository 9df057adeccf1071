"""What is read once more, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp_nvcomp.errors import (
    CheckpointError,
    CorruptDataError,
    FormatError,
    MetadataError,
    StorageError,
    UnsafeObjectError,
    UnsafePathError,
)
from dcp_nvcomp.storage.reread import is_stored, reread, twice


def failing(*outcomes: CheckpointError | int) -> Callable[[], int]:
    """A read whose calls end like this, in turn; a further one is a mistake."""
    left = iter(outcomes)

    def read() -> int:
        outcome = next(left)
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    return read


def test_what_works_is_read_once() -> None:
    assert twice(failing(1)) == 1


@pytest.mark.parametrize("kind", [CorruptDataError, FormatError, MetadataError, UnsafeObjectError, UnsafePathError])
def test_damage_is_read_once_more(kind: type[CheckpointError]) -> None:
    assert twice(failing(kind("first"), 2)) == 2


def test_damage_that_stays_is_what_the_second_read_found() -> None:
    with pytest.raises(CorruptDataError, match="second"):
        twice(failing(FormatError("first"), CorruptDataError("second")))


def test_a_failing_storage_is_not_asked_again() -> None:
    with pytest.raises(StorageError, match="first"):
        twice(failing(StorageError("first"), 2))


def test_the_second_read_may_be_another() -> None:
    assert twice(failing(CorruptDataError("first")), failing(3)) == 3
    assert twice(failing(1), failing()) == 1


def checked(data: bytes) -> bytes:
    if data != b"good":
        raise MetadataError(f"read {data!r}")
    return data


def reads(*results: bytes) -> Callable[[], bytes]:
    left = iter(results)
    return lambda: next(left)


def test_good_bytes_are_read_once() -> None:
    assert reread(reads(b"good"), checked) == b"good"


def test_other_bytes_are_checked_too() -> None:
    assert reread(reads(b"bad", b"good"), checked) == b"good"
    with pytest.raises(MetadataError, match="worse"):
        reread(reads(b"bad", b"worse"), checked)


def test_the_same_bytes_are_not_checked_twice() -> None:
    seen = []

    def check(data: bytes) -> None:
        seen.append(data)
        raise MetadataError("bad")

    with pytest.raises(MetadataError, match="bad"):
        reread(reads(b"bad", b"bad"), check)
    assert seen == [b"bad"]


def test_stored_if_one_of_two_reads_agrees() -> None:
    assert is_stored(reads(b"a"), b"a")
    assert is_stored(reads(b"b", b"a"), b"a")
    assert not is_stored(reads(b"b", b"c"), b"a")

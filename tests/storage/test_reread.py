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
from dcp_nvcomp.storage.reread import is_stored, reread, retry_if_corrupt


def failing(*outcomes: CheckpointError | int) -> Callable[[], int]:
    """A read whose calls end like this, in turn; a further one is a mistake."""
    left = iter(outcomes)

    def read() -> int:
        outcome = next(left)
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    return read


DAMAGE = (CorruptDataError, FormatError, MetadataError, UnsafeObjectError, UnsafePathError)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([failing(1)], 1),
        *(([failing(kind("first"), 2)], 2) for kind in DAMAGE),
        ([failing(FormatError("first"), CorruptDataError("second"))], CorruptDataError("second")),
        ([failing(StorageError("first"), 2)], StorageError("first")),  # a failing storage is not asked again
        ([failing(CorruptDataError("first")), failing(3)], 3),  # the second read may be another
        ([failing(1), failing()], 1),
    ],
)
def test_damage_is_read_once_more(reads: list[Callable[[], int]], expected: int | CheckpointError) -> None:
    if isinstance(expected, int):
        assert retry_if_corrupt(*reads) == expected
    else:
        with pytest.raises(type(expected), match=str(expected)):
            retry_if_corrupt(*reads)


def reads(*results: bytes) -> Callable[[], bytes]:
    left = iter(results)
    return lambda: next(left)


def test_bytes_that_changed_are_checked_again_and_others_are_not() -> None:
    seen = list[bytes]()

    def checked(data: bytes) -> bytes:
        seen.append(data)
        if data != b"good":
            raise MetadataError(f"read {data!r}")
        return data

    assert reread(reads(b"good"), checked) == reread(reads(b"bad", b"good"), checked) == b"good"
    with pytest.raises(MetadataError, match="worse"):
        reread(reads(b"bad", b"worse"), checked)
    seen.clear()
    with pytest.raises(MetadataError, match="bad"):
        reread(reads(b"bad", b"bad"), checked)
    assert seen == [b"bad"]


def test_stored_if_one_of_two_reads_agrees() -> None:
    assert is_stored(reads(b"a"), b"a")
    assert is_stored(reads(b"b", b"a"), b"a")
    assert not is_stored(reads(b"b", b"c"), b"a")

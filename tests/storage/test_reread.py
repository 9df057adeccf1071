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
    UnsafePathError,
)
from dcp_nvcomp.storage.reread import twice


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


@pytest.mark.parametrize("kind", [CorruptDataError, FormatError, MetadataError, UnsafePathError])
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

"""What the two processes tell each other, by pickle over a socket. A task has a number, which all about it carry.

training -> background     Memory, WriteTask, Hurry, Forget
background -> training     Ready at the beginning; Progress, Encoded, and at the end WrittenFiles, Failed or CannotRun

The descriptor of a segment follows `Memory` over a second socket.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.saving.asynchronous.shared_memory import Place
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.version import VERSION

# Variables that the process has values of its own for.
OWN_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",  # it must not take memory there
    "OMP_NUM_THREADS": "1",  # its threads are its own
}


def own_package() -> str:
    """Return version and place of this package: both processes must have the same."""
    return f"{VERSION} at {os.path.realpath(__file__)}"


@dataclass(frozen=True)
class Memory:
    """A segment that tasks will refer to."""

    number: int
    nbytes: int


@dataclass(frozen=True)
class Forget:
    """The segments that are no longer used."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class WriteTask:
    """A rank's part of a save.

    Attributes:
        number: of the task.
        part: the pickled `RankSave`. A pickle within the message, as it may hold classes that only training knows.
        storage: pickled `StorageSettings`.
        segment: number of the segment that holds the data.
        places: of the items in it.
        within_seconds: when it should be done; None if there is no hurry.
        environment: variables as they are now: credentials in them may have been renewed.
    """

    number: int
    part: bytes
    storage: bytes
    segment: int
    places: Sequence[Place]
    within_seconds: float | None
    environment: dict[str, str]


@dataclass(frozen=True)
class Hurry:
    """The task has to give way no longer."""

    number: int


@dataclass(frozen=True)
class Ready:
    """It takes tasks.

    Attributes:
        package: `own_package()` there.
    """

    package: str


@dataclass(frozen=True)
class Progress:
    """So much was written since the last such message."""

    number: int
    nbytes: int


@dataclass(frozen=True)
class Encoded:
    """The data in the segment is not needed any more."""

    number: int


@dataclass(frozen=True)
class WrittenItems:
    """A data file and what is in it.

    Attributes:
        file: how `.metadata` names it.
        positions: of its items in the plan.
        nbytes: encoded size of each.
        records: record of each.
    """

    file: tuple[Any, ...]
    positions: array[int]
    nbytes: array[int]
    records: array[int]


@dataclass(frozen=True)
class WrittenFiles:
    """All files are written."""

    number: int
    files: tuple[WrittenItems, ...]
    totals: RankTotals


@dataclass(frozen=True)
class Failed:
    """The task failed and has removed its files."""

    number: int
    error: BaseException


@dataclass(frozen=True)
class CannotRun:
    """The task was not begun: the process lacks something that training has."""

    number: int
    reason: str


Message = Memory | Forget | WriteTask | Hurry | Ready | Progress | Encoded | WrittenFiles | Failed | CannotRun

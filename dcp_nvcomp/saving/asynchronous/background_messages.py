"""What training and the background process send each other, by pickle over a socket.

training -> background     Memory, WriteTask, Hurry, Forget
background -> training     Ready at the beginning; Progress, Encoded, and at the end WrittenFiles, Failed or CannotRun

A task has a number, which all about it carry. The descriptor of a segment follows `Memory` over a second socket.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dcp_nvcomp.format.data_file import DataFileRef
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
    """A rank's part of a save."""

    number: int
    part: bytes  # a pickled `RankSave`: it may hold classes that only training knows
    storage: bytes  # pickled `StorageSettings`
    segment: int
    places: Sequence[Place]
    within_seconds: float | None
    environment: dict[str, str]  # as it is now: credentials in it may have been renewed


@dataclass(frozen=True)
class Hurry:
    """The task has to give way no longer."""

    number: int


@dataclass(frozen=True)
class Ready:
    """It takes tasks."""

    package: str  # `own_package()` there


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
class WrittenFiles:
    """All files are written: each with position in the plan, size and record of its items, in three columns.

    As arrays: training's process would hold the GIL while it unpickles a tuple for each of a million items.
    """

    number: int
    files: Sequence[tuple[DataFileRef, array[int], array[int], array[int]]]
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

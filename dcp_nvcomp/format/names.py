"""Names of the files in a checkpoint: how they are made, and what a name says of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dcp_nvcomp.options import is_plain_name
from dcp_nvcomp.storage.base import BESIDE, is_clock, published_name

DATA_FILE_SUFFIX: Final = ".distcp"
METADATA_NAME: Final = ".metadata"
# of the record with the skeleton of the state, in a file of save_compressed_checkpoint
ONE_FILE_KEY: Final = ".skeleton"
# of the record that says of which pieces a stream consists (dcp_nvcomp/streams)
STREAM_KEY: Final = ".stream"

_ID: Final = "[0-9a-f]{32}"
_NUMBER: Final = "(?:0|[1-9][0-9]{0,8})"  # at most 9 digits: an id may happen to have no letter in it
_SAVE_ID: Final = re.compile(_ID)
_RANK_NAME: Final = re.compile(rf"__({_NUMBER})\.metadata")
_COPY_NAME: Final = re.compile(rf"__({_ID})\.metadata")
_DATA_NAME: Final = re.compile(rf"__{_NUMBER}_{_NUMBER}_({_ID})\.distcp")
_STOCK_DATA_NAME: Final = re.compile(rf"__{_NUMBER}_{_NUMBER}\.distcp")

LARGEST_STEP: Final = (1 << 63) - 1  # ranks exchange numbers of 64 bits

# the mark in the directory of a checkpoint that is being removed (runs/steps.py)
REMOVING: Final = ".removing"
_MARK: Final = ".shared."
_ANY_DATA_NAME: Final = re.compile(rf"__({_NUMBER})_{_NUMBER}(?:_{_ID})?\.distcp")


def data_file_name(rank: int, number: int, file_id: str) -> str:
    """Return the name of a data file inside the checkpoint."""
    return f"__{rank}_{number}_{file_id}{DATA_FILE_SUFFIX}"


def data_file_rank(name: str) -> int | None:
    """Return the rank in the name of a data file, of this package or of stock DCP; None for any other name."""
    match = _ANY_DATA_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_stock_data_file(name: str) -> bool:
    """True for the name of a data file of stock DCP."""
    return _STOCK_DATA_NAME.fullmatch(name) is not None


def rank_metadata_name(rank: int) -> str:
    """Return the name of one rank's metadata in a checkpoint saved with `use_collectives=False`."""
    return f"__{rank}.metadata"


def rank_of_metadata_name(name: str) -> int | None:
    """Return the rank in a name made by `rank_metadata_name`, None for any other name."""
    match = _RANK_NAME.fullmatch(name)
    return int(match[1]) if match else None


def mark_name(directory: str) -> str:
    """Return the name of the mark in a checkpoint whose files the one in `directory`, beside it, shares."""
    return f"{_MARK}{directory}"


def marking_directory(name: str) -> str | None:
    """Return the directory in a name made by `mark_name`, None for any other name."""
    directory = name.removeprefix(_MARK)
    return directory if name.startswith(_MARK) and is_plain_name(directory) else None


def step_in(name: str, before: str, after: str = "") -> int | None:
    """Return the step whose number a name has between two texts; None for any other name, and no step's number."""
    match = re.fullmatch(rf"{re.escape(before)}(0|[1-9][0-9]{{0,18}}){re.escape(after)}", name)
    step = int(match[1]) if match else None
    return None if step is None or step > LARGEST_STEP else step


def shared_directories(names: Iterable[str]) -> list[str]:
    """Return the directories beside a checkpoint in which the data files of these names are."""
    return sorted({name.removeprefix(BESIDE).partition("/")[0] for name in names if name.startswith(BESIDE)})


def save_metadata_name(save_id: str) -> str:
    """Return the name of the immutable copy of one save's `.metadata`."""
    return f"__{save_id}.metadata"


def is_metadata_temporary(name: str) -> bool:
    """True for the name of a file that was to become `.metadata`, or was moved aside for another."""
    return published_name(name) == METADATA_NAME


def copy_name_of(save_id: str | None) -> str | None:
    """Return the name of a save's immutable metadata, None if the id is not one of this package."""
    return save_metadata_name(save_id) if save_id is not None and _SAVE_ID.fullmatch(save_id) else None


def save_id_of_copy(name: str) -> str | None:
    """Return the id in a name made by `save_metadata_name`, None for any other name."""
    match = _COPY_NAME.fullmatch(name)
    return match[1] if match else None


@dataclass(frozen=True)
class OwnFile:
    """What the name of a file says, if only this package gives such names, and each of them once."""

    kind: str  # `data`, `metadata` (an immutable copy), `temporary` or `upload`
    file_id: str  # the id in the name, of the rank and save that wrote the file; empty if the name has none


def own_file(name: str) -> OwnFile | None:
    """Return what the name of a file says; None if it may be anything else, or a root."""
    if match := _DATA_NAME.fullmatch(name):
        return OwnFile("data", match[1])
    if save_id := save_id_of_copy(name):
        return OwnFile("metadata", save_id)
    target = published_name(name)
    if marking_directory(name) or (target is not None and marking_directory(target)):
        return OwnFile("temporary", "")
    if is_clock(name) or (target is not None and _is_metadata(target)):
        return OwnFile("temporary", (target and save_id_of_copy(target)) or "")
    return None


def own_upload(name: str) -> OwnFile | None:
    """Return what the name says that an unfinished upload was to get: large metadata is uploaded in parts too."""
    return OwnFile("upload", save_id_of_copy(name) or "") if _is_metadata(name) else own_file(name)


def _is_metadata(name: str) -> bool:
    return name == METADATA_NAME or rank_of_metadata_name(name) is not None or save_id_of_copy(name) is not None

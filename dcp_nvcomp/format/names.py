"""Names of the files in a checkpoint."""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "DATA_FILE_SUFFIX",
    "METADATA_NAME",
    "copy_name_of",
    "data_file_name",
    "rank_metadata_name",
    "rank_of_metadata_name",
    "save_id_of_copy",
    "save_metadata_name",
]


DATA_FILE_SUFFIX = ".distcp"


def data_file_name(rank: int, number: int, file_id: str) -> str:
    """Return the name of a data file inside the checkpoint."""
    return f"__{rank}_{number}_{file_id}{DATA_FILE_SUFFIX}"


METADATA_NAME: Final = ".metadata"


# At most 9 digits: a save_id may happen to have no letter in it.
_RANK_NAME: Final = re.compile(r"__(0|[1-9][0-9]{0,8})\.metadata")


def rank_metadata_name(rank: int) -> str:
    """Return the name of one rank's metadata in a checkpoint saved with `use_collectives=False`."""
    return f"__{rank}.metadata"


def rank_of_metadata_name(name: str) -> int | None:
    """Return the rank in a name made by `rank_metadata_name`, None for any other name."""
    match = _RANK_NAME.fullmatch(name)
    return int(match[1]) if match else None


def save_metadata_name(save_id: str) -> str:
    """Return the name of the immutable copy of one save's `.metadata`."""
    return f"__{save_id}.metadata"


_SAVE_ID: Final = re.compile("[0-9a-f]{32}")


_COPY_NAME: Final = re.compile(r"__([0-9a-f]{32})\.metadata")


def copy_name_of(save_id: str | None) -> str | None:
    """Return the name of a save's immutable metadata, None if the id is not one of this package."""
    return save_metadata_name(save_id) if save_id is not None and _SAVE_ID.fullmatch(save_id) else None


def save_id_of_copy(name: str) -> str | None:
    """Return the id in a name made by `save_metadata_name`, None for any other name."""
    match = _COPY_NAME.fullmatch(name)
    return match[1] if match else None

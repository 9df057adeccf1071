"""Reads `.metadata` without trusting it, and writes it so that stock torch can read it.

    read    bytes -> pickle_machine.py (an inert tree) -> tree.py (checks; torch's own classes)
    write   torch's Metadata, with tuples of plain values as `storage_data` -> pickle, protocol 4, followed by its CRC

The values of `storage_data` are those of stored.py.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.allowed_globals import ALLOWED
from dcp_nvcomp.format.metadata.pickle_machine import run_pickle
from dcp_nvcomp.format.metadata.stored import plain_storage_data
from dcp_nvcomp.format.metadata.summary import SUMMARY_ATTRIBUTE, Summary
from dcp_nvcomp.format.metadata.trailer import end_of_pickle, with_trailer
from dcp_nvcomp.format.metadata.tree import MetadataReader
from dcp_nvcomp.format.metadata.trusted_globals import resolve_trusted_globals

_LEAST_TREE_NBYTES: Final = 1 << 20


def serialize_metadata(metadata: Metadata, summary: Summary | None = None) -> bytes:
    """Return the bytes of `.metadata`: a pickle that stock DCP reads with torch alone, followed by its CRC."""
    if not all(type(value) is tuple and type(value[0]) is tuple for value in metadata.storage_data.values()):
        metadata = dataclasses.replace(metadata, storage_data=plain_storage_data(metadata.storage_data))
    text = None if summary is None else summary.to_text()
    if text is not None:
        metadata = dataclasses.replace(metadata)
        setattr(metadata, SUMMARY_ATTRIBUTE, text)
    return with_trailer(_pickled(metadata))


def _pickled(metadata: Metadata) -> bytes:
    """Return the pickle of metadata, the same whatever the release of Python.

    The first releases of Python 3.11 would write the member of an enum as a call of getattr, which no careful reader
    makes: here it is its class and value.
    """
    state = TensorProperties().__getstate__()  # type: ignore[no-untyped-call]
    kinds = {type(value) for value in state if isinstance(value, enum.Enum)}
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(kinds, _by_value)}
    pickler.dump(metadata)
    return file.getvalue()


def _by_value(member: enum.Enum) -> tuple[type[enum.Enum], tuple[Any, ...]]:
    return type(member), (member.value,)


def parse_metadata(
    data: bytes, *, path: str, trusted_globals: Sequence[str] = (), limit_nbytes: int = MAX_METADATA_NBYTES
) -> Metadata:
    """Read `.metadata` without executing anything that it names.

    Attributes that this version does not know are ignored, and nothing is built from them: a later torch may add some.
    """
    trusted = resolve_trusted_globals(trusted_globals)
    try:
        end = end_of_pickle(data)
        # what is made of the tree takes about as much memory as the tree
        most_nbytes = max((3 * limit_nbytes - len(data)) // 2, _LEAST_TREE_NBYTES)
        with collector_paused():
            return MetadataReader(path, end).metadata(
                run_pickle(data, ALLOWED, trusted, end=end, most_nbytes=most_nbytes)
            )
    except CheckpointError as error:
        error.path = error.path or path
        raise

"""What the tools share: opening a checkpoint's storage with checked options, and the order of names."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dcp_nvcomp.errors import CheckpointNotFoundError, ConfigurationError
from dcp_nvcomp.format.recognition import refused
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

# What `NvcompReader` takes and a storage does not; written out, because importing it takes torch, and that seconds,
# which is longer than listing a run.
READER_OPTIONS: Final = frozenset(
    (
        *("device_memory_budget", "engine", "host_memory_budget", "metadata_limit_nbytes", "on_load"),
        *("path", "progress", "safe_objects", "storage_options", "thread_count", "trusted_globals", "verify"),
    )
)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Iterator[Filesystem]:
    """Open the storage at `path` for the duration of a `with` statement."""
    with contextlib.closing(open_filesystem(path, storage_options=checked_storage_options(storage_options))) as opening:
        yield opening


def nothing_below(filesystem: Filesystem) -> CheckpointNotFoundError:
    """Return the error for a path at and below which no checkpoint is: it says what is there instead."""
    return refused(filesystem, "the directory of a run or a checkpoint") or CheckpointNotFoundError(
        "There is no checkpoint at or below this path.", path=filesystem.path
    )


def checked_storage_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options for the storage alone."""
    options = dict(given or {})
    for name in sorted(READER_OPTIONS & options.keys()):
        raise ConfigurationError(f"{name!r} is not an option of the storage.")
    return options


def document(result: Any, name: str, **more: Any) -> dict[str, Any]:
    """Return a result, a dataclass with a `path`, as a JSON document that has its path under another name."""
    values = as_json(result)
    return {"schema": 1, name: values.pop("path"), **more, **values}


def as_json(value: Any) -> Any:
    """Return JSON values: of a dataclass its fields by name."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_json(one) for one in value] if isinstance(value, list | tuple) else value


def natural_order(text: str) -> list[tuple[int, str]]:
    """A sort key under which `layers.2` comes before `layers.10`."""
    parts = re.split(r"0*([0-9]+)", text)  # text and digits in turn
    return [(len(part) if turn % 2 else 0, part) for turn, part in enumerate(parts)]

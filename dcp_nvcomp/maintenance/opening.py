"""Open a checkpoint's storage for a tool: check its options, and close it in the end."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.options import DEADLINE_OPTION
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

__all__ = ["checked_storage_options", "opened"]


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Iterator[Filesystem]:
    """Open the storage at `path` for the duration of a `with` statement.

    Raises:
        ConfigurationError: an option is unknown, or not of the storage.
    """
    with contextlib.closing(open_filesystem(path, storage_options=checked_storage_options(storage_options))) as opening:
        yield opening


def checked_storage_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options for the storage alone.

    Raises:
        ConfigurationError: one of them is `NvcompReader`'s own, and not of its storage.
    """
    options = dict(given or {})
    for name in (inspect.signature(NvcompReader).parameters.keys() - {DEADLINE_OPTION}) & options.keys():
        raise ConfigurationError(f"{name!r} is not an option of the storage.")
    return options

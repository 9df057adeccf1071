"""Storage that is used from another process of this machine, which knows fsspec's filesystems only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
import fsspec.config
from fsspec.registry import known_implementations

from dcp_nvcomp.storage.file_servers.urls import FILE_SERVERS
from dcp_nvcomp.storage.objects.azure import AZURE
from dcp_nvcomp.storage.objects.gcs import GCS
from dcp_nvcomp.storage.open import without_mark

_PROTOCOLS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(?=::|://)")
_IN_PROCESS = ("memory",)


def filesystem_classes(path: str | os.PathLike[str]) -> dict[str, type]:
    """Return the fsspec classes of a URL by protocol; none for a local path, nor where we have a client of our own."""
    text = without_mark(os.fspath(path))
    own = (*AZURE, *GCS) if "::" in text else (*AZURE, *GCS, *FILE_SERVERS)
    names = map(str.lower, _PROTOCOLS.findall(text))
    return {name: fsspec.get_filesystem_class(name) for name in names if name not in own}


def is_known_elsewhere(path: str | os.PathLike[str]) -> bool:
    """True if another process finds the same storage at this path or URL."""
    try:
        classes = filesystem_classes(path)
    except (ImportError, ValueError):  # the save will say so
        return False
    return all(name not in _IN_PROCESS and _is_fsspecs_own(name, found) for name, found in classes.items())


@dataclass(frozen=True)
class StorageSettings:
    """What this process has told fsspec of a URL's storage."""

    classes: Mapping[str, type]  # its classes by protocol
    config: Mapping[str, Any]  # fsspec's configuration, from its files and what was set since

    def apply(self) -> None:
        """Let URLs with these protocols be opened in this process as they are in the other one."""
        for name, found in self.classes.items():
            if not _is_fsspecs_own(name, found):
                fsspec.register_implementation(name, found, clobber=True)
        if fsspec.config.conf != self.config:
            fsspec.config.conf.clear()
            fsspec.config.conf.update(self.config)


def storage_of(path: str | os.PathLike[str]) -> StorageSettings:
    """Return what another process has to know to open this path or URL as this one does."""
    return StorageSettings(filesystem_classes(path), dict(fsspec.config.conf))


def _is_fsspecs_own(protocol: str, found: type) -> bool:
    """True if fsspec finds this class by itself; it may name a package that only passes it on."""
    known = known_implementations.get(protocol, {}).get("class", "").split(".")
    return (known[0], known[-1]) == (found.__module__.split(".")[0], found.__name__)

"""The storage of an opened checkpoint, as one process has opened it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.storage.base import Filesystem


class OpenedStorage:
    """The storage as one process has opened it, and the footers that were read."""

    def __init__(self, reader: NvcompReader) -> None:
        self.pid = os.getpid()
        self.filesystem = reader.open_storage()
        self._footers: dict[DataFileRef, Footer] = {}
        self._lock = threading.Lock()

    def footers(self, filesystem: Filesystem, files: Sequence[DataFileRef]) -> list[Footer]:
        """Return the footers of data files, each of which is read once."""
        with self._lock:
            known = {file: self._footers[file] for file in files if file in self._footers}
        missing = [file for file in files if file not in known]
        if missing:
            known.update(zip(missing, read_footers(filesystem, missing), strict=True))
            with self._lock:
                self._footers.update(known)
        return [known[file] for file in files]

"""One data file on its way to Google Cloud Storage: a single upload if it is small, else parts of a resumable one."""

from __future__ import annotations

import crc32c

from dcp_nvcomp.storage.gcs.object import GcsObject, checksum_text
from dcp_nvcomp.storage.gcs.session import UploadSession
from dcp_nvcomp.storage.parts import PartedOutput


class GcsOutput(PartedOutput):
    """A new object."""

    def __init__(self, target: GcsObject, part_nbytes: int, *, replaces: bool = False) -> None:
        super().__init__(target.where, part_nbytes, replaces=replaces)
        self._target = target
        self._session: UploadSession | None = None
        self._nbytes = self._checksum = 0

    def _send_part(self) -> None:
        if self._session is None:
            self._session = UploadSession(self._target)
        start, part = self._counted_part()
        self._session.send(start, part)

    def _counted_part(self) -> tuple[int, bytes]:
        start, part = self._nbytes, self._take_part()
        self._nbytes += len(part)
        self._checksum = crc32c.crc32c(part, self._checksum)
        return start, part

    def _finish(self) -> None:
        self._may_exist = True
        if self._session is None:
            data = self._take_part()
            self._target.perform("write", lambda: self._target.put(data))
        else:
            start, part = self._counted_part()
            self._session.complete(start, part, checksum_text(self._checksum))

    def _discard(self) -> None:
        seconds = self._target.client.removal_seconds
        session = self._session
        if session is not None:
            self._clean_up(lambda: session.cancel(deadline_seconds=seconds))
        if self._may_exist and not self._replaces:  # a close that failed may have taken effect nevertheless
            self._clean_up(lambda: self._target.remove(deadline_seconds=seconds))

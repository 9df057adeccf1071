"""Requests to an SMB server that carry no data, and how its refusals are told.

smbprotocol writes and reads the messages; they go over a wire of our own.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from smbprotocol.exceptions import SMBException, SMBResponseException
from smbprotocol.file_info import FileAttributes
from smbprotocol.open import (
    CreateDisposition,
    ImpersonationLevel,
    Open,
    SMB2QueryInfoRequest,
    SMB2QueryInfoResponse,
    SMB2SetInfoRequest,
)

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.storage.file_servers.session import ConnectionLostError
from dcp_nvcomp.storage.file_servers.smb_status import ERRNO, LOST
from dcp_nvcomp.storage.file_servers.smb_transfers import Refused

if TYPE_CHECKING:
    from dcp_nvcomp.storage.file_servers.smb_login import SmbConnection

_ANSWER_NBYTES: Final = 1 << 16


class SmbRequests:
    """What one attempt asks for on a connection."""

    def __init__(self, connection: SmbConnection) -> None:
        self._connection, self._wire, self._tree = connection, connection.wire, connection.tree

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what smbprotocol and the wire raise into `OSError`s; a connection that is of no use any more is cut."""
        try:
            yield
        except (SMBResponseException, Refused) as error:
            words = f"{type(error).__name__}: {error}"
            if error.status in LOST:
                self._connection.cut()
                raise ConnectionLostError(words) from error
            failure = OSError(ERRNO.get(error.status, errno.EIO), words)
            failure.ntstatus = error.status  # type: ignore[attr-defined]
            raise failure from error
        except ConnectionLostError:
            self._connection.cut()
            raise
        except BlockingIOError as error:
            self._connection.cut()
            words = f"{self._connection.server} took nothing for {self._wire.silent_seconds:.1f} s"
            raise ConnectionLostError(words, errno.ETIMEDOUT) from error
        except UnicodeError as error:
            raise OSError(errno.EINVAL, f"{type(error).__name__}: {error}") from error
        except (CheckpointError, MemoryError, AssertionError):
            raise
        except Exception as error:
            if hasattr(error, "ntstatus"):  # the server's answer, as it is told above
                raise
            self._connection.cut()
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error

    def _call(self, message: Any) -> Any:
        wanted = self._connection.transfers.credits_wanted(1)
        login = self._tree.session
        request = self._wire.send(message, login.session_id, self._tree.tree_connect_id, credit_request=wanted)
        return self._wire.receive(request)

    def name(self, path: str) -> str:
        """Return a path as the server knows it."""
        return "\\".join([*self._connection.prefix, *filter(None, path.split("/"))])

    def open(self, path: str, access: int, disposition: int, options: int, *, sharing: int | None = None) -> Open:
        """Open something; by default shared with others as the connection says."""
        opened = Open(self._tree, self.name(path))
        opened.create(
            ImpersonationLevel.Impersonation,
            access,
            FileAttributes.FILE_ATTRIBUTE_NORMAL,
            self._connection.sharing if sharing is None else sharing,
            disposition,
            options,
        )
        return opened

    @contextlib.contextmanager
    def opened(self, path: str, access: int, options: int = 0, **how: Any) -> Iterator[Open]:
        """Have something open for a while. What fails in it must not be hidden by what then fails in closing."""
        with self.errors():
            opened = self.open(path, access, CreateDisposition.FILE_OPEN, options, **how)
            try:
                yield opened
            except BaseException:
                if self._connection.is_alive:
                    with contextlib.suppress(SMBException, OSError):
                        opened.close()
                raise
            opened.close()

    def query(self, opened: Open, information: Any) -> Any:
        """Return what the server knows of something open, as that structure."""
        request = SMB2QueryInfoRequest()
        request["info_type"] = information.INFO_TYPE
        request["file_info_class"] = information.INFO_CLASS
        request["output_buffer_length"] = _ANSWER_NBYTES
        request["file_id"] = opened.file_id
        answer = SMB2QueryInfoResponse()
        answer.unpack(self._call(request)["data"].get_value())
        return answer.parse_buffer(information)

    def change(self, opened: Open, information: Any) -> None:
        """Change something open as that structure says."""
        request = SMB2SetInfoRequest()
        request["info_type"] = information.INFO_TYPE
        request["file_info_class"] = information.INFO_CLASS
        request["file_id"] = opened.file_id
        request["buffer"] = information
        self._call(request)


def ntstatus_of(error: OSError) -> int:
    """Return the server's status behind an error; 0 if it is not the server's."""
    return int(getattr(error, "ntstatus", 0))

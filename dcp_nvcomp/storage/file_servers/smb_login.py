"""A login at an SMB server: smbprotocol's connection, with one user at a time, a login and a tree of its own.

smbprotocol's pool of connections is one for the whole process, and does not know when they are broken: it is not used.
"""

from __future__ import annotations

import errno
import socket
import uuid
from typing import Any, Final

from smbprotocol import connection as smb_connection
from smbprotocol.exceptions import SMBAuthenticationError, SMBException, SMBResponseException
from smbprotocol.header import Commands, NtStatus
from smbprotocol.open import ShareAccess
from smbprotocol.session import Session as SmbLogin
from smbprotocol.tree import TreeConnect

from dcp_nvcomp.storage.file_servers.session import Connection, ConnectionLostError, LoginError
from dcp_nvcomp.storage.file_servers.smb import SmbSession
from dcp_nvcomp.storage.file_servers.smb_socket import SmbSocket
from dcp_nvcomp.storage.file_servers.smb_status import LOST
from dcp_nvcomp.storage.file_servers.smb_transfers import DirectTransfers, WrappedTransfers
from dcp_nvcomp.storage.file_servers.urls import SmbPlace

_SHARING: Final = {
    "r": ShareAccess.FILE_SHARE_READ,
    "w": ShareAccess.FILE_SHARE_WRITE,
    "d": ShareAccess.FILE_SHARE_DELETE,
}


class _Wire(smb_connection.Connection):  # type: ignore[misc]
    """smbprotocol's connection, which would wait forever for an answer.

    Attributes:
        silent_seconds: how long the server may be silent.
    """

    silent_seconds = 1.0

    def receive(self, request: Any, wait: bool = True, timeout: float | None = None, **options: Any) -> Any:
        seconds = self.silent_seconds if timeout is None else timeout
        if not request.response_event.wait(seconds):
            raise ConnectionLostError(
                f"no answer from {self.server_name}:{self.port} within {seconds:.1f} s", errno.ETIMEDOUT
            )
        return super().receive(request, wait=wait, timeout=max(seconds, 1.0), **options)

    def send(self, message: Any, sid: int | None = None, *arguments: Any, **options: Any) -> Any:
        # SMB 3.1.1 wants this one signed also where nothing else is
        if message.COMMAND == Commands.SMB2_TREE_CONNECT and getattr(self.session_table.get(sid), "signing_key", None):
            options["force_signature"] = True
        return super().send(message, sid, *arguments, **options)

    @property
    def transport(self) -> SmbSocket | None:
        """The socket, once it was made."""
        return self._transport

    @transport.setter
    def transport(self, made: Any) -> None:
        # smbprotocol sets it when it begins, and when it connects
        self._transport = None if made is None else SmbSocket(self.server_name, self.port, made.timeout)


def connect(place: SmbPlace, silent_seconds: float) -> SmbConnection:
    """Log in, and connect to the share."""
    wire = _Wire(uuid.uuid4(), place.host, place.port, require_signing=place.require_signing)
    wire.silent_seconds = silent_seconds
    try:
        wire.connect(timeout=max(1, int(silent_seconds)))
        login = SmbLogin(
            wire,
            username=place.username,
            password=place.password,
            require_encryption=place.encrypt,
            auth_protocol=place.auth_protocol,
        )
        login.connect()
        tree = TreeConnect(login, rf"\\{place.host}\{place.share}")
        tree.connect()
    except BaseException as error:
        if wire.transport is not None:
            wire.transport.cut()
        if isinstance(error, ConnectionLostError) or not isinstance(error, Exception):
            raise
        raise _login_failure(error, place) from error
    return SmbConnection(wire, tree, place)


def _login_failure(error: Exception, place: SmbPlace) -> OSError:
    words = f"{type(error).__name__}: {error}"
    status = error.status if isinstance(error, SMBResponseException) else None
    if status in LOST:
        return ConnectionLostError(words)
    if status == NtStatus.STATUS_BAD_NETWORK_NAME:
        return LoginError(f"{place.server} has no share {place.share!r} ({words})", errno.ENODEV)
    if status is not None or isinstance(error, SMBAuthenticationError):
        return LoginError(
            f"{place.server} does not let {place.username or 'this user'} in ({words}). Check username=, password= "
            "and domain="
        )
    if isinstance(error, ImportError):
        words = f"{error}: pip install 'smbprotocol[kerberos]'"
        return LoginError(
            f"this client can't log in as auth_protocol={place.auth_protocol!r} asks for ({words})", errno.EINVAL
        )
    cause = error.__cause__
    if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
        return LoginError(f"{place.server} is not known to the network ({cause.strerror})", errno.EHOSTUNREACH)
    if isinstance(error, SMBException) and any(word in str(error).lower() for word in ("signing", "encrypt")):
        return LoginError(f"{place.server} and this client do not agree on signing or encryption ({words})")
    return ConnectionLostError(words, getattr(cause, "errno", None) or errno.ECONNREFUSED)


class SmbConnection(Connection):
    """A connection for one user at a time.

    Attributes:
        transfers: how data are read and written.
        sharing: what others may do to a file that is open here.
    """

    users = 1

    def __init__(self, wire: _Wire, tree: Any, place: SmbPlace) -> None:
        assert wire.transport is not None
        self.wire, self.tree, self.server = wire, tree, place.server
        self._socket = wire.transport
        is_encrypted = tree.session.encrypt_data or tree.encrypt_data
        self.transfers = WrappedTransfers(wire, tree) if is_encrypted else DirectTransfers(wire, tree)
        self.sharing = sum(_SHARING[letter] for letter in set(place.share_access))
        # on a share of a distributed file system names begin with the server's and the share's
        self.prefix = [place.host, place.share] if tree.is_dfs_share else []
        self._is_cut = False

    @property
    def is_alive(self) -> bool:
        return not self._is_cut and self._socket.connected

    def session(self, silent_seconds: float) -> SmbSession:
        try:
            self._socket.limit(silent_seconds)
        except OSError as error:  # the receiving thread has closed the socket since we looked
            self.cut()
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error
        self.wire.silent_seconds = silent_seconds
        return SmbSession(self)

    def cut(self) -> None:
        self._is_cut = True
        self._socket.cut()

"""`open_file_server` returns the filesystem for a URL of a file server; nothing is sent yet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.file_servers.filesystem import ServerFilesystem
from dcp_nvcomp.storage.file_servers.pool import Pool
from dcp_nvcomp.storage.file_servers.session import Connection
from dcp_nvcomp.storage.file_servers.urls import SMB, SftpPlace, SmbPlace, sftp_place, smb_place

_SFTP_CONNECTIONS: Final = 4
_SMB_CONNECTIONS: Final = 32


def open_file_server(
    path: str,
    protocol: str,
    *,
    options: Mapping[str, Any],
    deadline_seconds: float,
    known_options: Sequence[str] = (),
) -> ServerFilesystem:
    """Open the place of one checkpoint."""
    place: SftpPlace | SmbPlace
    if protocol in SMB:
        place = smb_place(path, options, known_options)
        secrets, most = {"password": place.password}, _SMB_CONNECTIONS
    else:
        place = sftp_place(path, options, known_options)
        secrets, most = {name: place.client.get(name) for name in ("password", "passphrase")}, _SFTP_CONNECTIONS
    hidden = {**options, **secrets}
    pool = Pool(
        functools.partial(_client(protocol), place),
        deadline_seconds,
        most=most,
        redact=Redactor(path, hidden),
        server=place.server,
    )
    return ServerFilesystem(path, place.path, pool, part_nbytes=place.part_nbytes, options=hidden)


def _client(protocol: str) -> Callable[..., Connection]:
    try:
        if protocol in SMB:
            from dcp_nvcomp.storage.file_servers import smb_login

            return smb_login.connect
        from dcp_nvcomp.storage.file_servers import sftp_login

        return sftp_login.connect
    except ImportError as error:
        extra = "smb" if protocol in SMB else "sftp"
        raise ConfigurationError(f"{protocol}:// is not available here: pip install 'dcp-nvcomp[{extra}]'.") from error

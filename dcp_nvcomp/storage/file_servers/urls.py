"""The URLs and options of `sftp://`, `ssh://` and `smb://`: those that fsspec's own filesystems take, and sshfs's.

URL, options, fsspec's configuration -> server, path, options of the client
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import fsspec.config

from dcp_nvcomp.calls.unknown_options import unknown_option
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.remote import option_nbytes

SFTP: Final = ("sftp", "ssh")
SMB: Final = ("smb",)
FILE_SERVERS: Final = (*SFTP, *SMB)

_SFTP_PORT: Final = 22
_SMB_PORT: Final = 445
_MIN_PART_NBYTES: Final = 1 << 18
_PART_NBYTES: Final = 16 << 20
# AES-GCM first: it is several times as fast as what asyncssh would agree upon, ChaCha20.
_ENCRYPTION: Final = "^aes128-gcm@openssh.com"
_URL: Final = re.compile(
    r"(?P<protocol>[A-Za-z]+)://(?:(?P<login>[^/]*)@)?(?P<host>\[[^\]/]+\]|[^/:@]*)(?::(?P<port>\d*))?(?P<path>/.*)?",
    re.DOTALL,
)
_IGNORED: Final = ("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "temppath")
_PART: Final = ("default_block_size", "block_size")
_SFTP_OPTIONS: Final = (
    *("username", "user", "password", "port", "client_keys", "key_filename", "passphrase", "known_hosts"),
    *("agent_path", "config", "encryption_algs", "compression_algs", "keepalive_interval"),
)
_SFTP_CLIENT: Final = (
    *("password", "passphrase", "agent_path", "config", "encryption_algs", "compression_algs", "keepalive_interval"),
)
_SFTP_NONE: Final = ("agent_path", "config")  # None means none
_SMB_OPTIONS: Final = (
    *("username", "user", "password", "port", "domain", "encrypt", "share_access", "require_signing", "auth_protocol"),
)
_SMB_IGNORED: Final = (
    *("timeout", "auto_mkdir", "register_session_retries", "register_session_retry_wait"),
    "register_session_retry_factor",
)
# A number would have lost its zeros: 0123 is none of JSON's, and 83 in YAML.
_TEXTS: Final = ("username", "password", "passphrase", "domain")
_AUTHENTICATION: Final = ("negotiate", "ntlm", "kerberos")


@dataclass(frozen=True)
class SftpPlace:
    """Where a checkpoint is on an SFTP server, and how to get there.

    Attributes:
        host: the server.
        port: its port; `()` leaves it to OpenSSH's configuration file, as asyncssh wants it.
        path: the directory.
        user: who logs in, for messages.
        part_nbytes: how long the parts of a file are.
        client: options of asyncssh; they hold secrets.
    """

    host: str
    port: Any
    path: str
    user: str
    part_nbytes: int
    client: Mapping[str, Any] = field(repr=False)

    @property
    def server(self) -> str:
        """Its name for messages."""
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True)
class SmbPlace:
    """Where a checkpoint is on an SMB server, and how to get there.

    Attributes:
        host: the server.
        port: its port.
        share: the share.
        path: the directory in the share, with `/`.
        username: who logs in, with a domain if there is one; None for a Kerberos ticket.
        password: their password.
        part_nbytes: how long the parts of a file are.
        share_access: what others may do to a file that is open here, of "rwd".
        encrypt: whether all that is sent is encrypted, also if the server does not ask for it.
        require_signing: whether all that is sent is signed.
        auth_protocol: "negotiate", "ntlm" or "kerberos".
    """

    host: str
    port: int
    share: str
    path: str
    username: str | None
    password: str | None = field(repr=False)
    part_nbytes: int
    share_access: str
    encrypt: bool
    require_signing: bool
    auth_protocol: str

    @property
    def server(self) -> str:
        """Its name for messages."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class _Parsed:
    host: str
    port: int | None
    user: str | None
    password: str | None
    path: str


def sftp_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> SftpPlace:
    """Return where a URL leads."""
    url = _parse(path, "sftp://user@host/directory")
    options = _with_configuration(options, SFTP, url)
    _check_names(options, (*_SFTP_OPTIONS, *_PART), known_options, "sftp")
    client = {
        name: options[name]
        for name in _SFTP_CLIENT
        if options.get(name) is not None or (name in _SFTP_NONE and name in options)
    }
    user = options.get("username")
    if user:
        client["username"] = user
    keys = options.get("client_keys", options.get("key_filename"))
    if keys is not None:
        client["client_keys"] = _expanded(keys)
    if "known_hosts" in options:  # None: whoever answers is believed
        client["known_hosts"] = _expanded(options["known_hosts"])
    client.setdefault("encryption_algs", _ENCRYPTION)
    client.setdefault("compression_algs", ["none"])  # what we send is compressed
    port = _port(options) or ()
    return SftpPlace(url.host, port, url.path or "/", user or "this user", _part_nbytes(options), client)


def smb_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> SmbPlace:
    """Return where a URL leads."""
    url = _parse(path, "smb://user@host/share/directory")
    options = _with_configuration(options, SMB, url)
    _check_names(options, (*_SMB_OPTIONS, *_PART), known_options, "smb", _SMB_IGNORED)
    share, _, inside = url.path.strip("/").partition("/")
    if not share:
        raise ConfigurationError("A URL of an SMB server is smb://user@host/share/directory.", path=path)
    if share == ".." or ".." in inside.split("/"):
        raise ConfigurationError("A URL of an SMB server has no '..' in it.", path=path)
    domain, _, user = (options.get("username") or "").rpartition(";")
    domain = options.get("domain") or domain
    access = options.get("share_access") or "rwd"
    if set(access) - set("rwd"):
        raise ConfigurationError(f"share_access={access!r} must be letters of 'rwd'.")
    protocol = options.get("auth_protocol") or "negotiate"
    if protocol not in _AUTHENTICATION:
        raise ConfigurationError(f"auth_protocol={protocol!r} must be one of {', '.join(_AUTHENTICATION)}.")
    return SmbPlace(
        url.host,
        _port(options) or _SMB_PORT,
        share,
        inside,
        (f"{domain}\\{user}" if domain else user) or None,
        options.get("password"),
        _part_nbytes(options),
        access,
        _flag(options, "encrypt", False),
        _flag(options, "require_signing", True),
        protocol,
    )


def file_server_url(path: str) -> str:
    """Return one URL for a place however it is written, and whoever logs in, to compare places."""
    match = _URL.fullmatch(path)
    if match is None:
        return path
    protocol = "smb" if match["protocol"].lower() in SMB else "sftp"
    usual = _SMB_PORT if protocol == "smb" else _SFTP_PORT
    port = f":{match['port']}" if match["port"] and int(match["port"]) != usual else ""
    return f"{protocol}://{match['host'].lower()}{port}{posixpath.normpath('/' + (match['path'] or '').strip('/'))}"


def _parse(path: str, form: str) -> _Parsed:
    match = _URL.fullmatch(path)
    if match is None or not match["host"]:
        raise ConfigurationError(f"This is not a URL like {form}.", path=without_secrets(path))
    user, colon, password = (match["login"] or "").partition(":")
    return _Parsed(
        match["host"].strip("[]"),
        int(match["port"]) if match["port"] else None,
        unquote(user) or None,
        unquote(password) if colon else None,
        (match["path"] or "").rstrip("/"),
    )


def _with_configuration(options: Mapping[str, Any], protocols: Sequence[str], url: _Parsed) -> dict[str, Any]:
    """Return the options; what the URL says counts less, and fsspec's configuration files and environment least."""
    found: dict[str, Any] = {}
    in_url = {"username": url.user, "password": url.password, "port": url.port}
    configured = [fsspec.config.conf.get(protocol, {}) for protocol in protocols]
    for given in (*configured, {name: value for name, value in in_url.items() if value is not None}, options):
        found.update(given)
        if "user" in given:
            found["username"] = found.pop("user")
    for name in _TEXTS:
        if isinstance(found.get(name), bool | int | float):
            raise ConfigurationError(f"{name}= must be text, not {type(found[name]).__name__}.")
    return found


def _check_names(
    options: Mapping[str, Any],
    known: Sequence[str],
    known_options: Sequence[str],
    protocol: str,
    ignored: Sequence[str] = (),
) -> None:
    for option in sorted(options.keys() - {*known, *ignored, *_IGNORED}):
        close = difflib.get_close_matches(option, [*known_options, *known], n=1, cutoff=0.75)
        raise unknown_option(option, close, call=known_options, storage=f"{protocol}://", takes=known)


def _port(options: Mapping[str, Any]) -> int | None:
    given = options.get("port")
    if given is None:
        return None
    try:
        port = int(given)
    except (TypeError, ValueError):
        port = 0
    if not 0 < port < 1 << 16:
        raise ConfigurationError(f"port={given!r} must be a number from 1 to 65535.")
    return port


def _part_nbytes(options: Mapping[str, Any]) -> int:
    nbytes = option_nbytes(options, *_PART) or _PART_NBYTES
    if nbytes < _MIN_PART_NBYTES:
        raise ConfigurationError(f"default_block_size must be at least {_MIN_PART_NBYTES}.")
    return nbytes


def _flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):  # from the environment
        return value.lower() in ("true", "1")
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be True or False.")
    return value


def _expanded(value: Any) -> Any:
    """Return file names with `~` resolved; keys and what else asyncssh takes as they are."""
    if isinstance(value, str | Path):
        return os.path.expanduser(value)
    if isinstance(value, list | tuple):
        return [_expanded(item) for item in value]
    return value

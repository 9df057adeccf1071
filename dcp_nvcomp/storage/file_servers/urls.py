"""The URLs and options of `sftp://`, `ssh://` and `smb://`: those that fsspec's own filesystems take, and sshfs's."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import fsspec.config

from dcp_nvcomp.calls.suggestions import refuse_unknown
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
_URL: Final = re.compile(
    r"(?P<protocol>[A-Za-z]+)://(?:(?P<login>[^/]*)@)?(?P<host>\[[^\]/]+\]|[^/:@]*)(?::(?P<port>\d*))?(?P<path>/.*)?",
    re.DOTALL,
)
_IGNORED: Final = ("skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "temppath")
_SMB_IGNORED: Final = (
    *("timeout", "auto_mkdir", "register_session_retries", "register_session_retry_wait"),
    "register_session_retry_factor",
)
_COMMON: Final = ("username", "user", "password", "port", "default_block_size", "block_size")
_SFTP_CLIENT: Final = (
    *("username", "password", "passphrase", "agent_path", "config", "encryption_algs", "compression_algs"),
    "keepalive_interval",
)
_SFTP_OPTIONS: Final = (*_COMMON, *_SFTP_CLIENT, "client_keys", "key_filename", "known_hosts")
_SFTP_NONE: Final = ("agent_path", "config")  # None means none
_SMB_OPTIONS: Final = (*_COMMON, "domain", "encrypt", "share_access", "require_signing", "auth_protocol")
# A number would have lost its zeros: JSON has no 0123, and in YAML it is 83.
_TEXTS: Final = ("username", "password", "passphrase", "domain")
_AUTHENTICATION: Final = ("negotiate", "ntlm", "kerberos")


@dataclass(frozen=True)
class ServerPlace:
    """Where a checkpoint is on a file server, and with which options, which hold secrets, its client logs in."""

    host: str
    port: Any  # `()` leaves it to OpenSSH's configuration file, as asyncssh wants it
    path: str  # on SMB, within the share
    part_nbytes: int
    client: Mapping[str, Any] = field(repr=False)
    share: str = ""
    share_access: str = ""  # what others may do to a file that is open here, of "rwd"
    abilities: set[str] = field(default_factory=set, compare=False)  # what the server was seen to be able to do

    @property
    def server(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host

    @property
    def user(self) -> str:
        return self.client.get("username") or "this user"


def sftp_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> ServerPlace:
    """Return where a URL leads."""
    url = _parse(path, "sftp://user@host/directory")
    options = _with_configuration(options, SFTP, url)
    refuse_unknown(options.keys() - {*_IGNORED}, _SFTP_OPTIONS, known_options, "sftp://")
    client = {
        name: options[name]
        for name in _SFTP_CLIENT
        if options.get(name) is not None or (name in _SFTP_NONE and name in options)
    }
    keys = options.get("client_keys", options.get("key_filename"))
    if keys is not None:
        client["client_keys"] = _expanded(keys)
    if "known_hosts" in options:  # None: any host is trusted
        client["known_hosts"] = _expanded(options["known_hosts"])
    # several times as fast as what asyncssh would agree upon, ChaCha20
    client.setdefault("encryption_algs", "^aes128-gcm@openssh.com")
    client.setdefault("compression_algs", ["none"])  # what is sent is compressed
    return ServerPlace(url["host"].strip("[]"), _port(options) or (), _path(url) or "/", _part_nbytes(options), client)


def smb_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> ServerPlace:
    """Return where a URL leads."""
    url = _parse(path, "smb://user@host/share/directory")
    options = _with_configuration(options, SMB, url)
    refuse_unknown(options.keys() - {*_IGNORED, *_SMB_IGNORED}, _SMB_OPTIONS, known_options, "smb://")
    share, _, inside = _path(url).strip("/").partition("/")
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
    port = _port(options) or _SMB_PORT
    client = {
        "username": (f"{domain}\\{user}" if domain else user) or None,  # None: a Kerberos ticket is used
        "password": options.get("password"),
        "encrypt": _flag(options, "encrypt", False) or None,  # None: as the server wants it
        "require_signing": _flag(options, "require_signing", True),
        "auth_protocol": protocol,
    }
    return ServerPlace(url["host"].strip("[]"), port, inside, _part_nbytes(options), client, share, access)


def file_server_url(path: str) -> str:
    """Return one URL for a place however it is written, and whoever logs in, to compare places."""
    match = _URL.fullmatch(path)
    if match is None:
        return path
    protocol = "smb" if match["protocol"].lower() in SMB else "sftp"
    usual = _SMB_PORT if protocol == "smb" else _SFTP_PORT
    port = f":{match['port']}" if match["port"] and int(match["port"]) != usual else ""
    return f"{protocol}://{match['host'].lower()}{port}{posixpath.normpath('/' + _path(match).strip('/'))}"


def _parse(path: str, form: str) -> re.Match[str]:
    url = _URL.fullmatch(path)
    if url is None or not url["host"]:
        raise ConfigurationError(f"This is not a URL like {form}.", path=without_secrets(path))
    return url


def _path(url: re.Match[str]) -> str:
    return (url["path"] or "").rstrip("/")


def _with_configuration(options: Mapping[str, Any], protocols: Sequence[str], url: re.Match[str]) -> dict[str, Any]:
    """Return the options; what the URL says counts less, and fsspec's configuration files and environment least."""
    user, colon, password = (url["login"] or "").partition(":")
    in_url: dict[str, Any] = {"username": unquote(user)} if user else {}
    in_url |= {"password": unquote(password)} if colon else {}
    in_url |= {"port": int(url["port"])} if url["port"] else {}
    found: dict[str, Any] = {}
    for given in (*(fsspec.config.conf.get(protocol, {}) for protocol in protocols), in_url, options):
        found.update(given)
        if "user" in given:
            found["username"] = found.pop("user")
    for name in _TEXTS:
        if isinstance(found.get(name), bool | int | float):
            raise ConfigurationError(f"{name}= must be text, not {type(found[name]).__name__}.")
    return found


def _port(options: Mapping[str, Any]) -> int | None:
    given = options.get("port")
    if given is None:
        return None
    if not str(given).isdecimal() or not 0 < int(given) < 1 << 16:
        raise ConfigurationError(f"port={given!r} must be a number from 1 to 65535.")
    return int(given)


def _part_nbytes(options: Mapping[str, Any]) -> int:
    nbytes = option_nbytes(options, "default_block_size", "block_size") or _PART_NBYTES
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
    return [_expanded(item) for item in value] if isinstance(value, list | tuple) else value

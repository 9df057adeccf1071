"""`open_filesystem` returns the `Filesystem` for a path or URL: our own implementation, or else fsspec's filesystem."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import fsspec
import fsspec.config

from dcp_nvcomp.calls.suggestions import advice_for, unknown_option
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.options import DEADLINE_OPTION, DEADLINE_SECONDS, check_seconds, not_a_path
from dcp_nvcomp.redaction import Redactor, without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.file_servers.filesystem import open_file_server
from dcp_nvcomp.storage.file_servers.urls import FILE_SERVERS, SMB, file_server_url
from dcp_nvcomp.storage.fsspec_files import FsspecFilesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.objects.azure import AZURE, azure_url, open_azure
from dcp_nvcomp.storage.objects.gcs import GCS, gcs_url, open_gcs
from dcp_nvcomp.storage.objects.s3 import open_s3
from dcp_nvcomp.storage.remote import part_nbytes

# `dcpz:///path` and `dcpz+s3://bucket/key` tell stock DCP to save through this package; here they are the place itself.
MARK: Final = "dcpz"
# The protocols behind the mark; each has an entry point of fsspec in setup.cfg.
MARKED_PROTOCOLS: Final = ("s3", "gs", "gcs", "az", "abfs", "memory")

_MARKED = re.compile(rf"{MARK}(?:\+([A-Za-z][A-Za-z0-9+.\-]*))?:(//?)(.*)", re.DOTALL | re.IGNORECASE)


def is_marked(path: str) -> bool:
    """Return True for a URL with the mark, and for what pathlib makes of one."""
    return _MARKED.fullmatch(path) is not None


def without_mark(path: str) -> str:
    """Return the path or URL without the mark; others as they are."""
    found = _MARKED.fullmatch(path)
    if found is None:
        return path
    protocol, slashes, rest = found.groups()
    if slashes != "//":
        whole = path.replace(":/", ":///" if protocol is None else "://", 1)
        raise ConfigurationError(f"{path!r} is what pathlib makes of a URL: pass {whole!r} as text, not as a Path.")
    return rest if protocol is None else f"{protocol}://{rest}"


_S3 = ("s3", "s3a")
_OPENERS: Final[dict[str, Callable[[str, dict[str, Any], float, Sequence[str]], Filesystem]]] = {
    **dict.fromkeys(AZURE, open_azure),
    **dict.fromkeys(GCS, open_gcs),
    **dict.fromkeys(FILE_SERVERS, open_file_server),
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(::.*)?://", re.DOTALL)
# What pathlib makes of a URL.
_FOLDED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")
_LAST_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def open_filesystem(
    path: str | os.PathLike[str],
    *,
    sync_files: bool = True,
    directory_mode: int = 0o777,
    deadline_seconds: float = DEADLINE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    known_options: Sequence[str] = (),
) -> Filesystem:
    """Open the place of one checkpoint; nothing is read or written yet."""
    options: dict[str, Any] = {
        "sync_files": sync_files,
        "directory_mode": directory_mode,
        "deadline_seconds": deadline_seconds,
        "storage_options": storage_options,
        "known_options": known_options,
    }
    filesystem = _open(path, **options)
    text = _in_lower_case(without_mark(os.fspath(path)))
    filesystem.reopen = lambda other: open_filesystem(_with_secrets(text, other), **options)
    return filesystem


def _with_secrets(path: str, other: str) -> str:
    """Return another path; one above `path` with the password that the latter has, and messages hide in both.

    Else the storage would be asked with the wrong one: after some of these, servers lock users out.
    """
    shown = without_secrets(path)
    rest = shown.removeprefix(other)
    return path.removesuffix(rest) if shown.startswith(other) and path.endswith(rest) else other


def _open(
    path: str | os.PathLike[str],
    *,
    sync_files: bool,
    directory_mode: int,
    deadline_seconds: float,
    storage_options: Mapping[str, Any] | None,
    known_options: Sequence[str],
) -> Filesystem:
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise not_a_path(path)
    text = _in_lower_case(without_mark(text))
    folded = _FOLDED_URL.match(text)
    if folded is not None and folded[1].lower() in fsspec.available_protocols():
        raise ConfigurationError(
            f"{text!r} is what pathlib makes of a URL: pass {text.replace(':/', '://', 1)!r} as text, not as a Path."
        )
    options = dict(storage_options or {})
    deadline_seconds = check_seconds(DEADLINE_OPTION, options.pop(DEADLINE_OPTION, deadline_seconds))
    url = _URL.match(text)
    protocol = url[1] if url else "file"
    chained = url is not None and url[2] is not None
    for package in _packages(protocol):
        refuse_old(package, f"{protocol}://")
    if protocol in _OPENERS and not chained:
        with _configuration_errors(text, options):
            return _OPENERS[protocol](text, options, deadline_seconds, known_options)
    _check_options(_filesystem_class(protocol, text), protocol, options, known_options, may_pass=chained)
    if protocol in ("file", "local") and not chained:
        local = os.path.expanduser(text[url.end() :] if url else text)
        return PosixFilesystem(text, os.path.abspath(local), sync_files=sync_files, directory_mode=directory_mode)
    if protocol in _S3 and not chained:
        with _configuration_errors(text, options):
            return open_s3(text, options, deadline_seconds)
    return _open_fsspec(text, protocol, options)


def _in_lower_case(path: str) -> str:
    """Return a URL with its protocol in lower case, as RFC 3986 has it; fsspec knows no other."""
    url = _URL.match(path)
    return path if url is None else url[1].lower() + path[url.end(1) :]


def _packages(protocol: str) -> tuple[str, ...]:
    """Return the packages that bring a storage and have a lowest version."""
    if protocol in _S3:
        return "fsspec", "s3fs"
    if protocol in GCS:
        return "fsspec", "gcsfs"
    if protocol in AZURE:
        return ("obstore",)
    if protocol in FILE_SERVERS:
        return ("smbprotocol",) if protocol in SMB else ("asyncssh",)
    return () if protocol in ("file", "local") else ("fsspec",)


def place_of(path: str | os.PathLike[str]) -> str:
    """Return where a path leads now: of a local one the absolute path; URLs of other storage as they are."""
    text = _in_lower_case(without_mark(os.fspath(path)))
    url = _URL.match(text)
    protocol = url[1] if url else "file"
    if protocol not in ("file", "local") or "::" in text:
        return text
    return os.path.abspath(os.path.expanduser(text[url.end() :] if url else text))


def real_place(path: str | os.PathLike[str]) -> str:
    """Return one name for a place however it is written, to compare places: without links, URLs as fsspec has them."""
    text = place_of(path)
    url = _URL.match(text)
    if url is None:
        return os.path.realpath(text)
    protocol = url[1]
    if url[2] is not None:
        return text.rstrip("/")
    if protocol in AZURE:
        return azure_url(text)
    if protocol in GCS:
        return gcs_url(text)
    if protocol in FILE_SERVERS:
        return file_server_url(text)
    stripped = str(_filesystem_class(protocol, text)._strip_protocol(text))
    return f"{'s3' if protocol in _S3 else protocol}://{stripped.strip('/')}"


def _open_fsspec(path: str, protocol: str, options: dict[str, Any]) -> Filesystem:
    nbytes = part_nbytes(options)
    with _configuration_errors(path, options):
        # a stale listing hides new files and shows removed ones
        fs, root = fsspec.url_to_fs(path, **{"use_listings_cache": False, **options})
    innermost = _LAST_PROTOCOL.findall(path)[-1].lower() if "::" in path else protocol  # stores the bytes
    is_object_store = innermost in _OBJECT_STORES
    return FsspecFilesystem(
        path,
        fs,
        root,
        options=options,
        part_nbytes=nbytes,
        is_object_store=is_object_store,
        one_at_a_time=innermost in _ONE_CONNECTION,
    )


@contextlib.contextmanager
def _configuration_errors(path: str, options: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        redact = Redactor(path, options)
        message = f"These storage options do not work: {redact(str(error))}."
        raise ConfigurationError(message, path=path) from redact.error(error)


def _filesystem_class(protocol: str, path: str) -> Any:
    try:
        found = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = "'dcp-nvcomp[s3]'" if protocol in _S3 else f"the package fsspec needs for it ({error})"
        raise ConfigurationError(f"{protocol}:// is not available here: pip install {package}.", path=path) from error
    except ValueError as error:
        close = difflib.get_close_matches(protocol, fsspec.available_protocols(), n=1)
        meant = f" Did you mean '{close[0]}://'?" if close else ""
        raise ConfigurationError(f"Unknown storage protocol {protocol!r}.{meant}", path=path) from error
    return found


# Taken by every fsspec filesystem, but not named in its constructor.
_COMMON_OPTIONS = ("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache")
# What fsspec's filesystems take for themselves: it can't work here.
_INTERNAL_OPTIONS = ("asynchronous", "loop", "self")
# s3fs hands what it does not know to its botocore session, which names it only at the first request.
_S3_SESSION_OPTIONS = ("profile", "session_vars", "event_hooks", "include_builtin_handlers")
# Filesystems whose options are all named above or in their constructors: anything else is a mistake.
_CLOSED = ("file", "local", "memory", "s3", "s3a")


def _check_options(
    filesystem_class: type, protocol: str, options: Mapping[str, Any], known_options: Sequence[str], *, may_pass: bool
) -> None:
    """Refuse unknown options: fsspec and s3fs would ignore them, or fail late and unclearly."""
    names = set(_S3_SESSION_OPTIONS if protocol in _S3 else ())
    for base in filesystem_class.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    names -= set(_INTERNAL_OPTIONS)
    is_closed = protocol in _CLOSED and not may_pass  # then it is a mistake, and the hint may be a bolder guess
    for option in sorted(options.keys() - names - set(_COMMON_OPTIONS)):
        close = difflib.get_close_matches(
            option, [*known_options, *sorted(names)], n=1, cutoff=0.6 if is_closed else 0.75
        )
        if close or is_closed or advice_for(option, known_options):
            # those of fsspec's own local and memory filesystems change nothing
            takes = names if protocol in _S3 else ()
            raise unknown_option(option, close, call=known_options, storage=f"{protocol}://", takes=takes)


# A PUT is atomic and directories do not exist. Elsewhere directories are made, as on a disk.
_OBJECT_STORES = ("s3", "s3a", *GCS, *AZURE, "adl", "oci", "ocilake", "oss", "memory")
# Their client is one connection, on which the answers to several threads would be mixed up.
_ONE_CONNECTION = ("ftp",)


LOWEST: Final = {
    "fsspec": "2024.3.1",
    "s3fs": "2024.3.1",
    "gcsfs": "2024.3.1",
    "obstore": "0.11.1",
    "asyncssh": "2.18",
    "smbprotocol": "1.13",
}


def refuse_old(package: str, needed_for: str) -> None:
    """Raise if a package is installed in a version that is too old; do nothing if it is not installed."""
    installed = _installed(package)
    if installed is not None and _parts(installed) < _parts(LOWEST[package]):
        raise ConfigurationError(
            f"{package} {installed} is too old for {needed_for}, which needs {LOWEST[package]} or newer: "
            f"pip install '{package}>={LOWEST[package]}'."
        )


@functools.cache
def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", version)[:3]]

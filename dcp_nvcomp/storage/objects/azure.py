"""One container of Azure Blob Storage, through obstore (Rust's object_store), with adlfs's options.

Requests are sent once, but for the blocks of an upload, which obstore repeats until the deadline. Blocks that were
never committed are removed by Azure itself, after a week.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import fsspec.asyn
import fsspec.config

from dcp_nvcomp.calls.suggestions import refuse_unknown
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.objects.bucket import (
    BEYOND_END,
    CONNECT_SECONDS,
    REQUEST_SECONDS,
    AnswerError,
    Bucket,
    Found,
    NoAnswerError,
    ObjectFilesystem,
    Place,
    if_there,
)
from dcp_nvcomp.storage.remote import PartedOutput, part_nbytes

T = TypeVar("T")

AZURE: Final = ("az", "abfs", "abfss")
_REQUEST_SHARE: Final = 1 / 3  # of the deadline, for one request: a silent server leaves time to ask again
_AFTERWARDS_SHARE: Final = 1 / 6  # of the deadline, for a look at what became of an upload, and for its removal
_MANY: Final = 1000
_AT_ONCE: Final = 2  # so that one block is sent while the next one is collected
_BACKOFF: Final = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}

# Our option, the store's, and the environment variable that both adlfs and obstore know.
_SETTINGS: Final = {
    "account_name": ("account_name", "AZURE_STORAGE_ACCOUNT_NAME"),
    "account_key": ("account_key", "AZURE_STORAGE_ACCOUNT_KEY"),
    "sas_token": ("sas_token", "AZURE_STORAGE_SAS_TOKEN"),
    "tenant_id": ("tenant_id", "AZURE_STORAGE_TENANT_ID"),
    "client_id": ("client_id", "AZURE_STORAGE_CLIENT_ID"),
    "client_secret": ("client_secret", "AZURE_STORAGE_CLIENT_SECRET"),
    "endpoint": ("endpoint", "AZURE_STORAGE_ENDPOINT"),
}
# The secrets among them, and what obstore calls their kind; it prefers the first.
_CREDENTIALS: Final = {"account_key": "access_key", "sas_token": "sas_token", "client_secret": "client_secret"}
_OTHERS: Final = ("anon", "connection_string", "default_block_size", "use_listings_cache", "skip_instance_cache")
_CONNECTION_STRING: Final = "AZURE_STORAGE_CONNECTION_STRING"
_PUBLIC: Final = ".blob.core.windows.net"
_AZURE_URL: Final = re.compile(r"[A-Za-z]+://(?:(?P<container>[^/@]+)@)?(?P<host>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)

# obstore's errors have the status in their words only, and after them a dump of their insides.
_STATUS: Final = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")
_DUMP: Final = "\n\nDebug source:"
# Classes of its errors that may come without a status, by name.
_REFUSALS: Final = {
    "FileNotFoundError": 404,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
    "NotSupportedError": 501,
    "NotImplementedError": 501,
    "InvalidPathError": 400,
}
# What it says, without a status, of a range that begins at the end or after it; and of the one of an empty blob, which
# Azurite answers with a range that can't be read.
_BEYOND: Final = ("Wanted range starting at", "parse value for CONTENT_RANGE")


def azure_place(path: str, options: Mapping[str, Any], known_options: Sequence[str] = ()) -> Place:
    """Return where a URL leads."""
    # of any of its names, as adlfs does it; of one alone, since an account's key is no good for another account
    sections = (fsspec.config.conf.get(name) for name in (path.partition("://")[0], *AZURE))
    options = {**next(filter(None, sections), {}), **options}
    refuse_unknown(options, (*_SETTINGS, *_OTHERS), known_options, "az://")
    match = _AZURE_URL.fullmatch(path)
    if match is None:
        raise ConfigurationError("A URL of Azure is az://container/path.", path=path)
    container, named = match["container"], {}
    if container is None:
        container = match["host"]
    else:
        named = _of_host(match["host"], path)
    config = _settings(options, named)
    if not config.get("account_name"):
        raise ConfigurationError(
            "There is no account: give account_name= or connection_string=, or set AZURE_STORAGE_ACCOUNT_NAME or "
            f"{_CONNECTION_STRING}.",
            path=path,
        )
    return Place(container, _checked((match["prefix"] or "").strip("/"), path), part_nbytes(options), config)


def azure_url(path: str) -> str:
    """Return one URL for a place however it is written, to compare places within an account."""
    match = _AZURE_URL.fullmatch(path)
    return path if match is None else f"az://{match['container'] or match['host']}/{(match['prefix'] or '').strip('/')}"


def _checked(prefix: str, path: str) -> str:
    """Return a prefix of names that obstore can send and Azure keeps as they are."""
    if prefix and {"", ".", ".."} & set(prefix.split("/")):
        reason = "empty, '.' or '..' parts"
    elif re.search(r"[\x00-\x1f\x7f\\]", prefix):
        reason = "backslashes or control characters"
    else:
        return prefix
    raise ConfigurationError(f"A path in a container can't have {reason}.", path=path)


def _of_host(host: str, path: str) -> dict[str, Any]:
    """Take the host of an `abfs://` URL apart; what is beside Azure's public cloud has an endpoint of its own."""
    account, *rest = host.split(".")
    if not rest:
        return {"account_name": account}
    if not {"dfs", "blob"} & set(rest):
        raise ConfigurationError(
            "The host of such a URL is ACCOUNT.dfs.core.windows.net, or another cloud's.", path=path
        )
    address = ".".join([account, *("blob" if label == "dfs" else label for label in rest)])
    public = address == f"{account}{_PUBLIC}"
    return {"account_name": account} if public else {"account_name": account, "endpoint": f"https://{address}"}


def _settings(options: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Bring together what the options, the URL and the environment say; the credentials are all of one source."""
    given = {name: options[option] for option, (name, _) in _SETTINGS.items() if options.get(option)}
    text = options.get("connection_string")
    told = _of_connection_string(text) if text else {}
    around = {} if text else _of_environment(given, named)
    config = {**around, **named, **told, **given}
    credentials = next((found for found in (given, told, around) if _CREDENTIALS.keys() & found.keys()), {})
    for name in _CREDENTIALS:
        config.pop(name, None)
    if options.get("anon"):
        return config | {"skip_signature": True}
    kind = next((kind for name, kind in _CREDENTIALS.items() if name in credentials), None)
    if kind is not None:  # told, so that obstore does not prefer what it finds in the environment
        config |= {name: credentials[name] for name in _CREDENTIALS if _CREDENTIALS[name] == kind}
        config |= {"credential_type": kind, "skip_signature": False}
    return config


def _of_environment(given: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """Return what the environment says; its connection string counts unless options or URL say who we are."""
    text = os.environ.get(_CONNECTION_STRING)
    if text and "account_name" not in given and not _CREDENTIALS.keys() & given.keys():
        found = _of_connection_string(text)
        if named.get("account_name", found.get("account_name")) == found.get("account_name"):
            return found
    return {name: os.environ[variable] for name, variable in _SETTINGS.values() if os.environ.get(variable)}


def _of_connection_string(text: str) -> dict[str, str]:
    """Take a connection string apart, as the portal of Azure shows it."""
    fields = {}
    for field in filter(None, text.split(";")):
        name, equals, value = field.partition("=")
        if not equals:
            raise ConfigurationError("connection_string= is not NAME=VALUE;NAME=VALUE;...")
        fields[name.strip().lower()] = value.strip()
    endpoint = fields.get("blobendpoint", "").rstrip("/")
    account = fields.get("accountname") or _account_of(endpoint)
    config = {"account_name": account} if account else {}
    for ours, theirs in (("accountkey", "account_key"), ("sharedaccesssignature", "sas_token")):
        if fields.get(ours):
            config[theirs] = fields[ours]
    if account and not endpoint:
        scheme = fields.get("defaultendpointsprotocol", "https")
        endpoint = f"{scheme}://{account}.blob.{fields.get('endpointsuffix', 'core.windows.net')}"
    return config | {"endpoint": endpoint} if endpoint else config


def _account_of(endpoint: str) -> str:
    """Return the account that an endpoint's address begins with; an emulator's ends with it."""
    address = urlsplit(endpoint)
    return address.path.strip("/") or (address.hostname or "").partition(".")[0]


@functools.cache
def _first_process() -> int:
    return os.getpid()


def _obstore() -> ModuleType:
    """Return obstore, whose threads do not survive a fork: a child would wait for them for ever."""
    try:
        import obstore.store
    except ImportError as error:
        raise ConfigurationError("az:// is not available here: pip install 'dcp-nvcomp[azure]'.") from error
    if _first_process() != os.getpid():
        raise ConfigurationError(
            "This process was forked from one that has used az://, whose client does not survive a fork. Start it with "
            "spawn or forkserver, such as DataLoader(..., multiprocessing_context='forkserver')."
        )
    module: ModuleType = obstore
    return module


def open_azure(
    path: str, options: Mapping[str, Any], deadline_seconds: float, known_options: Sequence[str]
) -> ObjectFilesystem:
    """Open a URL of Azure; no request is sent."""
    place = azure_place(path, options, known_options)
    container = AzureContainer(place, deadline_seconds, Redactor(path, {**options, **place.client}))
    return ObjectFilesystem(path, place.prefix, place.part_nbytes, container, AzureOutput)


class AzureContainer(Bucket):
    """One container of an account."""

    def __init__(self, place: Place, deadline_seconds: float, redact: Redactor) -> None:
        super().__init__(fsspec.asyn.get_loop(), deadline_seconds, redact=redact)
        self._place, self.redact = place, redact
        self._store = self._made(0)
        self.uploading = self._made(_MANY)  # repeats what fails in passing

    def _made(self, max_retries: int) -> Any:
        place, seconds = self._place, min(REQUEST_SECONDS, self.deadline_seconds * _REQUEST_SHARE)
        options: Any = {
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, seconds)),
            "allow_http": self._server().startswith("http://"),
        }
        # the last attempt may begin when this is over, and takes its own time
        ends = timedelta(seconds=self.deadline_seconds - seconds)
        retry: Any = {"max_retries": max_retries, "retry_timeout": ends, "backoff": _BACKOFF}
        config: Any = dict(place.client)
        return _obstore().store.AzureStore(place.bucket, config=config, client_options=options, retry_config=retry)

    def _server(self) -> str:
        return str(self._place.client.get("endpoint") or "Azure")

    async def _ask(self, request: Callable[[ModuleType], Awaitable[T]]) -> T:
        try:
            return await request(_obstore())
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise failure_of(error) from error

    async def head(self, key: str) -> Found | None:
        found = await if_there(self._ask(lambda obstore: obstore.head_async(self._store, key)), None)
        return None if found is None else _found(found)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        async def request(obstore: ModuleType) -> tuple[bytes, int]:
            reply = await obstore.get_async(self._store, key, options={} if stop is None else {"range": (start, stop)})
            return bytes(await reply.bytes_async()), reply.meta["size"]

        data, nbytes = await self._ask(request)
        expected = (nbytes if stop is None else min(stop, nbytes)) - start
        if len(data) < expected:
            raise NoAnswerError(f"the reply ended after {len(data)} of {expected} bytes")
        return data

    async def put(self, key: str, data: bytes) -> None:
        await self._put(key, data, "overwrite")

    async def put_over(self, key: str, data: bytes, version: str | None) -> None:
        await self._put(key, data, "create" if version is None else {"e_tag": version})

    async def _put(self, key: str, data: bytes, mode: Any) -> None:
        await self._ask(lambda obstore: obstore.put_async(self._store, key, data, mode=mode, use_multipart=False))

    async def delete(self, key: str) -> None:
        await if_there(self._ask(lambda obstore: obstore.delete_async(self._store, key)), None)

    def list(self, where: str, root: str, *, deep: bool) -> tuple[list[Found], list[str]]:
        async def request(obstore: ModuleType) -> tuple[list[Any], list[str]]:
            if deep:
                return await obstore.list(self._store, root or None).collect_async(), []
            found = await obstore.list_with_delimiter_async(self._store, root or None)
            return found["objects"], found["common_prefixes"]

        found, folders = self.call("list", where, lambda: if_there(self._ask(request), ([], [])))
        return [_found(one) for one in found], [str(one) for one in folders]

    def storage_error(self, what: str, where: str, error: Exception) -> StorageError:
        """Return what an upload raises for an error of obstore's."""
        failure = failure_of(error)
        found = StorageError.from_os_error(what, where, failure, redact=self._redact)
        found.outcome_unknown = self.may_be_done(failure)
        if found.errno is None and not self._is_answer(failure):
            found.errno = errno.ETIMEDOUT
        return found


def _found(found: Any) -> Found:
    return Found(found["path"], int(found["size"]), found["last_modified"].timestamp(), str(found["e_tag"]))


def failure_of(error: Exception) -> Exception:
    """Return our error for one of obstore's."""
    words, _, _ = str(error).partition(_DUMP)
    match = _STATUS.search(words)
    if any(some in words for some in _BEYOND):
        status = BEYOND_END
    elif match is not None:
        status = int(match[1] or match[2])
    else:
        status = next((_REFUSALS[base.__name__] for base in type(error).__mro__ if base.__name__ in _REFUSALS), 0)
    words = f"{type(error).__name__}: {words}"
    return AnswerError(status, words) if status else NoAnswerError(words)


class AzureOutput(PartedOutput):
    """A new blob: blocks, which become one when it is closed."""

    def __init__(self, container: AzureContainer, key: str, where: str, part_nbytes: int, *, replaces: bool) -> None:
        super().__init__(where, part_nbytes, replaces=replaces)
        self._container, self._key = container, key
        self._writer: Any = None
        self._nbytes = 0

    def _send_part(self) -> None:
        with self._errors("write") as obstore:
            if self._writer is None:
                self._writer = obstore.open_writer(
                    self._container.uploading, self._key, buffer_size=self._part_nbytes, max_concurrency=_AT_ONCE
                )
            part = self._take_part()  # it is sent after `write` returned
            self._writer.write(part)
            self._nbytes += len(part)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[ModuleType]:
        obstore = _obstore()
        try:
            yield obstore
        except MemoryError:
            raise
        except Exception as error:
            raise self._container.storage_error(what, self._where, error) from self._container.redact.error(error)

    def _finish(self) -> None:
        self._may_exist = True
        if self._writer is None:
            data = self._take_part()
            self._container.call("write", self._where, lambda: self._container.put(self._key, data))
            return
        if self._part.tell():
            self._send_part()
        try:
            with self._errors("complete"):
                self._writer.close()
        except StorageError as error:
            # a commit whose answer was lost is refused when repeated
            if error.errno == errno.EACCES or self._replaces or not self._is_complete():
                raise
        self._writer = None

    def _is_complete(self) -> bool:
        try:
            found = self._afterwards("look up", self._container.head)
        except StorageError:
            return False
        return found is not None and found.nbytes == self._nbytes

    def _afterwards(self, what: str, request: Callable[[str], Awaitable[T]]) -> T:
        seconds = min(self._container.removal_seconds, self._container.deadline_seconds * _AFTERWARDS_SHARE)
        return self._container.call(what, self._where, lambda: request(self._key), deadline_seconds=seconds)

    def _discard(self) -> None:
        self._writer = None  # dropped: what was sent is never committed
        if self._may_exist and not self._replaces:
            self._clean_up(lambda: self._afterwards("remove", self._container.delete))

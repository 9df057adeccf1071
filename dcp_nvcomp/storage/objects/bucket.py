"""A bucket: the requests that all object stores have, and a checkpoint's directory in one."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.storage.attempts import Attempts
from dcp_nvcomp.storage.base import FileInfo, OutputStream, RecursiveListing, clock_name, too_short
from dcp_nvcomp.storage.conditional import Target, publish
from dcp_nvcomp.storage.remote import RemoteFilesystem

T = TypeVar("T")

CONNECT_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 30.0
BEYOND_END: Final = 416  # the range has not a byte of the object
_BUSY: Final = 429  # too many requests: this one was certainly not carried out
_FINAL_STATUSES: Final = (501, 505)  # not implemented, unknown HTTP version
_ERRNO: Final = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    409: errno.EEXIST,
    410: errno.ENOENT,
    412: errno.EEXIST,
}


class AnswerError(Exception):
    """The server refused a request."""

    def __init__(self, status: int, words: str, *, garbled: bool = False) -> None:
        super().__init__(words)
        self.errno, self.response = _ERRNO.get(status), status
        is_passing = status in (408, _BUSY) or (status >= 500 and status not in _FINAL_STATUSES)
        self.transient = garbled or is_passing


class NoAnswerError(Exception):
    """There was no answer, or only a part of one."""

    def __init__(self, words: str, *, transient: bool = True) -> None:
        super().__init__(words)
        self.transient = transient


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status of the answer that caused an error; 0 if there was none."""
    while error is not None:
        status = getattr(error, "response", None)
        if isinstance(status, dict):  # botocore's
            return int(status.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if isinstance(status, int):
            return status
        error = error.__cause__
    return 0


async def if_there(request: Awaitable[T], otherwise: T) -> T:
    """Return what a request returns, or `otherwise` if what it asks for is not there."""
    try:
        return await request
    except Exception as error:
        if status_of(error) != 404:
            raise
    return otherwise


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and how to get there."""

    bucket: str  # name of the bucket or container
    prefix: str
    part_nbytes: int  # how long the parts of an upload are
    client: Mapping[str, Any]  # settings of the client; they hold secrets


class Found(NamedTuple):
    """An object: its name in the bucket, length, time of writing, and what a condition calls this version of it."""

    key: str
    nbytes: int
    modified_seconds: float
    version: str


class Bucket(Attempts):
    """One bucket or container. What is asynchronous is one attempt, for `call`."""

    _stays_in_process = True

    def call(self, what: str, where: str, attempt: Callable[[], Awaitable[T]], **limits: Any) -> T:
        return self.perform(what, where, attempt, **limits).value

    def remove(self, key: str, where: str) -> None:
        """Remove an object, if it exists; a leftover does no harm, so this has less time than other requests."""
        self.call("remove", where, lambda: self.delete(key), deadline_seconds=self.removal_seconds)

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, AnswerError | NoAnswerError):
            return error.transient
        return isinstance(error, TimeoutError)

    def may_be_done(self, error: Exception) -> bool:
        return self._is_transient(error) and status_of(error) != _BUSY

    def _is_answer(self, error: Exception) -> bool:
        return isinstance(error, AnswerError)

    @abstractmethod
    async def head(self, key: str) -> Found | None:
        """Return what the server knows of an object; None if there is no such object."""

    @abstractmethod
    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return an object's bytes from `start` to `stop`, cut off at its end."""

    @abstractmethod
    async def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever is there."""

    @abstractmethod
    async def put_over(self, key: str, data: bytes, version: str | None) -> None:
        """Write an object if this is its version; None: if there is none."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove an object, if it exists."""

    @abstractmethod
    def list(self, where: str, root: str, *, deep: bool) -> tuple[list[Found], list[str]]:
        """Return the objects and the folders below a folder of the bucket; `deep`: at any depth, without folders."""


class BucketTarget(Target):
    """An object as conditional.py publishes it."""

    def __init__(self, bucket: Bucket, key: str, where: str) -> None:
        self.where = where
        self._bucket, self._key = bucket, key

    async def version(self) -> str | None:
        found = await self._bucket.head(self._key)
        return None if found is None else found.version

    async def read(self) -> bytes | None:
        return await if_there(self._bucket.get(self._key), None)

    async def write(self, data: bytes, before: str | None, form: str | None) -> None:
        await self._bucket.put_over(self._key, data, before)

    def is_refusal(self, error: Exception) -> bool:
        return status_of(error) in (409, 412)


class ObjectFilesystem(RemoteFilesystem):
    """A checkpoint's directory in a bucket or container: objects below a prefix."""

    def __init__(
        self, path: str, prefix: str, part_nbytes: int, bucket: Bucket, output: Callable[..., OutputStream]
    ) -> None:
        super().__init__(path, prefix, part_nbytes, {})
        self._bucket, self._output = bucket, output

        self._prefix = f"{self._root}/" if self._root else ""

    def create_directory(self) -> None:
        pass  # there are none

    def open_output(self, name: str) -> OutputStream:
        return self._output(self._bucket, self._key(name), self.location(name), self._part_nbytes, replaces=False)

    def open_replacement(self, name: str) -> OutputStream:
        return self._output(self._bucket, self._key(name), self.location(name), self._part_nbytes, replaces=True)

    def publish(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        target = BucketTarget(self._bucket, self._key(name), self.location(name))
        publish(self._bucket, target, data, overwrite=overwrite)

    def _get(self, name: str, start: int, stop: int) -> bytes:
        key, where = self._key(name), self.location(name)
        try:
            return self._bucket.call("read", where, lambda: self._bucket.get(key, start, stop))
        except StorageError as error:
            nbytes = self.file_nbytes(name) if status_of(error) == BEYOND_END else None
            if nbytes is not None and nbytes <= start:
                raise too_short(where, start, stop, nbytes) from error
            raise

    def file_nbytes(self, name: str) -> int | None:
        key = self._key(name)
        found = self._bucket.call("look up", self.location(name), lambda: self._bucket.head(key))
        return None if found is None else found.nbytes

    def list_files(self) -> list[FileInfo]:
        return sorted(self._files(deep=False), key=lambda file: file.name)

    def list_folders(self) -> list[str]:
        _, folders = self._bucket.list(self.path, self._root, deep=False)
        return sorted(self._name(folder).rstrip("/") for folder in folders)

    def list_below(self) -> RecursiveListing:
        return RecursiveListing(self._files(deep=True), [], {})

    def _files(self, *, deep: bool) -> list[FileInfo]:
        found, _ = self._bucket.list(self.path, self._root, deep=deep)
        named = [(self._name(one.key), one) for one in found]
        # what web consoles make for a "folder" is no file
        return [FileInfo(name, one.nbytes, one.modified_seconds) for name, one in named if name and name[-1] != "/"]

    def _name(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def now_seconds(self) -> float:
        key, bucket = self._key(clock_name()), self._bucket

        async def attempt() -> Found:
            await bucket.put(key, b"")
            found = await bucket.head(key)
            if found is None:
                raise NoAnswerError("an object that was just written is not there")
            return found

        try:
            return bucket.call("ask for the time", self.path, attempt).modified_seconds
        finally:
            bucket.remove(key, self.path)

    def _remove(self, name: str) -> None:
        self._bucket.call("remove", self.location(name), lambda: self._bucket.delete(self._key(name)))

"""Requests to Azure with a time limit: each returns what was asked for, or raises an error of ours.

obstore (Rust's object_store) retries what fails in passing, and is told for how long. Only what publishes is sent once
at a time: a repeated conditional write is refused because of its own first attempt, and only we can look whose it was.
"""

from __future__ import annotations

import contextlib
import errno
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any, Final, TypeVar

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.azure.library import library
from dcp_nvcomp.storage.azure.options import AzurePlace
from dcp_nvcomp.storage.replacement import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS

T = TypeVar("T")

_CONNECT_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 30.0
_HASTY_SECONDS: Final = 10.0
_REQUEST_SHARE: Final = 1 / 3  # of the deadline, for one request: a silent server leaves time to ask again
_MANY: Final = 1000
_BACKOFF: Final = {
    "init_backoff": timedelta(seconds=FIRST_PAUSE_SECONDS),
    "max_backoff": timedelta(seconds=LONGEST_PAUSE_SECONDS),
    "base": 2,
}

# Classes of obstore's errors that are no OSError, by name, and the errno that says the same.
_ERRNO: Final = {
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "NotModifiedError": errno.EEXIST,
    "NotSupportedError": errno.ENOTSUP,
    "NotImplementedError": errno.ENOTSUP,
    "InvalidPathError": errno.EINVAL,
    "UnknownConfigurationKeyError": errno.EINVAL,
}
# Some requests, such as lists, have a class for everything; their words have the status. So has what follows them: a
# dump of the error's insides, which nobody needs.
_STATUS: Final = re.compile(r"status code: (\d{3})")
# What obstore says, without a status, of a range that begins at the end or behind it; and of the one of an empty blob,
# which Azurite answers with a range that nobody can read.
_BEYOND: Final = ("Wanted range starting at", "parse value for CONTENT_RANGE")
_BEYOND_STATUS: Final = 416
_DUMP: Final = "\n\nDebug source:"
_REFUSED: Final = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT}
_TRANSIENT: Final = (408, 429)


class AzureClient:
    """One container of an account.

    Attributes:
        deadline_seconds: how long one operation may take.
        redact: hides secrets in what the client says.
    """

    def __init__(self, place: AzurePlace, deadline_seconds: float, redact: Redactor) -> None:
        self.deadline_seconds, self.redact = deadline_seconds, redact
        self._place = place
        self._stores: dict[tuple[ModuleType, int], Any] = {}  # a forked child has another library
        for max_retries in (_MANY, 0):  # what can't work is told here
            self._kept(max_retries)

    @property
    def store(self) -> Any:
        """Sends requests, again if they fail in passing."""
        return self._kept(_MANY)

    @property
    def store_once(self) -> Any:
        """Sends each request once."""
        return self._kept(0)

    def hasty_store(self) -> Any:
        """Return one that gives up early: for a look at what went wrong, and for leftovers, which do no harm."""
        return self._made(_MANY, min(_HASTY_SECONDS, self.deadline_seconds))

    def _kept(self, max_retries: int) -> Any:
        key = library(), max_retries
        found = self._stores.get(key)
        if found is None:
            found = self._stores.setdefault(key, self._made(max_retries, self.deadline_seconds))
        return found

    def _made(self, max_retries: int, seconds: float) -> Any:
        place, request_seconds = self._place, min(_REQUEST_SECONDS, seconds * _REQUEST_SHARE)
        options: Any = {
            "timeout": timedelta(seconds=request_seconds),
            "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, request_seconds)),
            "allow_http": str(place.config.get("endpoint", "")).startswith("http://"),
        }
        retry: Any = {
            "max_retries": max_retries,
            # the last attempt may begin when this is over, and takes its own time
            "retry_timeout": timedelta(seconds=seconds - request_seconds),
            "backoff": _BACKOFF,
        }
        config: Any = dict(place.config)
        return library().store.AzureStore(place.container, config=config, client_options=options, retry_config=retry)

    @contextlib.contextmanager
    def errors(self, what: str, where: str, *, may_be_done: bool = False) -> Iterator[None]:
        """Turn what obstore raises while it tries to do `what` into StorageError."""
        try:
            yield
        except (CheckpointError, MemoryError, AssertionError):
            raise
        except Exception as error:
            words, _, _ = str(error).partition(_DUMP)
            failure = StorageError.from_os_error(what, where, type(error)(words), redact=self.redact)
            failure.errno = failure.errno or _errno_of(error)
            failure.outcome_unknown = may_be_done and failure.errno == errno.ETIMEDOUT
            raise failure from self.redact.error(error)

    def call(self, what: str, where: str, request: Callable[[Any], T]) -> T:
        """Return what a request returns, one that may be sent twice.

        obstore repeats what got no answer, but not all answers whose bodies are cut off.
        """
        began, pause, store = time.monotonic(), FIRST_PAUSE_SECONDS, self.store
        while True:
            try:
                with self.errors(what, where):
                    return request(store)
            except StorageError as error:
                took = time.monotonic() - began + pause
                if error.errno != errno.ETIMEDOUT or took >= self.deadline_seconds * _REQUEST_SHARE:
                    raise
            store = self._made(_MANY, self.deadline_seconds - took)  # the new attempt ends in time, too
            time.sleep(pause * random.uniform(0.5, 1))  # so that ranks do not come back all at once
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def may_be_beyond_end(error: Exception) -> bool:
    """True if obstore's error may come from a range that begins at the end of a file, or behind it."""
    words, _, _ = str(error).partition(_DUMP)
    status = _STATUS.search(words)
    return (status is not None and int(status[1]) == _BEYOND_STATUS) or any(some in words for some in _BEYOND)


def _errno_of(error: BaseException) -> int:
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    known = next((_ERRNO[base.__name__] for base in type(error).__mro__ if base.__name__ in _ERRNO), None)
    status = _STATUS.search(str(error))
    if known is None and status is not None and status[1].startswith("4") and int(status[1]) not in _TRANSIENT:
        known = _REFUSED.get(int(status[1]), errno.EINVAL)
    return errno.ETIMEDOUT if known is None else known

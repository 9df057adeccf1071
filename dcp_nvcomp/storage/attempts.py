"""The loop that repeats requests until one succeeds, is refused for good, or time is up.

It runs on fsspec's event loop. The clients of the object stores would retry too, but nested in ours their attempts
would multiply, and none knows a deadline. So they are told to try once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.base import completed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPT_SHARE = 1 / 3  # of the deadline, for one attempt: a silent server leaves time to ask again
_LAST_SHARE = 1 / 20  # of the deadline, that must be left: an attempt that is cut off has an unknown outcome
_REMOVAL_SECONDS = 10.0  # leftovers do no harm: do not wait for another whole deadline after a failure
_QUIET_SECONDS = 10.0  # after that, retrying is worth a warning


@dataclass(frozen=True)
class Done(Generic[T]):
    """The response to a request, and how often it was sent."""

    value: T
    attempts: int


class _CutOffError(TimeoutError):
    """The end of the deadline came before the attempt's own."""


class Attempts(ABC):
    """Sends requests on an event loop, and retries what is transient until the deadline."""

    _stays_in_process = False  # whether a forked child must make one of its own
    _first_pause_seconds, _longest_pause_seconds = 0.1, 5.0

    def __init__(self, loop: asyncio.AbstractEventLoop, deadline_seconds: float, *, redact: Redactor) -> None:
        self._loop, self._pid = loop, os.getpid()
        self._redact = redact
        self.deadline_seconds = deadline_seconds
        self.removal_seconds = min(_REMOVAL_SECONDS, deadline_seconds)

    @abstractmethod
    def _is_transient(self, error: Exception) -> bool:
        """True if the same request may succeed a moment later."""

    @abstractmethod
    def _is_answer(self, error: Exception) -> bool:
        """True if the error is what the server answered."""

    @abstractmethod
    def _server(self) -> str:
        """The server's address, for messages."""

    def may_be_done(self, error: Exception) -> bool:
        """True if a request that failed like this may have been carried out, or may still be."""
        return self._is_transient(error)

    def perform(
        self, what: str, where: str, attempt: Callable[[], Awaitable[T]], *, deadline_seconds: float | None = None
    ) -> Done[T]:
        """Run attempts until one succeeds, is refused for good, or time is up; a CheckpointError ends it too."""
        # there is no thread of the loop in a forked child: it would wait for ever
        if self._stays_in_process and os.getpid() != self._pid:
            raise ConfigurationError(
                "The storage was opened by the process that this one was forked from. Open it again in this one.",
                path=where,
            )
        seconds = self.deadline_seconds if deadline_seconds is None else deadline_seconds
        running = self._perform(what, where, attempt, seconds)
        future = asyncio.run_coroutine_threadsafe(running, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # when the wait was interrupted: the request ends with it
            raise

    async def _perform(self, what: str, where: str, attempt: Callable[[], Awaitable[T]], seconds: float) -> Done[T]:
        began = time.monotonic()
        attempts, may_be_done, warned = 0, False, False
        reason: Exception | None = None
        while True:
            attempts += 1
            try:
                return Done(await self._attempt(attempt, began + seconds, seconds * _ATTEMPT_SHARE), attempts)
            except CheckpointError:
                raise
            except Exception as error:
                # what an earlier attempt met says more than that the time was up
                reason = reason if reason is not None and isinstance(error, _CutOffError) else error
                took = time.monotonic() - began
                pause = min(self._first_pause_seconds * 2 ** min(attempts - 1, 10), self._longest_pause_seconds)
                pause *= random.uniform(0.5, 1)  # so that ranks do not come back all at once
                may_be_done |= self.may_be_done(error)
                if not self._is_transient(error) or took + pause >= seconds * (1 - _LAST_SHARE):
                    failure = self._failure(what, where, reason, attempts, took, may_be_done)
                    if isinstance(error, _CutOffError):
                        failure.errno = errno.ETIMEDOUT  # whatever the words are, the last may have been done
                    raise failure from self._redact.error(error)
                words = self._redact(str(error))
                logger.info("Could not %s %s, trying again: %s", what, where, words)
                if took > _QUIET_SECONDS and not warned:
                    warned = True
                    logger.warning("Still trying to %s %s after %.0f s: %s", what, where, took, words)
            await asyncio.sleep(pause)

    async def _attempt(self, attempt: Callable[[], Awaitable[T]], end: float, longest_seconds: float) -> T:
        began = time.monotonic()
        limit = max(0.0, min(longest_seconds, end - began))
        try:
            return await asyncio.wait_for(attempt(), limit)
        except asyncio.TimeoutError as error:
            if time.monotonic() - began < limit:  # the attempt's own: a socket's
                raise
            kind = _CutOffError if limit < longest_seconds else TimeoutError
            raise kind(errno.ETIMEDOUT, f"no answer from {self._server()} within {limit:.1f} s") from error

    def _failure(
        self, what: str, where: str, error: Exception, attempts: int, took: float, may_be_done: bool
    ) -> StorageError:
        tried = f", after {attempts} attempts in {took:.0f} s" if attempts > 1 else ""
        failure = StorageError.from_os_error(what, where, completed(error), tried, redact=self._redact)
        if failure.errno is None and not self._is_answer(error):
            failure.errno = errno.ETIMEDOUT if may_be_done else None
        failure.attempts = attempts
        failure.outcome_unknown = may_be_done
        return failure

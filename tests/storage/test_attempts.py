"""Requests that are repeated until one succeeds, is refused for good, or time is up."""

from __future__ import annotations

import asyncio
import errno
import time

import fsspec.asyn
import pytest

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.redaction import Redactor
from dcp_nvcomp.storage.attempts import Attempts


class Client(Attempts):
    _first_pause_seconds = _longest_pause_seconds = 0.05

    def _is_transient(self, error: Exception) -> bool:
        return True

    def _is_answer(self, error: Exception) -> bool:
        return False

    def _server(self) -> str:
        return "server:1"

    def may_be_done(self, error: Exception) -> bool:
        return getattr(error, "errno", None) == errno.ETIMEDOUT


def client(deadline_seconds: float) -> Client:
    return Client(fsspec.asyn.get_loop(), deadline_seconds, redact=Redactor("memory://x", {}))


def test_an_attempt_that_is_cut_off_does_not_hide_why_the_earlier_ones_failed() -> None:
    began = time.monotonic()

    async def attempt() -> None:
        if time.monotonic() - began > 0.7:  # less than an attempt's share is left
            await asyncio.sleep(60)
        raise OSError(errno.EBUSY, "held open")

    with pytest.raises(StorageError, match="held open") as caught:
        client(1.0).perform("write", "a", attempt)
    assert caught.value.outcome_unknown and caught.value.errno == errno.ETIMEDOUT  # of the last attempt
    assert caught.value.attempts > 1 and time.monotonic() - began < 3


def test_silence_is_the_reason_where_an_attempt_had_its_whole_time() -> None:
    attempts = []

    async def attempt() -> None:
        attempts.append(1)
        if len(attempts) > 1:
            await asyncio.sleep(60)
        raise OSError(errno.EBUSY, "held open")

    with pytest.raises(StorageError, match="no answer from server:1 within 0.3 s"):
        client(1.0).perform("write", "a", attempt)
    assert len(attempts) > 1


def test_no_attempt_begins_when_time_is_up() -> None:
    async def attempt() -> None:
        time.sleep(0.94)  # not the loop's: it would be cut off
        raise OSError(errno.EBUSY, "held open")

    with pytest.raises(StorageError, match="held open") as caught:
        client(1.0).perform("write", "a", attempt)
    assert caught.value.attempts == 1 and not caught.value.outcome_unknown


def test_a_timeout_of_the_attempts_own_is_told_as_it_is() -> None:
    began = time.monotonic()

    async def attempt() -> None:
        if time.monotonic() - began > 0.7:
            raise TimeoutError(errno.ETIMEDOUT, "the socket's")
        raise OSError(errno.EBUSY, "held open")

    with pytest.raises(StorageError, match="the socket's"):
        client(1.0).perform("write", "a", attempt)

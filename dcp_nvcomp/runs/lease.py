"""The lease: one manager writes to a run, and a second one is refused.

    .run/lease-<number>     who holds it (`Holder`); created once, and renewed by its holder alone

Of several files the highest number counts. A manager that finds none, or one that it may take over, creates the next
number: `publish(overwrite=False)` lets one of two succeed. It may take over what the same job holds (`run_id`),
anything with `take_over=True`, and what is dead: not renewed for `lease_seconds` by the storage's clock, and then not
for half of that while this manager watches it by its own clock. A lease from the future, or on a storage that stamps no
times, is watched for all of `lease_seconds`. So no clock that was set gives a living run away, or keeps a new one out.

A holder that finds a higher number, or another lease under its own, has lost the run: the next call of its manager
raises. Until it looks (a third of `lease_seconds`) two may write, which mixes no checkpoints (docs/reliability.md).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import CheckpointError, ConcurrentSaveError, FormatError, RunInUseError, UnsafePathError
from dcp_nvcomp.format.metadata.roots import is_missing
from dcp_nvcomp.redaction import printable
from dcp_nvcomp.storage.base import FileInfo, Filesystem

logger = logging.getLogger(__name__)

# A dead holder of a longer lease would keep its successor waiting for longer than anyone watches.
LONGEST_SECONDS: Final = 3600.0
_USUAL_SECONDS: Final = 60.0
_MOST_SHOWN: Final = 200
_NAME: Final = re.compile(r"lease-([0-9]{6,12})")
_LAST_NUMBER: Final = 10**12 - 1  # no manager gets there: a lease a second for 30,000 years
_MOST_NBYTES: Final = 1 << 16
_ATTEMPTS: Final = 5
_FUTURE_SECONDS: Final = 5.0  # by so much a file may seem to be newer than the clock that stamped it
_LONGEST_PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Holder:
    id: str  # of this lease
    run_id: str = ""  # of the job; empty if it has none
    host: str = "?"  # where the job's first rank is
    pid: str = "?"  # its process there
    lease_seconds: float = _USUAL_SECONDS  # how long the lease lasts without being renewed
    renewed: int = 0  # how often it was
    is_released: bool = False  # True if it was given back

    @staticmethod
    def here(run_id: str | None, lease_seconds: float) -> Holder:
        return Holder(uuid.uuid4().hex, run_id or "", socket.gethostname(), str(os.getpid()), lease_seconds)

    @staticmethod
    def of(data: bytes) -> Holder | None:
        try:
            values = parse_json(data)
        except ValueError:
            return None
        if not isinstance(values, dict) or not isinstance(values.get("id"), str):
            return None
        run_id, host, pid, renewed = (values.get(name) for name in ("run_id", "host", "pid", "renewed"))
        return Holder(
            values["id"],
            run_id if isinstance(run_id, str) else "",
            str(host)[:_MOST_SHOWN],
            str(pid)[:_MOST_SHOWN],
            _seconds(values.get("lease_seconds")),
            renewed if type(renewed) is int else 0,
            values.get("released") is True,
        )

    def to_data(self) -> bytes:
        values: dict[str, Any] = {
            "run_id": self.run_id or None,
            "host": self.host,
            "pid": int(self.pid) if self.pid.isdecimal() else self.pid,
            "lease_seconds": self.lease_seconds,
            "id": self.id,
            "renewed": self.renewed,
        }
        if self.is_released:
            values["released"] = True
        return json.dumps(values).encode()

    def lets_go_for(self, run_id: str | None) -> bool:
        """Return whether a job may take over at once: the lease was given back, or is the same job's."""
        return self.is_released or (bool(run_id) and self.run_id == run_id)

    def __str__(self) -> str:
        job = f"job {self.run_id[:_MOST_SHOWN]!r}, " if self.run_id else ""
        return printable(f"{job}process {self.pid} on {self.host}")


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or value <= 0:
        return _USUAL_SECONDS
    return float(min(value, LONGEST_SECONDS))


# It can't be read, by this user or at all; its holder may live.
_UNREADABLE: Final = Holder("", host="an unknown host (its file can't be read)")


class Lease:
    """A held lease; made by `Lease.take`."""

    def __init__(self, open_own: Callable[[], Filesystem], number: int, holder: Holder) -> None:
        self._open_own, self.number, self._holder = open_own, number, holder
        self._over = threading.Event()
        self._lost: RunInUseError | None = None
        # a daemon: a process that ends without `release` is a dead holder
        self._thread = threading.Thread(target=self._renew_until_over, name="dcp-run-lease", daemon=True)
        self._thread.start()

    @staticmethod
    def take(open_own: Callable[[], Filesystem], *, run_id: str | None, lease_seconds: float, take_over: bool) -> Lease:
        """Take the lease of a run; may watch for a while whether another one's is renewed."""
        holder = Holder.here(run_id, min(lease_seconds, LONGEST_SECONDS))
        own = open_own()
        own.refuse_link()
        own.create_directory()
        passed = 0  # a number whose name something has that is no file
        for _ in range(_ATTEMPTS):
            held = _leases(own)
            newest = max(held, default=0)
            if held and not take_over:
                _await_free(own, run_id, holder.lease_seconds)
            if newest == _LAST_NUMBER:  # nothing can come after it
                own.remove([held[newest].name])
                continue
            number = max(newest, passed) + 1
            try:
                own.publish(_name_of(number), holder.to_data(), overwrite=False)
            except ConcurrentSaveError:  # someone was quicker: see who
                if not _is_file(own, _name_of(number)):
                    passed = number
                continue
            # the one before stays: a listing of a directory that changes may miss what comes, and must not find nothing
            own.remove(file.name for number, file in held.items() if number < newest)
            return Lease(open_own, number, holder)
        raise RunInUseError("Several managers are after the lease of this run at once.", path=own.path)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        own = self._open_own()
        if self._lost is None and self._other(own) is None:
            # not removed: numbers only grow, so that no manager takes another one's lease for its own
            released = dataclasses.replace(self._holder, is_released=True)
            own.publish(_name_of(self.number), released.to_data())

    def _other(self, own: Filesystem) -> str | None:
        """Return who holds the run if this one does not any more."""
        held = _leases(own)
        for number in sorted((number for number in held if number >= self.number), reverse=True):
            holder = _read(own, held[number].name)
            if holder is not None and holder.id != self._holder.id:
                return str(holder)
        # a listing of a directory that changes may miss what is there
        if self.number in held or _is_file(own, _name_of(self.number)):
            return None
        return "its lease was removed"

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._holder.lease_seconds / 3):
            try:
                self._renew()
            except CheckpointError:  # the storage may be back at the next attempt; if not, saves fail too
                continue
            if self._lost is not None:
                return

    def _renew(self) -> None:
        own = self._open_own()
        other = self._other(own)
        if other is not None:
            self._lost = RunInUseError(
                f"Another manager has taken this run over ({other}): this one must not write to it any more.",
                path=own.path,
            )
            return
        self._holder = dataclasses.replace(self._holder, renewed=self._holder.renewed + 1)
        own.publish(_name_of(self.number), self._holder.to_data())


def _name_of(number: int) -> str:
    return f"lease-{number:06d}"


def _leases(own: Filesystem) -> dict[int, FileInfo]:
    return {int(match[1]): file for file in own.list_files() if (match := _NAME.fullmatch(file.name))}


def _is_file(own: Filesystem, name: str) -> bool:
    try:
        return own.file_nbytes(name) is not None
    except UnsafePathError:  # a link
        return False


def _read(own: Filesystem, name: str) -> Holder | None:
    try:
        return Holder.of(own.read_all(name, limit_nbytes=_MOST_NBYTES))
    except FormatError:  # far too long
        return None
    except CheckpointError as error:
        if is_missing(error):
            return None
        raise


@dataclass(frozen=True)
class _Sight:
    holder: Holder | None  # who holds it; None if all there is says nothing of a holder
    modified: tuple[tuple[int, float | None], ...]  # when each of the files was written
    modified_seconds: float | None

    @staticmethod
    def of(own: Filesystem) -> _Sight | None:
        """Look; return None if there is no lease at all."""
        held = sorted(_leases(own).items(), reverse=True)
        if not held:
            return None
        modified = tuple((number, file.modified_seconds) for number, file in held)
        for _, file in held:
            try:
                holder = _read(own, file.name)
            except CheckpointError:
                holder = _UNREADABLE
            if holder is not None:
                return _Sight(holder, modified, file.modified_seconds)
        return _Sight(None, modified, held[0][1].modified_seconds)


def _await_free(own: Filesystem, run_id: str | None, lease_seconds: float) -> None:
    first = _Sight.of(own)
    if first is None or (first.holder is not None and first.holder.lets_go_for(run_id)):
        return
    age = None if first.modified_seconds is None else own.now_seconds() - first.modified_seconds
    lasts = lease_seconds if first.holder is None else first.holder.lease_seconds
    has_sane_age = age is not None and age >= -_FUTURE_SECONDS
    if age is not None and has_sane_age and first.holder is not None and age <= lasts:
        raise _in_use(own, first.holder, f"renewed {max(age, 0.0):.0f} s ago", lasts)
    seconds = lasts / 2 if has_sane_age else lasts
    logger.warning(
        "The lease of %s (%s) looks like that of a dead job: it is watched for %.0f s before this one takes over.",
        own.path,
        first.holder or "a file that says nothing of a holder",
        seconds,
    )
    end, pause = time.monotonic() + seconds, min(seconds / 20, _LONGEST_PAUSE_SECONDS)
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        now = _Sight.of(own)
        if now is None or (now.holder is not None and now.holder.lets_go_for(run_id)):
            return
        if now != first:
            raise _in_use(own, now.holder, "renewed while this one watched", lasts)


def _in_use(own: Filesystem, holder: Holder | None, when: str, lasts: float) -> RunInUseError:
    who = "a job that left no name" if holder is None else str(holder)
    return RunInUseError(
        f"Another manager writes to this run ({who}, {when}). It is free if that is not renewed for {lasts:.0f} s. "
        "If that one is dead, pass take_over=True.",
        path=own.path,
    )

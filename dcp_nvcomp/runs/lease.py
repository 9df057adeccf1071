"""The lease: one manager writes to a run, and a second one is told who it is.

    .run/lease-<number>     who holds it; created once and never replaced by anyone else, renewed by its holder

Of several files the highest number counts. A manager that finds none, or one that it may take over, creates the next
number: `publish(overwrite=False)` lets one of two succeed. It may take over

- what has not been renewed for `lease_seconds`, by the storage's clock: its holder is dead, or cut off;
- what the same job holds (`run_id`): a restarted job need not wait for its dead self;
- anything with `take_over=True`.

A lease that is given back says so, and stays until the next one is there. A holder that finds a higher number, or
another lease under its own, has lost the run: the next call of its manager raises. Until it looks (a third of
`lease_seconds`) two may write. That mixes no checkpoints (docs/reliability.md): of a step that both save, one is there.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from dcp_nvcomp.errors import CheckpointError, ConcurrentSaveError, RunInUseError
from dcp_nvcomp.storage.base import FileInfo, Filesystem

__all__ = ["Lease"]

_NAME = re.compile(r"lease-([0-9]{6,12})")
_MOST_NBYTES = 1 << 16
_ATTEMPTS = 5
_RELEASED = "released"


class Lease:
    """A held lease; made by `Lease.take`.

    Args:
        open_own: opens the run's own directory, `.run`.
        number: of the lease's file.
        holder: what the file says.
        lease_seconds: how long it lasts without being renewed.
    """

    def __init__(
        self, open_own: Callable[[], Filesystem], number: int, holder: Mapping[str, Any], lease_seconds: float
    ) -> None:
        self._open_own, self._number, self._holder = open_own, number, dict(holder)
        self._lease_seconds = lease_seconds
        self._over = threading.Event()
        self._lost: RunInUseError | None = None
        # a daemon: a process that ends without `release` is a dead holder
        self._thread = threading.Thread(target=self._renew_until_over, name="dcp-run-lease", daemon=True)
        self._thread.start()

    @staticmethod
    def take(open_own: Callable[[], Filesystem], *, run_id: str | None, lease_seconds: float, take_over: bool) -> Lease:
        """Take the lease of a run.

        Args:
            open_own: opens the run's own directory, `.run`.
            run_id: of this job, if it has one.
            lease_seconds: how long a lease lasts without being renewed.
            take_over: True to take it from whoever holds it.

        Raises:
            RunInUseError: another job holds it.
            StorageError: the storage fails.
        """
        holder = {
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lease_seconds": lease_seconds,
            "id": uuid.uuid4().hex,
        }
        own = open_own()
        own.create_directory()
        for _ in range(_ATTEMPTS):
            held = _leases(own)
            newest = max(held, default=0)
            if held and not take_over:
                _check_free(own, held[newest], run_id)
            try:
                own.publish(_name_of(newest + 1), json.dumps(holder).encode(), overwrite=False)
            except ConcurrentSaveError:  # someone was quicker: see who
                continue
            # the one before stays: a listing of a directory that changes may miss what comes, and must not find nothing
            own.remove(file.name for number, file in held.items() if number < newest)
            return Lease(open_own, newest + 1, holder, lease_seconds)
        raise RunInUseError("Several managers are after the lease of this run at once.", path=own.path)

    @property
    def number(self) -> int:
        """Its number: that of each later lease of the run is larger."""
        return self._number

    @property
    def is_lost(self) -> bool:
        """True once another manager has taken the run over."""
        return self._lost is not None

    def check(self) -> None:
        """Raise if another manager has taken the run over.

        Raises:
            RunInUseError: it has.
        """
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Give the lease back, so that the next manager need not wait."""
        self._over.set()
        self._thread.join()
        own = self._open_own()
        if self._lost is None and self._is_held(own):
            # not removed: numbers only grow, so that nobody takes another one's lease for its own
            own.publish(_name_of(self._number), json.dumps({**self._holder, _RELEASED: True}).encode())

    def _is_held(self, own: Filesystem) -> bool:
        """Return whether the newest lease is this one."""
        if max(_leases(own), default=0) != self._number:
            return False
        data = own.read_all(_name_of(self._number), limit_nbytes=_MOST_NBYTES)
        try:
            return bool(json.loads(data)["id"] == self._holder["id"])
        except (ValueError, TypeError, KeyError):
            return False

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._lease_seconds / 3):
            try:
                self._renew()
            except CheckpointError:  # the storage may be back at the next attempt; if not, saves fail too
                continue
            if self._lost is not None:
                return

    def _renew(self) -> None:
        own = self._open_own()
        if not self._is_held(own):
            who = _shown(_read(own, _name_of(max(_leases(own), default=0))))
            self._lost = RunInUseError(
                f"Another manager has taken this run over ({who}): this one must not write to it any more.",
                path=own.path,
            )
            return
        own.publish(_name_of(self._number), json.dumps(self._holder).encode())


def _name_of(number: int) -> str:
    return f"lease-{number:06d}"


def _leases(own: Filesystem) -> dict[int, FileInfo]:
    return {int(match[1]): file for file in own.list_files() if (match := _NAME.fullmatch(file.name))}


def _read(own: Filesystem, name: str) -> dict[str, Any]:
    """Return what a lease says; nothing if it is gone or damaged."""
    try:
        values = json.loads(own.read_all(name, limit_nbytes=_MOST_NBYTES))
    except (CheckpointError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _check_free(own: Filesystem, file: FileInfo, run_id: str | None) -> None:
    holder = _read(own, file.name)
    if holder.get(_RELEASED) is True or (run_id is not None and holder.get("run_id") == run_id):
        return
    lasts = holder.get("lease_seconds", 0.0)
    age = None if file.modified_seconds is None else own.now_seconds() - file.modified_seconds
    if age is not None and isinstance(lasts, int | float) and age > lasts:
        return
    when = "" if age is None else f", renewed {max(age, 0.0):.0f} s ago"
    free = "" if age is None else f" It is free if that is not renewed for {lasts:.0f} s."
    raise RunInUseError(
        f"Another manager writes to this run ({_shown(holder)}{when}).{free} If that one is dead, pass take_over=True.",
        path=own.path,
    )


def _shown(holder: Mapping[str, Any]) -> str:
    job = f"job {holder['run_id']!r}, " if holder.get("run_id") else ""
    return f"{job}process {holder.get('pid', '?')} on {holder.get('host', '?')}"

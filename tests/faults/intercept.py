"""Puts itself between a module and what it calls: to count, to fail, to record. The product knows nothing of it.

    intercept_system_calls(monkeypatch.setattr, hook)

Each call of one of the names becomes `hook(name, call, *args, **kwargs)`; everything else is the real thing.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.storage.local import filesystem as posix
from dcp_nvcomp.storage.local import output as posix_output

Hook = Callable[..., Any]

# Every system call that a save or a load makes on a local disk.
POSIX_CALLS = frozenset(
    {
        *("open", "write", "fsync", "close", "rename", "link", "unlink", "makedirs"),
        *("scandir", "readdir", "entry_stat", "pread", "preadv", "stat", "fstat"),
    }
)
# Those that change the disk, and so may find it full.
WRITING = frozenset({"create", "write", "fsync", "makedirs", "link", "rename"})


class Intercepted:
    """A module or object, some of whose functions go through a hook."""

    def __init__(self, target: Any, names: frozenset[str], hook: Hook) -> None:
        self._target, self._names, self._hook = target, names, hook

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._names:
            return found
        return lambda *args, **kwargs: self._hook(name, found, *args, **kwargs)


def intercept_system_calls(
    patch: Callable[[Any, str, Any], None], hook: Hook, names: frozenset[str] = POSIX_CALLS
) -> None:
    """Put a hook between the package and the system calls for files on local disks."""
    for module in (posix, posix_output):
        patch(module, "os", Intercepted(os, names, hook))


class Entries:
    """The result of os.scandir: its iteration may fail as well as a look at an entry."""

    def __init__(self, entries: Any, hook: Hook) -> None:
        self._entries, self._hook = entries, hook

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        while True:
            entry = self._hook("readdir", next, self._entries, None)
            if entry is None:
                return
            stat = frozenset({"stat"})
            yield Intercepted(entry, stat, lambda _, *args, **kwargs: self._hook("entry_stat", *args, **kwargs))


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at: int  # at which call, counted from 0
    number: int = errno.EIO  # the errno; 0 for a read or write that is cut short
    done: bool = False  # whether the call fails though it was carried out, as with a reply that is lost
    lasting: frozenset[str] = frozenset()  # the names of calls that fail from then on too; empty where it happens once


class Counted:
    """A hook that counts the calls, and carries them out."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._lock:
            at = len(self.names)
            self.names.append(name)
        return self.carry_out(at, name, call, *args, **options)

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make one call."""
        return call(*args, **options)


class FaultyCalls(Counted):
    """A hook under which one call fails, or all from one on. Files are not really synced: nothing loses power here."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.fault = fault

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return super().__call__("create" if name == "open" and args[1] & os.O_CREAT else name, call, *args, **options)

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fault = self.fault
        hit = fault is not None and (at == fault.at or (at > fault.at and name in fault.lasting))
        if not hit:
            return self._carry_out(name, call, *args, **kwargs)
        assert fault is not None
        if not fault.number:
            return self._carry_out(name, *_cut_short(name, call, *args), **kwargs)
        if name == "close" or (fault.done and name in ("rename", "link", "unlink", "makedirs", "write")):
            call(*args, **kwargs)  # Linux closes a descriptor also where close reports an error
        raise OSError(fault.number, os.strerror(fault.number))

    def _carry_out(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "fsync":
            return None
        result = call(*args, **kwargs)
        return Entries(result, self) if name == "scandir" else result


def _cut_short(name: str, call: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """The call with a third of what was asked for, but something."""
    if name == "write":
        return call, args[0], args[1][: max(1, len(args[1]) // 3)]
    if name == "pread":
        return call, args[0], max(1, args[1] // 3), args[2]
    if name == "preadv":
        return call, args[0], [args[1][0][: max(1, len(args[1][0]) // 3)]], args[2]
    return call, *args

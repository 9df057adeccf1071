"""The contents that a disk may have after a power loss, by what POSIX promises and no more.

`Recorder` is a hook for `Intercepted`: it carries the calls out and keeps the trace. `crash_states` gives, for a prefix
of the trace, the trees that may be found after a power loss at that moment:

    file data      is certain up to the last fsync of the file. What was written later may be lost, zero, or torn: there
                   up to some block, or with a hole of zeros in it
    names          a directory's entries are certain as of its last fsync. Each later change (create, rename, link,
                   unlink, mkdir) may be there or not, whatever became of the others; a rename is one change

Real file systems are kinder, each in another way.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_NBYTES = 512
# From so many pending changes of names on, not every subset of them is tried: all but one, and one alone, instead.
MAX_SUBSETS_OF = 6

# The names of files, relative to the disk's root, and their bytes; None is a directory.
Tree = dict[str, bytes | None]


def read_tree(root: Path) -> Tree:
    found: Tree = {}
    for entry in sorted(root.rglob("*")):
        found[str(entry.relative_to(root))] = entry.read_bytes() if entry.is_file() else None
    return found


def make_tree(root: Path, tree: Tree) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


@dataclass(frozen=True)
class Step:
    """One call: `create`, `write`, `fsync`, `mkdir`, `rename`, `link` or `unlink`, by paths below the root."""

    name: str
    path: str
    target: str = ""
    data: bytes = b""  # of a write, what was written; a file is written front to back


class Recorder:
    """A hook that carries calls out and records those that change the disk."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.steps: list[Step] = []
        self._open: dict[int, str] = {}
        self._lock = threading.Lock()

    def _inside(self, path: Any) -> str:
        relative = os.path.relpath(path, self._root)
        assert not relative.startswith(".."), f"{path} is not on the disk that is recorded"
        return relative

    def _sync(self, path: str) -> None:
        if path == self._root or path.startswith(f"{self._root}/"):  # directories above it are there for good
            self.steps.append(Step("fsync", self._inside(path)))

    def _make(self, path: str) -> None:
        if path != self._root and not os.path.isdir(path):
            self._make(os.path.dirname(path))
            self.steps.append(Step("mkdir", self._inside(path)))

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if name == "fsync":
                self._sync(os.readlink(f"/proc/self/fd/{args[0]}"))
                return None
            if name == "makedirs":
                self._make(args[0])
            result = call(*args, **kwargs)
            if name == "open" and args[1] & os.O_CREAT:
                self._open[result] = self._inside(args[0])
                self.steps.append(Step("create", self._open[result]))
            elif name == "write":
                self.steps.append(Step("write", self._open[args[0]], data=bytes(args[1][:result])))
            elif name in ("rename", "link"):
                self.steps.append(Step(name, self._inside(args[0]), self._inside(args[1])))
            elif name == "unlink":
                self.steps.append(Step(name, self._inside(args[0])))
            return result


@dataclass
class _File:
    data: bytes = b""
    durable_nbytes: int = 0

    def after_power_loss(self) -> list[bytes]:
        """All that may be found in it."""
        certain, pending = self.data[: self.durable_nbytes], self.data[self.durable_nbytes :]
        if not pending:
            return [certain]
        blocks = range(0, len(pending), BLOCK_NBYTES)
        cuts = {blocks[len(blocks) // 2], blocks[-1]}
        torn = [pending[:cut] for cut in cuts] + [bytes(cut) + pending[cut:] for cut in cuts]
        return list(dict.fromkeys(certain + found for found in (pending, b"", bytes(len(pending)), *torn)))


# A change of names in one directory: what each of some names is from then on; None is nothing.
_Change = dict[str, "_File | _Directory | None"]


@dataclass
class _Directory:
    certain: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def entries(self, changes: list[_Change] | None = None) -> dict[str, _File | _Directory]:
        """Its entries with some changes made; now, with all of them."""
        found: dict[str, Any] = dict(self.certain)
        for change in self.pending if changes is None else changes:
            found.update(change)
        return {name: entry for name, entry in found.items() if entry is not None}

    def after_power_loss(self) -> Iterator[dict[str, _File | _Directory]]:
        """All that may be found in it."""
        count = len(self.pending)
        if count <= MAX_SUBSETS_OF:
            sizes: list[int] = list(range(count + 1))
        else:
            sizes = [0, 1, count - 1, count]
        for size in sizes:
            for chosen in itertools.combinations(self.pending, size):
                yield self.entries(list(chosen))


class Disk:
    """The disk as the steps so far left it, and what of that is certain."""

    def __init__(self, tree: Tree) -> None:
        self.root = _Directory()
        for path, data in sorted(tree.items()):
            folder, name = self._parent(path)
            folder.certain[name] = _Directory() if data is None else _File(data, len(data))

    def _parent(self, path: str) -> tuple[_Directory, str]:
        *folders, name = path.split("/")
        found = self.root
        for folder in folders:
            inner = found.entries()[folder]
            assert isinstance(inner, _Directory)
            found = inner
        return found, name

    def _at(self, path: str) -> _File | _Directory:
        if path == ".":
            return self.root
        folder, name = self._parent(path)
        return folder.entries()[name]

    def do(self, step: Step) -> None:
        """Carry out one step."""
        if step.name == "write":
            file = self._at(step.path)
            assert isinstance(file, _File)
            file.data += step.data
        elif step.name == "fsync":
            synced = self._at(step.path)
            if isinstance(synced, _File):
                synced.durable_nbytes = len(synced.data)
            else:
                synced.certain, synced.pending = synced.entries(), []
        else:
            folder, name = self._parent(step.path)
            if step.name == "create":
                folder.pending.append({name: _File()})
            elif step.name == "mkdir":
                folder.pending.append({name: _Directory()})
            elif step.name == "unlink":
                folder.pending.append({name: None})
            else:
                target, new = self._parent(step.target)
                assert target is folder, "only within a directory"
                moved = {name: None} if step.name == "rename" else {}
                folder.pending.append({**moved, new: folder.entries()[name]})

    def after_power_loss(self) -> Iterator[Tree]:
        """All trees that may be found, some of them more than once."""
        yield from _trees(self.root, "")


def _trees(directory: _Directory, prefix: str) -> Iterator[Tree]:
    for entries in directory.after_power_loss():
        choices: list[list[Tree]] = []
        for name, entry in entries.items():
            path = prefix + name
            if isinstance(entry, _File):
                choices.append([{path: data} for data in entry.after_power_loss()])
            else:
                choices.append([{path: None, **inner} for inner in _trees(entry, path + "/")])
        for chosen in itertools.product(*choices):
            yield {path: data for tree in chosen for path, data in tree.items()}


def crash_states(before: Tree, steps: list[Step]) -> Iterator[tuple[int, Tree]]:
    """Yield what may be found after a power loss that could not be a step before, and how many steps were taken."""
    disk = Disk(before)
    seen: set[frozenset[tuple[str, bytes | None]]] = set()
    for taken in range(len(steps) + 1):
        if taken:
            disk.do(steps[taken - 1])
        now = set()
        for tree in disk.after_power_loss():
            key = frozenset(tree.items())
            if key not in seen and key not in now:
                yield taken, tree
            now.add(key)
        seen = seen | now if taken < len(steps) - 1 else set()  # after the last one, everything counts anew

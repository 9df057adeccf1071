"""The disks of a run: the durable tier's and each node's, small file systems of their own where they can be mounted."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_BALLAST = "ballast"


@dataclass
class Disk:
    """A disk that fills up, becomes read-only, or is lost."""

    point: Path  # where it is mounted
    nbytes: int  # its size
    is_mounted: bool = False  # False where nothing can be mounted: then it is a directory, which only can be lost

    def mount(self) -> None:
        """Mount it, if that is possible."""
        self.point.mkdir(parents=True, exist_ok=True)
        options = f"size={self.nbytes},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.point)]
        self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0

    def unmount(self) -> None:
        """Unmount it, whoever still uses it."""
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.point)], check=True)
            self.is_mounted = False

    @property
    def used(self) -> float:
        """How much of it is used: 1 if it is full."""
        found = os.statvfs(self.point)
        return 1 - found.f_bavail / found.f_blocks

    def lose(self) -> bool:
        """Lose all that is on it; what is there afterwards is new and empty."""
        if self.is_mounted:
            self.unmount()
            self.mount()
        else:
            shutil.rmtree(self.point, ignore_errors=True)
            self.point.mkdir(parents=True, exist_ok=True)
        return True

    def fill(self) -> bool:
        """Fill it to the last byte; return whether that is possible."""
        if not self.is_mounted:
            return False
        with contextlib.suppress(OSError), (self.point / _BALLAST).open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        return True

    def empty(self) -> None:
        """Undo `fill`."""
        with contextlib.suppress(FileNotFoundError):
            (self.point / _BALLAST).unlink()

    def forbid(self) -> bool:
        """Make it read-only; return whether that is possible, which it is not while files are being written."""
        return self.is_mounted and self._remount("ro")

    def allow(self) -> None:
        """Undo `forbid`."""
        if self.is_mounted:
            self._remount("rw")

    def _remount(self, option: str) -> bool:
        command = ["mount", "-o", f"remount,{option}", str(self.point)]
        return subprocess.run(command, capture_output=True).returncode == 0


class Field:
    """The disks of one run."""

    def __init__(self, directory: Path, node_nbytes: list[int], durable_nbytes: int) -> None:
        self.directory = directory
        self.durable = Disk(directory / "disk", durable_nbytes)
        self.disks = [Disk(directory / f"node-{number}", nbytes) for number, nbytes in enumerate(node_nbytes)]
        self.run = self.durable.point / "run"
        self.nodes = [disk.point / "fast" for disk in self.disks]
        for disk in (self.durable, *self.disks):
            disk.mount()

    def disk_of(self, node: Path) -> Disk:
        """Return the disk that a node's directory is on."""
        return self.disks[self.nodes.index(node)]

    def mend(self) -> None:
        """Undo what can be undone."""
        for disk in (self.durable, *self.disks):
            disk.allow()
            disk.empty()
        for node in self.nodes:
            clear_the_way(node)

    def remove(self) -> None:
        """Unmount all and remove it."""
        self.mend()
        for disk in (self.durable, *self.disks):
            disk.unmount()
        shutil.rmtree(self.directory)


def stand_in_the_way(node: Path) -> bool:
    """Put a file where a node's directory is."""
    away = node.with_name(f"{node.name}.away")
    try:
        if node.is_dir():
            node.rename(away)
        node.write_bytes(b"")
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.ENOTEMPTY):
            raise
        return False
    return True


def clear_the_way(node: Path) -> None:
    """Undo `stand_in_the_way`."""
    away = node.with_name(f"{node.name}.away")
    if node.is_file():
        node.unlink()
    if away.is_dir() and not os.path.lexists(node):
        away.rename(node)

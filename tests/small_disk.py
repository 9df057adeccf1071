"""A real file system that is small, or read-only: a tmpfs that is mounted for one test."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["SmallDisk", "small_disk"]


@dataclass
class SmallDisk:
    """A tmpfs whose size can be changed while it is in use."""

    path: Path

    def resize(self, option: str) -> None:
        """Mount it anew with other options, such as `size=8k` or `ro`."""
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True)

    def used(self, what: str) -> int:
        """Return the used units of 1 KiB (`size`), or the used inodes."""
        column = {"size": "--output=used", "inodes": "--output=iused"}[what]
        shown = subprocess.run(["df", "-k", column, str(self.path)], check=True, capture_output=True, text=True)
        return int(shown.stdout.split()[-1])


@contextlib.contextmanager
def small_disk(options: str = "size=8m,nr_inodes=1000") -> Iterator[SmallDisk]:
    """Mount one; skips the test where nothing can be mounted."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
        yield SmallDisk(Path(folder))
        subprocess.run(["umount", folder], check=True)

"""A real file system that fills up."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"a small tmpfs can't be mounted here: {mounted.stderr.strip()}")
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)

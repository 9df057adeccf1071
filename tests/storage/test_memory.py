"""memory://, as an example of a filesystem without special treatment."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest

from .suite import FilesystemSuite, Place


class TestMemory(FilesystemSuite):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        root = f"memory://{uuid.uuid4().hex}"
        yield root, {}
        memory = fsspec.filesystem("memory")
        if memory.exists(root):
            memory.rm(root, recursive=True)

"""Meta's torch_checkpointing (https://pypi.org/project/torch-checkpointing/) over the link of `limited://`.

Without a GPU it is told to use neither page-locked memory nor copies that do not block; the rest is its default: it
stages on a thread, into shared memory that it keeps, and a process of its own writes. It compresses nothing. Its
barrier, by which the ranks learn that all have written, is not used here, in its favour.
"""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sinks import LimitedFileSystem
from benchmarks.states import State

__all__ = ["Manager", "is_installed"]


def is_installed() -> bool:
    """True if the package is there."""
    return importlib.util.find_spec("torch_checkpointing") is not None


if is_installed():
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.base_storage import ReadArgs
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig

    class _Storage(LocalFileSystemStorage):
        """Its local files, at the other end of the link."""

        def __init__(self, config: LimitedConfig) -> None:
            super().__init__(config)
            self._files = LimitedFileSystem(rate=config.rate)

        def stream_write(self, path: Path) -> Any:
            return self._files._open(os.fspath(path), "wb")

        def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> Any:
            return self._files._open(os.fspath(path), "rb")

        def write(self, path: Path, data: Any) -> None:
            with self.stream_write(path) as file:
                file.write(data)

    @dataclass
    class LimitedConfig(LocalFileSystemStorageConfig):
        """Configure it."""

        rate: float = 0.0

        def create_storage(self) -> _Storage:
            return _Storage(self)


class Manager:
    """Saves of one rank.

    Args:
        rate: of the link.
    """

    def __init__(self, rate: float) -> None:
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LimitedConfig(use_direct_io=False, rate=rate),
        ).build()

    def begin(self, state: State, place: str) -> Future[Any]:
        """Save, and return when the state may change again."""
        future = self._manager.save(place, {"state": state})
        assert future is not None
        with self._manager.lock():
            return future

    def close(self) -> None:
        """End its process."""
        self._manager.close()

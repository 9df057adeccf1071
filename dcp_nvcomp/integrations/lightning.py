"""Lightning: strategies whose distributed checkpoints go through this package, for `Trainer` and for `Fabric`.

Lightning writes `meta.pt` once our checkpoint is published. Where a save replaces another, the old `meta.pt` is moved
aside just before: it belongs to other weights, and without it Lightning takes the directory for no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.integrations.installing import check_methods, install_here
from dcp_nvcomp.saving.commit import FinishedSave, commit_checkpoint
from dcp_nvcomp.storage.base import Filesystem

_META = "meta.pt"


def _publish(filesystem: Filesystem, save: FinishedSave) -> None:
    """Commit a save, and let the `meta.pt` of the checkpoint that it replaces go before the new weights are there."""
    meta = filesystem.location(_META)  # of a local directory: Lightning makes a Path of it
    aside = f"{meta}.replaced"
    before = _version(filesystem)
    was_there = os.path.exists(meta)
    if was_there:
        os.replace(meta, aside)
    try:
        commit_checkpoint(filesystem, save)
    except BaseException:  # an interrupt, too
        if was_there and _version(filesystem) == before:  # the old checkpoint is as it was
            os.replace(aside, meta)
        raise
    with contextlib.suppress(FileNotFoundError):
        os.remove(aside)


def _version(filesystem: Filesystem) -> tuple[int, int] | None:
    """Return what differs for each `.metadata` that is published; None without one."""
    try:
        found = os.stat(filesystem.location(METADATA_NAME))
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


class _Installing:
    """Lets what a strategy saves and loads go through this package, with `writer` and `reader` options."""

    def __init__(
        self,
        *args: Any,
        writer: Mapping[str, Any] | None = None,
        reader: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_methods(super(), "lightning", "save_checkpoint", "load_checkpoint")
        with install_here(writer, reader):  # fail at once on wrong options
            super().__init__(*args, **kwargs)
        self._writer_options, self._reader_options = writer, reader

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint, as the strategy does."""
        with install_here(self._writer_options, self._reader_options, publisher=_publish):
            return super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, of this package or of stock DCP, as the strategy does."""
        with install_here(self._writer_options, self._reader_options):
            return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]


class NvcompFSDPStrategy(_Installing, FSDPStrategy):  # type: ignore[misc]
    """`FSDPStrategy` of `Trainer`; pass `state_dict_type="sharded"`."""


class NvcompModelParallelStrategy(_Installing, ModelParallelStrategy):  # type: ignore[misc]
    """`ModelParallelStrategy` of `Trainer`."""


class NvcompFabricFSDPStrategy(_Installing, FabricFSDPStrategy):  # type: ignore[misc]
    """`FSDPStrategy` of `Fabric`; pass `state_dict_type="sharded"`."""


class NvcompFabricModelParallelStrategy(_Installing, FabricModelParallelStrategy):  # type: ignore[misc]
    """`ModelParallelStrategy` of `Fabric`."""

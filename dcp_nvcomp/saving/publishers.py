"""How a save is published once all ranks have written: by the plain commit, or as a run wants it.

A publisher is called on the coordinator, from `NvcompWriter.finish`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.format.metadata.summary import Summary
from dcp_nvcomp.saving.commit import commit_checkpoint
from dcp_nvcomp.saving.published import LastPublished
from dcp_nvcomp.storage.base import Filesystem


@dataclass(frozen=True)
class FinishedSave:
    """A save that all ranks have written, and nobody can load yet.

    Attributes:
        metadata: complete.
        save_id: id of the save.
        own_files: the data files that the coordinator wrote.
        last: what the writer published last.
        overwrite: True if another checkpoint may be replaced.
        summary: what a list of checkpoints shows of it.
    """

    metadata: Metadata
    save_id: str
    own_files: tuple[str, ...]
    last: LastPublished
    overwrite: bool
    summary: Summary


Publisher: TypeAlias = Callable[[Filesystem, FinishedSave], None]


def publish_here(filesystem: Filesystem, save: FinishedSave) -> None:
    """Commit a save where its files are; raises what `commit_checkpoint` does."""
    commit_checkpoint(
        filesystem,
        save.metadata,
        save.save_id,
        save.own_files,
        save.last,
        overwrite=save.overwrite,
        summary=save.summary,
    )

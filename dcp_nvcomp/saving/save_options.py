"""The options of a writer that every part of a save needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser, parse_codec
from dcp_nvcomp.options import CheckEncodes, Engine, check_budget, check_choice, check_flag, check_seconds
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of an `NvcompWriter`, with the names that they have there. They are checked when this is made."""

    codec: str | CodecChain | CodecChooser
    thread_count: int
    single_file_per_rank: bool
    overwrite: bool
    sync_files: bool
    host_memory_budget: int
    device_memory_budget: int | None
    engine: str
    check_encodes: str
    storage_deadline_seconds: float
    staging_budget_nbytes: int | None
    finish_within_seconds: float
    references: tuple[str, ...] | None  # paths or URLs of checkpoints beside; None if nothing is to be shared later
    derived: Mapping[str, str]  # keys of masters, and of the weights that they may be derived from
    storage_options: Mapping[str, Any] = field(repr=False)  # with credentials
    known_options: tuple[str, ...]  # the names of all options, to tell a mistyped one from a storage option

    def __post_init__(self) -> None:
        parse_codec(self.codec)
        for name in ("single_file_per_rank", "overwrite", "sync_files"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        for name in ("storage_deadline_seconds", "finish_within_seconds"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        check_budget("host_memory_budget", self.host_memory_budget)
        for name in ("device_memory_budget", "staging_budget_nbytes"):
            if getattr(self, name) is not None:
                check_budget(name, getattr(self, name))
        check_choice("engine", self.engine, Engine)
        check_choice("check_encodes", self.check_encodes, CheckEncodes)

    @property
    def chooser(self) -> CodecChooser:
        return parse_codec(self.codec)

    def open(self, path: str) -> Filesystem:
        """Open a checkpoint: for each use, as connections are neither pickled nor shared between processes."""
        return open_filesystem(
            path,
            sync_files=self.sync_files,
            deadline_seconds=self.storage_deadline_seconds,
            storage_options=self.storage_options,
            known_options=self.known_options,
        )

"""torchtitan: an override that lets its checkpoints go through this package.

--override.imports 'dcp_nvcomp.integrations.torchtitan.nvcomp={"writer": {"codec": "auto"}}'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.config.override import derive, override

from dcp_nvcomp.integrations.installing import check_methods, install_here


class NvcompCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's `CheckpointManager`, whose DCP checkpoints are ours.

    Args:
        config: torchtitan's configuration, with `writer` and `reader`: options of `NvcompWriter` and `NvcompReader`.
        **kwargs: what torchtitan passes to its manager.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options and two more."""

        writer: dict[str, Any] = field(default_factory=dict)
        reader: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, **kwargs: Any) -> None:
        check_methods(CheckpointManager, "torchtitan", "dcp_save", "dcp_load")
        with install_here(config.writer, config.reader):  # fail at once on wrong options
            super().__init__(config, **kwargs)
        self._options = (config.writer, config.reader)

    def dcp_save(self, *args: Any, **kwargs: Any) -> Any:
        """Save as torchtitan does, in the mode that it asks for; called by torchtitan."""
        with install_here(*self._options):
            return super().dcp_save(*args, **kwargs)

    def dcp_load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, of this package or of stock DCP; called by torchtitan."""
        with install_here(*self._options):
            return super().dcp_load(*args, **kwargs)


@override(target=CheckpointManager.Config, description="checkpoints compressed by dcp_nvcomp")  # type: ignore[untyped-decorator]
def nvcomp(config: CheckpointManager.Config, **options: Any) -> Any:
    """Return torchtitan's configuration of checkpoints as one of ours.

    Args:
        config: torchtitan's.
        **options: `writer` and `reader`.
    """
    return derive(config, NvcompCheckpointManager.Config, **options)

"""Compressed checkpoints for torch.distributed.checkpoint: smaller and faster to save and load, bit for bit the same.

Training runs are managed by `CheckpointManager`; what goes with it is in `dcp_nvcomp.runs`. What the `dcp-nvcomp`
command does is in `dcp_nvcomp.tools`, rarer errors in `dcp_nvcomp.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_nvcomp import errors
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CodecUnavailableError,
    ConcurrentSaveError,
    ConfigurationError,
    CorruptDataError,
    DtypeMismatchError,
    FormatError,
    IncompleteCheckpointError,
    MissingKeyError,
    RankFailedError,
    RanksDifferError,
    RunInUseError,
    ShapeMismatchError,
    StorageError,
    UnsupportedVersionError,
)
from dcp_nvcomp.lazy_names import lazy_names
from dcp_nvcomp.version import VERSION

if TYPE_CHECKING:
    from dcp_nvcomp import codecs, runs, tools
    from dcp_nvcomp.conversion.convert import convert
    from dcp_nvcomp.loading.load import load
    from dcp_nvcomp.loading.reader import NvcompReader
    from dcp_nvcomp.one_file import load_compressed_checkpoint, save_compressed_checkpoint
    from dcp_nvcomp.reading.checkpoint import Checkpoint, open_checkpoint
    from dcp_nvcomp.runs.manager import CheckpointManager
    from dcp_nvcomp.runs.retention import Best, Keep
    from dcp_nvcomp.runs.state.training_state import TrainingState
    from dcp_nvcomp.saving.save import AsyncSave, async_save, save
    from dcp_nvcomp.saving.stats import SaveStats
    from dcp_nvcomp.saving.writer import NvcompWriter

__version__ = VERSION

__all__ = [
    "AsyncSave",
    "Best",
    "Checkpoint",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CodecUnavailableError",
    "ConcurrentSaveError",
    "ConfigurationError",
    "CorruptDataError",
    "DtypeMismatchError",
    "FormatError",
    "IncompleteCheckpointError",
    "Keep",
    "MissingKeyError",
    "NvcompReader",
    "NvcompWriter",
    "RankFailedError",
    "RanksDifferError",
    "RunInUseError",
    "SaveStats",
    "ShapeMismatchError",
    "StorageError",
    "TrainingState",
    "UnsupportedVersionError",
    "__version__",
    "async_save",
    "codecs",
    "convert",
    "errors",
    "load",
    "load_compressed_checkpoint",
    "open_checkpoint",
    "runs",
    "save",
    "save_compressed_checkpoint",
    "tools",
]

__getattr__ = lazy_names(
    __name__,
    {
        "conversion.convert": "convert",
        "loading.load": "load",
        "loading.reader": "NvcompReader",
        "one_file": "load_compressed_checkpoint save_compressed_checkpoint",
        "reading.checkpoint": "Checkpoint open_checkpoint",
        "runs.retention": "Best Keep",
        "runs.manager": "CheckpointManager",
        "runs.state.training_state": "TrainingState",
        "saving.save": "AsyncSave async_save save",
        "saving.stats": "SaveStats",
        "saving.writer": "NvcompWriter",
    },
    modules=("codecs", "runs", "tools"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Compressed checkpoints for torch.distributed.checkpoint: smaller and faster to save and load, bit for bit the same.

Names are imported when they are first used: torch takes seconds, and the command's help needs none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from dcp_nvcomp import errors
from dcp_nvcomp.errors import *  # noqa: F403
from dcp_nvcomp.version import VERSION

if TYPE_CHECKING:
    from dcp_nvcomp import codecs
    from dcp_nvcomp.choosing.advice import Advice, Workload, advise
    from dcp_nvcomp.choosing.bench import Bench, bench
    from dcp_nvcomp.conversion.convert import Conversion, convert
    from dcp_nvcomp.engines.cuda.pool import release_device_memory
    from dcp_nvcomp.loading.load import load
    from dcp_nvcomp.loading.reader import NvcompReader
    from dcp_nvcomp.maintenance.cleaning import Cleaning, RunCleaning, clean_checkpoint, clean_run
    from dcp_nvcomp.maintenance.environment import Environment, info
    from dcp_nvcomp.maintenance.findings import Verification
    from dcp_nvcomp.maintenance.inspection import Inspection, inspect_checkpoint
    from dcp_nvcomp.maintenance.recovery import Recovery, recover_checkpoint
    from dcp_nvcomp.maintenance.run_listing import RunListing, list_run
    from dcp_nvcomp.maintenance.verify import verify_checkpoint
    from dcp_nvcomp.one_file import load_compressed_checkpoint, save_compressed_checkpoint
    from dcp_nvcomp.reading.checkpoint import Checkpoint, open_checkpoint
    from dcp_nvcomp.reading.comparison import Comparison, compare_checkpoints
    from dcp_nvcomp.reading.stored_tensor import StoredTensor
    from dcp_nvcomp.reporting import write_report
    from dcp_nvcomp.runs.events import (
        ReplicasDiffer,
        RunReport,
        StepDelayed,
        StepFailed,
        StepRestored,
        StepSaved,
        StepSkipped,
        StepsRemoved,
    )
    from dcp_nvcomp.runs.keep import Best, Keep, SavedStep
    from dcp_nvcomp.runs.manager import CheckpointManager
    from dcp_nvcomp.runs.pruning import Pruning, pin_step, prune_run, unpin_step
    from dcp_nvcomp.runs.state.loaders import ElasticSampler, LoaderPart
    from dcp_nvcomp.runs.state.training_state import TrainingState
    from dcp_nvcomp.runs.step_save import StepSave
    from dcp_nvcomp.saving.asynchronous.async_save import AsyncSave, async_save
    from dcp_nvcomp.saving.save import save
    from dcp_nvcomp.saving.stats import SaveStats, Totals
    from dcp_nvcomp.saving.writer import NvcompWriter

__version__ = VERSION

__all__ = [
    "LoaderPart",
    "ElasticSampler",
    "TrainingState",
    "unpin_step",
    "prune_run",
    "pin_step",
    "Pruning",
    "StepsRemoved",
    "StepSkipped",
    "StepSaved",
    "StepSave",
    "StepRestored",
    "ReplicasDiffer",
    "StepDelayed",
    "StepFailed",
    "SavedStep",
    "RunReport",
    "Keep",
    "CheckpointManager",
    "Best",
    "Advice",
    "AsyncSave",
    "Bench",
    "Checkpoint",
    "Cleaning",
    "Comparison",
    "Conversion",
    "Environment",
    "Inspection",
    "NvcompReader",
    "NvcompWriter",
    "Recovery",
    "RunCleaning",
    "RunListing",
    "SaveStats",
    "StoredTensor",
    "Totals",
    "Verification",
    "Workload",
    "__version__",
    "advise",
    "async_save",
    "bench",
    "clean_checkpoint",
    "clean_run",
    "codecs",
    "compare_checkpoints",
    "convert",
    "errors",
    "info",
    "inspect_checkpoint",
    "list_run",
    "load",
    "load_compressed_checkpoint",
    "open_checkpoint",
    "recover_checkpoint",
    "release_device_memory",
    "save",
    "save_compressed_checkpoint",
    "verify_checkpoint",
    "write_report",
    *errors.__all__,
]

_NAMES: Final = {
    "choosing.advice": "Advice Workload advise",
    "choosing.bench": "Bench bench",
    "conversion.convert": "Conversion convert",
    "engines.cuda.pool": "release_device_memory",
    "loading.load": "load",
    "loading.reader": "NvcompReader",
    "maintenance.cleaning": "Cleaning RunCleaning clean_checkpoint clean_run",
    "maintenance.environment": "Environment info",
    "maintenance.findings": "Verification",
    "maintenance.inspection": "Inspection inspect_checkpoint",
    "maintenance.recovery": "Recovery recover_checkpoint",
    "maintenance.run_listing": "RunListing list_run",
    "maintenance.verify": "verify_checkpoint",
    "one_file": "load_compressed_checkpoint save_compressed_checkpoint",
    "reading.checkpoint": "Checkpoint open_checkpoint",
    "reading.comparison": "Comparison compare_checkpoints",
    "reading.stored_tensor": "StoredTensor",
    "reporting": "write_report",
    "runs.events": "ReplicasDiffer RunReport StepDelayed StepFailed StepRestored StepSaved StepSkipped StepsRemoved",
    "runs.keep": "Best Keep SavedStep",
    "runs.manager": "CheckpointManager",
    "runs.pruning": "Pruning pin_step prune_run unpin_step",
    "runs.state.loaders": "ElasticSampler LoaderPart",
    "runs.state.training_state": "TrainingState",
    "runs.step_save": "StepSave",
    "saving.asynchronous.async_save": "AsyncSave async_save",
    "saving.save": "save",
    "saving.stats": "SaveStats Totals",
    "saving.writer": "NvcompWriter",
}
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "codecs":
        return import_module("dcp_nvcomp.codecs")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

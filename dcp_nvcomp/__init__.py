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

_HOMES: Final = {
    "Advice": "choosing.advice",
    "AsyncSave": "saving.asynchronous.async_save",
    "Bench": "choosing.bench",
    "Best": "runs.keep",
    "Checkpoint": "reading.checkpoint",
    "CheckpointManager": "runs.manager",
    "Cleaning": "maintenance.cleaning",
    "Comparison": "reading.comparison",
    "Conversion": "conversion.convert",
    "ElasticSampler": "runs.state.loaders",
    "Environment": "maintenance.environment",
    "Inspection": "maintenance.inspection",
    "Keep": "runs.keep",
    "LoaderPart": "runs.state.loaders",
    "NvcompReader": "loading.reader",
    "NvcompWriter": "saving.writer",
    "Pruning": "runs.pruning",
    "Recovery": "maintenance.recovery",
    "RunCleaning": "maintenance.cleaning",
    "RunListing": "maintenance.run_listing",
    "RunReport": "runs.events",
    "SaveStats": "saving.stats",
    "SavedStep": "runs.keep",
    "ReplicasDiffer": "runs.events",
    "StepDelayed": "runs.events",
    "StepFailed": "runs.events",
    "StepRestored": "runs.events",
    "StepSave": "runs.step_save",
    "StepSaved": "runs.events",
    "StepSkipped": "runs.events",
    "StepsRemoved": "runs.events",
    "StoredTensor": "reading.stored_tensor",
    "Totals": "saving.stats",
    "TrainingState": "runs.state.training_state",
    "Verification": "maintenance.findings",
    "Workload": "choosing.advice",
    "advise": "choosing.advice",
    "async_save": "saving.asynchronous.async_save",
    "bench": "choosing.bench",
    "clean_checkpoint": "maintenance.cleaning",
    "clean_run": "maintenance.cleaning",
    "compare_checkpoints": "reading.comparison",
    "convert": "conversion.convert",
    "info": "maintenance.environment",
    "inspect_checkpoint": "maintenance.inspection",
    "list_run": "maintenance.run_listing",
    "load": "loading.load",
    "load_compressed_checkpoint": "one_file",
    "open_checkpoint": "reading.checkpoint",
    "pin_step": "runs.pruning",
    "prune_run": "runs.pruning",
    "recover_checkpoint": "maintenance.recovery",
    "release_device_memory": "engines.cuda.pool",
    "save": "saving.save",
    "save_compressed_checkpoint": "one_file",
    "unpin_step": "runs.pruning",
    "verify_checkpoint": "maintenance.verify",
    "write_report": "reporting",
}


def __getattr__(name: str) -> Any:
    if name == "codecs":
        return import_module("dcp_nvcomp.codecs")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

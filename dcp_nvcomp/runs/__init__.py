"""A training run: its checkpoints, what is kept of them, and where they are.

Here are the values that `dcp_nvcomp.CheckpointManager` reports and returns, the calls that look after the directory of
a run from outside, and data loading that resumes on other numbers of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_nvcomp.lazy_names import lazy_names

if TYPE_CHECKING:
    from dcp_nvcomp.maintenance.cleaning import RunCleaning, clean_run
    from dcp_nvcomp.maintenance.run_listing import RunListing, list_run
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
    from dcp_nvcomp.runs.pruning import Pruning, pin_step, prune_run, unpin_step
    from dcp_nvcomp.runs.retention import SavedStep
    from dcp_nvcomp.runs.state.loaders import ElasticSampler, LoaderPart
    from dcp_nvcomp.runs.step_save import StepSave

__all__ = [
    "ElasticSampler",
    "LoaderPart",
    "Pruning",
    "ReplicasDiffer",
    "RunCleaning",
    "RunListing",
    "RunReport",
    "SavedStep",
    "StepDelayed",
    "StepFailed",
    "StepRestored",
    "StepSave",
    "StepSaved",
    "StepSkipped",
    "StepsRemoved",
    "clean_run",
    "list_run",
    "pin_step",
    "prune_run",
    "unpin_step",
]

__getattr__ = lazy_names(
    __name__,
    {
        "maintenance.cleaning": "RunCleaning clean_run",
        "maintenance.run_listing": "RunListing list_run",
        "runs.events": "ReplicasDiffer RunReport StepDelayed StepFailed StepRestored StepSaved StepSkipped "
        "StepsRemoved",
        "runs.retention": "SavedStep",
        "runs.pruning": "Pruning pin_step prune_run unpin_step",
        "runs.state.loaders": "ElasticSampler LoaderPart",
        "runs.step_save": "StepSave",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Compressed checkpoints for torch.distributed.checkpoint: smaller and faster to save and load, bit for bit the same.

dcp.save(state_dict, storage_writer=NvcompWriter("s3://bucket/run/step-1000"))
dcp.load(state_dict, storage_reader=NvcompReader("s3://bucket/run/step-1000"))
"""

from __future__ import annotations

from dcp_nvcomp import codecs, errors
from dcp_nvcomp.engines.cuda.pool import release_device_memory
from dcp_nvcomp.errors import *  # noqa: F403
from dcp_nvcomp.loading.load import load
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.maintenance.cleaning import Cleaning, clean_checkpoint
from dcp_nvcomp.maintenance.inspection import Inspection, inspect_checkpoint
from dcp_nvcomp.maintenance.recovery import Recovery, recover_checkpoint
from dcp_nvcomp.maintenance.run_cleaning import RunCleaning, clean_run
from dcp_nvcomp.maintenance.verification.verify import Verification, verify_checkpoint
from dcp_nvcomp.reading.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from dcp_nvcomp.saving.asynchronous.async_save import AsyncSave, async_save
from dcp_nvcomp.saving.save import save
from dcp_nvcomp.saving.stats import SaveStats, Totals
from dcp_nvcomp.saving.writer import NvcompWriter

__all__ = [
    "AsyncSave",
    "Checkpoint",
    "Cleaning",
    "Inspection",
    "NvcompReader",
    "NvcompWriter",
    "Recovery",
    "RunCleaning",
    "SaveStats",
    "StoredTensor",
    "Totals",
    "Verification",
    "async_save",
    "clean_checkpoint",
    "clean_run",
    "codecs",
    "errors",
    "inspect_checkpoint",
    "load",
    "open_checkpoint",
    "recover_checkpoint",
    "release_device_memory",
    "save",
    "verify_checkpoint",
    *errors.__all__,
]

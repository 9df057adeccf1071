"""Compressed checkpoints for torch.distributed.checkpoint: smaller and faster to save and load, bit for bit the same.

dcp.save(state_dict, storage_writer=NvcompWriter("s3://bucket/run/step-1000"))
dcp.load(state_dict, storage_reader=NvcompReader("s3://bucket/run/step-1000"))
"""

from __future__ import annotations

from dcp_nvcomp import codecs, errors
from dcp_nvcomp.errors import *  # noqa: F403
from dcp_nvcomp.reader import NvcompReader
from dcp_nvcomp.stats import SaveStats, Totals
from dcp_nvcomp.writer import NvcompWriter

__all__ = ["NvcompReader", "NvcompWriter", "SaveStats", "Totals", "codecs", "errors", *errors.__all__]

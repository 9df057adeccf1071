"""What the `dcp-nvcomp` command does, as functions, and the values that they and other calls return."""

from __future__ import annotations

from dcp_nvcomp.advising.advice import Advice, Workload, advise
from dcp_nvcomp.advising.bench import Bench, Prediction, bench
from dcp_nvcomp.conversion.convert import Conversion
from dcp_nvcomp.engines.choice import warm_up
from dcp_nvcomp.engines.cuda.pool import release_device_memory
from dcp_nvcomp.loading.job import LoadStats
from dcp_nvcomp.maintenance.checks import Verification
from dcp_nvcomp.maintenance.cleaning import Cleaning, clean
from dcp_nvcomp.maintenance.consolidation import Consolidation, consolidate
from dcp_nvcomp.maintenance.environment import Environment, info
from dcp_nvcomp.maintenance.inspection import Inspection, inspect
from dcp_nvcomp.maintenance.recovery import Recovery, recover
from dcp_nvcomp.maintenance.verify import verify
from dcp_nvcomp.reading.comparison import Comparison, compare
from dcp_nvcomp.reading.stored_tensor import StoredTensor
from dcp_nvcomp.reporting import write_report
from dcp_nvcomp.saving.stats import RankStats, Totals

__all__ = [
    "Advice",
    "Bench",
    "Cleaning",
    "Comparison",
    "Consolidation",
    "Conversion",
    "Environment",
    "Inspection",
    "LoadStats",
    "Prediction",
    "RankStats",
    "Recovery",
    "StoredTensor",
    "Totals",
    "Verification",
    "Workload",
    "advise",
    "bench",
    "clean",
    "compare",
    "consolidate",
    "info",
    "inspect",
    "recover",
    "release_device_memory",
    "verify",
    "warm_up",
    "write_report",
]

"""Load some items: those of this package in one job, those of stock DCP one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.metadata.stored import StoredAt
from dcp_nvcomp.loading.destinations import Conversions
from dcp_nvcomp.loading.job import ItemPlanner, Loaded, LoadJob, LoadOptions
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.stock.load import load_stock_items
from dcp_nvcomp.storage.base import Filesystem

Footers = Callable[[Filesystem, Sequence[DataFileRef]], Sequence[Footer]]


def load_items(
    filesystem: Filesystem,
    items: Sequence[Wanted],
    planner: ItemPlanner,
    options: LoadOptions,
    *,
    footers: Footers = read_footers,
    progress: Callable[[int], None] | None = None,
) -> Loaded:
    """Load items into the destinations that a planner gives."""
    conversions = Conversions()  # of this load: each load warns
    ours = [item for item in items if isinstance(item.stored, StoredAt)]
    stock = [item for item in items if not isinstance(item.stored, StoredAt)]
    job = LoadJob(filesystem, planner, options, conversions=conversions, footers=footers, progress=progress)
    loaded = job.run(ours)
    load_stock_items(filesystem, stock, planner, options.safe, conversions)
    return loaded

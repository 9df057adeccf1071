"""Loads items of stock DCP checkpoints one after the other, so that a running job can switch to this reader."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.planner import LoadItemType

from dcp_nvcomp.errors import CheckpointError, MetadataError, ShapeMismatchError
from dcp_nvcomp.format.blocks import Box
from dcp_nvcomp.format.metadata.stored import StockItem
from dcp_nvcomp.loading.destinations import Conversions, part_of
from dcp_nvcomp.loading.job import ItemPlanner
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.safe_objects import SafeLoader
from dcp_nvcomp.loading.stock.archive import read_part
from dcp_nvcomp.loading.stock.items import MAX_STOCK_NBYTES, read_stock_bytes, read_stock_tensor
from dcp_nvcomp.storage.base import Filesystem


def load_stock_items(
    filesystem: Filesystem,
    items: Sequence[Wanted],
    planner: ItemPlanner,
    safe: SafeLoader,
    conversions: Conversions,
) -> None:
    """Load some items that FileSystemWriter or FsspecWriter wrote, plain or with the zstd extension."""
    for wanted in sorted(items, key=lambda wanted: _position(wanted.stored)):
        item, fqn = wanted.item, wanted.item.storage_index.fqn
        try:
            if item.type == LoadItemType.BYTE_IO:
                # what is not checked could run code, and so may as well have any size
                limit_nbytes = None if safe.checks_objects else MAX_STOCK_NBYTES
                data = read_stock_bytes(filesystem, wanted.stored, limit_nbytes=limit_nbytes)
                planner.load_bytes(item, safe.checked(data, fqn))
            else:
                _load_tensor(filesystem, wanted, planner, safe, conversions)
        except CheckpointError as error:
            error.fqn = error.fqn or fqn
            raise


def _position(where: StockItem) -> tuple[str, int]:
    return where.relative_path, where.offset


def _load_tensor(
    filesystem: Filesystem, wanted: Wanted, planner: ItemPlanner, safe: SafeLoader, conversions: Conversions
) -> None:
    item, shard = wanted.item, wanted.shard
    if shard is None:
        raise MetadataError("`.metadata` says that this is a Python object, but a tensor was requested.")
    region = Box(tuple(item.storage_offsets), tuple(item.lengths))
    whole = Box((0,) * len(shard.sizes), shard.sizes)
    part = None
    if whole.contains(region) and region != whole and region.elements:
        part = read_part(filesystem, wanted.stored, sizes=shard.sizes, dtype=shard.dtype, region=region)
    if part is None:
        # not checked against the dtype of `.metadata`: planners may convert what they save
        saved = read_stock_tensor(filesystem, wanted.stored, sizes=shard.sizes, trusted=safe.trusted)
        part = part_of(saved, region)
        if part is None:
            raise ShapeMismatchError(
                f"The stored tensor has shape {tuple(saved.shape)}, which does not contain {region}."
            )
    destination = planner.resolve_tensor(item).detach()
    if destination.shape != part.shape:
        raise ShapeMismatchError(f"The destination has shape {tuple(destination.shape)}, not {tuple(part.shape)}.")
    conversions.check(item.dest_index.fqn, part.dtype, destination.dtype)
    destination.copy_(part)
    planner.commit_tensor(item, destination)

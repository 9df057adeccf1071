"""The load of items of stock DCP checkpoints, one after the other: a running job can switch over to this reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_nvcomp.errors import CheckpointError, ShapeMismatchError
from dcp_nvcomp.filesystem import Filesystem
from dcp_nvcomp.placement import Conversions
from dcp_nvcomp.safe_objects import SafeLoader
from dcp_nvcomp.stock import StockItem, read_stock_bytes, read_stock_tensor

__all__ = ["load_stock_items"]


def load_stock_items(
    filesystem: Filesystem,
    items: Sequence[ReadItem],
    storage_data: Mapping[MetadataIndex, StockItem],
    planner: LoadPlanner,
    safe: SafeLoader,
    conversions: Conversions,
) -> None:
    """Load some items that FileSystemWriter or FsspecWriter wrote, plain or with the zstd extension.

    Args:
        filesystem: the checkpoint.
        items: the read items.
        storage_data: where `.metadata` says that they are.
        planner: DCP's planner.
        safe: how stored Python objects are loaded.
        conversions: tells the user, once, that dtypes differ.

    Raises:
        CheckpointError: an item can't be read, or does not have the shape that `.metadata` says.
    """
    for item in sorted(items, key=lambda item: _position(storage_data[item.storage_index])):
        where, fqn = storage_data[item.storage_index], item.storage_index.fqn
        try:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, safe.checked(read_stock_bytes(filesystem, where), fqn))
            else:
                _load_tensor(filesystem, item, where, planner, conversions)
        except CheckpointError as error:
            error.fqn = error.fqn or fqn
            raise


def _position(where: StockItem) -> tuple[str, int]:
    return where.relative_path, where.offset


def _load_tensor(
    filesystem: Filesystem, item: ReadItem, where: StockItem, planner: LoadPlanner, conversions: Conversions
) -> None:
    saved = read_stock_tensor(filesystem, where)
    if saved.dim() != len(item.lengths):
        raise ShapeMismatchError(f"The stored tensor has shape {tuple(saved.shape)}; the plan wants {item.lengths}.")
    for dim, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if offset + size > saved.shape[dim]:
            raise ShapeMismatchError(f"The stored tensor has shape {tuple(saved.shape)}, too small for what is asked.")
        saved = saved.narrow(dim, offset, size)
    destination = planner.resolve_tensor(item).detach()
    if destination.shape != saved.shape:
        raise ShapeMismatchError(f"The destination has shape {tuple(destination.shape)}, not {tuple(saved.shape)}.")
    conversions.check(item.dest_index.fqn, saved.dtype, destination.dtype)
    destination.copy_(saved)
    planner.commit_tensor(item, destination)

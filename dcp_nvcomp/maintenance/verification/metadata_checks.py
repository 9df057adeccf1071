"""Check that metadata agrees with itself, and footers with it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.ranks import check_cover
from dcp_nvcomp.format.metadata.stored import StoredAt
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, KIND_TORCH_SAVE, Record
from dcp_nvcomp.maintenance.verification.block_checks import CheckedFile
from dcp_nvcomp.maintenance.verification.findings import ERROR, WARNING, Finding

__all__ = ["Expected", "check_items", "check_records", "expectations"]


@dataclass(frozen=True)
class Expected:
    """One stored shard or Python object as metadata describes it.

    Attributes:
        fqn: the key.
        record: the record's index in its file; -1 if stock DCP stored it.
        shard: its box; None for a Python object, or if metadata lists no such shard.
        size: the whole tensor's shape.
        dtype: the tensor's element type; None for a Python object.
    """

    fqn: str
    record: int
    shard: ChunkStorageMetadata | None
    size: tuple[int, ...]
    dtype: torch.dtype | None


def expectations(metadata: Metadata) -> Iterator[tuple[Any, Expected]]:
    """Yield where each item is stored, and what it must be."""
    boxes: dict[str, dict[torch.Size, ChunkStorageMetadata]] = {}
    for index, stored in metadata.storage_data.items():
        record = stored.record if isinstance(stored, StoredAt) else -1
        described = metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(described, TensorStorageMetadata):
            yield stored, Expected(index.fqn, record, None, (), None)
            continue
        if index.fqn not in boxes:
            boxes[index.fqn] = {box.offsets: box for box in described.chunks}
        shard = boxes[index.fqn].get(_offsets(index, described))
        yield stored, Expected(index.fqn, record, shard, tuple(described.size), described.properties.dtype)


def _offsets(index: MetadataIndex, described: TensorStorageMetadata) -> torch.Size:
    return index.offset if index.offset is not None else torch.Size([0] * len(described.size))


def check_items(metadata: Metadata, name: str) -> list[Finding]:
    """Check that every listed shard is stored, every stored one listed, and no part of a tensor left out.

    Args:
        metadata: the metadata; of ranks, merged.
        name: its file.
    """
    findings = []
    stored: dict[str, set[torch.Size]] = {}
    for index in metadata.storage_data:
        described = metadata.state_dict_metadata.get(index.fqn)
        offset = _offsets(index, described) if isinstance(described, TensorStorageMetadata) else torch.Size(())
        stored.setdefault(index.fqn, set()).add(offset)
    for fqn in sorted(stored.keys() - metadata.state_dict_metadata.keys()):
        findings.append(Finding(ERROR, "It is stored, but not listed among the keys.", name, (fqn,)))
    for fqn, described in metadata.state_dict_metadata.items():
        offsets = stored.get(fqn, set())
        if not isinstance(described, TensorStorageMetadata):
            if not offsets:
                findings.append(Finding(ERROR, "The metadata does not say where this object is stored.", name, (fqn,)))
            continue
        listed = {box.offsets for box in described.chunks}
        for offset in sorted(listed - offsets):
            what = f"The metadata does not say where the shard at {tuple(offset)} is stored."
            findings.append(Finding(ERROR, what, name, (fqn,)))
        for offset in sorted(offsets - listed):
            findings.append(Finding(ERROR, f"The metadata lists no shard at {tuple(offset)}.", name, (fqn,)))
        try:
            check_cover(described.size, [(box.offsets, box.sizes) for box in described.chunks])
        except CheckpointError as error:
            findings.append(Finding(ERROR, error.message, name, (fqn,)))
    return findings


def check_records(file: CheckedFile, expected: Sequence[Expected]) -> list[Finding]:
    """Check that a file has the records that metadata places there.

    A dtype that differs is a warning: a planner may have converted what it saved, and a load converts it back.
    """
    findings = []
    records = file.footer.records
    for one in expected:
        if not 0 <= one.record < len(records):
            what = f"The metadata names record {one.record}; the file has {len(records)}."
            findings.append(Finding(ERROR, what, file.name, (one.fqn,)))
            continue
        record = records[one.record]
        if not _agrees(record, one):
            what = (
                f"The footer disagrees with the metadata: record {one.record} is a {record.kind} of key "
                f"{record.fqn!r} at {record.offsets}, shape {record.shape} of {record.global_shape}."
            )
            findings.append(Finding(ERROR, what, file.name, (one.fqn,)))
        elif record.kind == KIND_TENSOR and f"torch.{record.element.name}" != str(one.dtype):
            what = f"It is stored as {record.element.name}, and `.metadata` says {one.dtype}."
            findings.append(Finding(WARNING, what, file.name, (one.fqn,)))
    return findings


def _agrees(record: Record, expected: Expected) -> bool:
    if record.fqn != expected.fqn:
        return False
    if expected.dtype is None:
        return record.kind == KIND_BYTES
    if expected.shard is None or record.kind not in (KIND_TENSOR, KIND_TORCH_SAVE):
        return False
    same_place = (record.offsets, record.global_shape) == (tuple(expected.shard.offsets), expected.size)
    return same_place and (record.kind == KIND_TORCH_SAVE or record.shape == tuple(expected.shard.sizes))

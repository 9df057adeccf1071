"""Check that metadata agrees with itself, and footers with it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_nvcomp.engines.tensors import dtype_name
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.ranks import check_cover
from dcp_nvcomp.format.metadata.shards import Shard, ShardIndex, described, matches
from dcp_nvcomp.format.metadata.stored import StoredAt
from dcp_nvcomp.format.record import KIND_TENSOR
from dcp_nvcomp.maintenance.verification.block_checks import CheckedFile
from dcp_nvcomp.maintenance.verification.findings import ERROR, WARNING, Finding


@dataclass(frozen=True)
class Expected:
    """One stored shard or Python object as metadata describes it.

    Attributes:
        fqn: the key.
        record: the record's index in its file; -1 if stock DCP stored it.
        is_tensor: False for a Python object.
        shard: its shard; None for a Python object, or if metadata lists no such shard.
    """

    fqn: str
    record: int
    is_tensor: bool
    shard: Shard | None


def expectations(metadata: Metadata) -> Iterator[tuple[Any, Expected]]:
    """Yield where each item is stored, and what it must be."""
    shards = ShardIndex(metadata.state_dict_metadata)
    for index, stored in metadata.storage_data.items():
        record = stored.record if isinstance(stored, StoredAt) else -1
        yield stored, Expected(index.fqn, record, shards.is_tensor(index.fqn), shards.find(index))


def _offsets(index: MetadataIndex, tensor: TensorStorageMetadata) -> torch.Size:
    return index.offset if index.offset is not None else torch.Size([0] * len(tensor.size))


def check_items(metadata: Metadata, name: str) -> list[Finding]:
    """Check that every listed shard is stored, every stored one listed, and no part of a tensor left out."""
    findings = []
    stored: dict[str, set[torch.Size]] = {}
    for index in metadata.storage_data:
        tensor = metadata.state_dict_metadata.get(index.fqn)
        offset = _offsets(index, tensor) if isinstance(tensor, TensorStorageMetadata) else torch.Size(())
        stored.setdefault(index.fqn, set()).add(offset)
    for fqn in sorted(stored.keys() - metadata.state_dict_metadata.keys()):
        findings.append(Finding(ERROR, "It is stored, but not listed among the keys.", name, (fqn,)))
    for fqn, tensor in metadata.state_dict_metadata.items():
        offsets = stored.get(fqn, set())
        if not isinstance(tensor, TensorStorageMetadata):
            if not offsets:
                findings.append(Finding(ERROR, "The metadata does not say where this object is stored.", name, (fqn,)))
            continue
        listed = {box.offsets for box in tensor.chunks}
        for offset in sorted(listed - offsets):
            what = f"The metadata does not say where the shard at {tuple(offset)} is stored."
            findings.append(Finding(ERROR, what, name, (fqn,)))
        for offset in sorted(offsets - listed):
            findings.append(Finding(ERROR, f"The metadata lists no shard at {tuple(offset)}.", name, (fqn,)))
        try:
            check_cover(tensor.size, [(box.offsets, box.sizes) for box in tensor.chunks])
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
        if (one.shard is None and one.is_tensor) or not matches(record, one.fqn, one.shard):
            what = f"The footer disagrees with the metadata: record {one.record} {described(record)}."
            findings.append(Finding(ERROR, what, file.name, (one.fqn,)))
        elif one.shard is not None and record.kind == KIND_TENSOR:
            dtype = dtype_name(one.shard.dtype)
            if record.element.name != dtype:
                what = f"It is stored as {record.element.name}, and `.metadata` says {dtype}."
                findings.append(Finding(WARNING, what, file.name, (one.fqn,)))
    return findings

"""Bits flip on the way too: metadata that looks damaged is read once more before it is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(1000.0)}, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    return tmp_path


def _flip_reads(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """The first reads of `.metadata` come with a bit that differs; the names of all reads."""
    real, reads = PosixFilesystem.read_all, []

    def read_all(self: PosixFilesystem, name: str, *, limit_nbytes: int) -> bytes:
        data = bytearray(real(self, name, limit_nbytes=limit_nbytes))
        reads.append(name)
        if len(reads) <= count:
            data[len(data) // 2 + len(reads)] ^= 4
        return bytes(data)

    monkeypatch.setattr(PosixFilesystem, "read_all", read_all)
    return reads


def test_metadata_that_was_flipped_on_the_way(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = _flip_reads(monkeypatch, 1)
    into = {"w": torch.zeros(1000)}
    dcp.load(into, storage_reader=NvcompReader(checkpoint), no_dist=True)
    assert torch.equal(into["w"], torch.arange(1000.0))
    assert reads == [".metadata"] * 2


def test_metadata_that_is_damaged_each_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = _flip_reads(monkeypatch, 9)
    with pytest.raises(errors.MetadataError, match="fails its CRC"):
        NvcompReader(checkpoint).read_metadata()
    assert reads == [".metadata"] * 2

"""Bits flip on the way too: metadata that looks damaged is read once more before it is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_nvcomp import NvcompReader, errors
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import assert_loads, save

STATE = {"w": torch.arange(1000.0)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path, STATE)
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
    assert_loads(checkpoint, STATE)
    assert reads == [".metadata"] * 2


def test_metadata_that_is_damaged_each_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = _flip_reads(monkeypatch, 9)
    with pytest.raises(errors.MetadataError, match="fails its CRC"):
        NvcompReader(checkpoint).read_metadata()
    assert reads == [".metadata"] * 2

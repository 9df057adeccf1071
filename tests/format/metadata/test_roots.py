"""What is said of a `.metadata` that can't be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.metadata import roots


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_oversized_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.zeros(3)}, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    nbytes = (tmp_path / ".metadata").stat().st_size
    monkeypatch.setattr(roots, "MAX_METADATA_NBYTES", nbytes)
    NvcompReader(tmp_path).read_metadata()
    monkeypatch.setattr(roots, "MAX_METADATA_NBYTES", nbytes - 1)
    with pytest.raises(MetadataError, match=rf"^It is larger than {nbytes - 1} bytes, so it is no metadata") as caught:
        NvcompReader(tmp_path).read_metadata()
    assert caught.value.path == str(tmp_path / ".metadata")

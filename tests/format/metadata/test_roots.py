"""What is said of a `.metadata` that can't be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.errors import MetadataError


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_oversized_metadata(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    nbytes = (tmp_path / ".metadata").stat().st_size
    NvcompReader(tmp_path, metadata_limit_nbytes=nbytes).read_metadata()
    with pytest.raises(
        MetadataError, match=rf"^It has {nbytes} bytes, and at most {nbytes - 1} .* larger metadata_limit_nbytes="
    ) as caught:
        NvcompReader(tmp_path, metadata_limit_nbytes=nbytes - 1).read_metadata()
    assert caught.value.path == str(tmp_path / ".metadata")

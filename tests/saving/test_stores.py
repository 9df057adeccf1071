"""What saves do on S3 alone; tests/stores has what they do on every kind of storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_holds
from tests.conformance.sabotage import FailingSavePlanner
from tests.states import small_state

Store = tuple[str, dict[str, Any]]


def names(store: Store) -> list[str]:
    filesystem = open_filesystem(store[0], storage_options=store[1])
    try:
        return sorted(filesystem.list_names())
    finally:
        filesystem.close()


@pytest.mark.s3
def test_checkpoint_id_keeps_the_storage_options(s3_store: Store) -> None:
    url, storage = s3_store
    writer, reader = NvcompWriter(url, **storage), NvcompReader(url, **storage)
    for seed in (1, 2):
        dcp.save(small_state(seed), storage_writer=writer, checkpoint_id=f"{url}/step-{seed}", no_dist=True)
    for seed in (2, 1):
        assert_holds(reader, small_state(seed), checkpoint_id=f"{url}/step-{seed}", no_dist=True)


@pytest.mark.ci
@pytest.mark.s3
def test_a_large_shard_goes_up_in_parts_and_comes_back_in_ranges(any_s3_store: Store) -> None:
    """A shard of more than 100 MB that does not compress: a real multipart upload, and a load of a part of it."""
    import s3fs

    url, storage = any_s3_store
    rows, columns = 13_000, 2_048
    weight = torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)
    dcp.save({"w": weight}, storage_writer=NvcompWriter(url, **storage), no_dist=True)
    (name,) = [name for name in names(any_s3_store) if name.endswith(".distcp")]
    found = s3fs.S3FileSystem(**storage, use_listings_cache=False).info(f"{url}/{name}")
    assert found["size"] > 100e6
    parts = int(found["ETag"].strip('"').rpartition("-")[2])
    assert parts >= 5, "one PUT of the whole file has no part count in its ETag"
    into = torch.zeros_like(weight)
    dcp.load({"w": into}, storage_reader=NvcompReader(url, **storage), no_dist=True)
    assert torch.equal(into, weight)


@pytest.mark.s3
def test_a_failed_save_leaves_no_multipart_upload(any_s3_store: Store) -> None:
    import s3fs

    url, storage = any_s3_store
    content = {"w": torch.randint(-(2**31), 2**31 - 1, (24 << 20,), dtype=torch.int32), "object": {"seed": 1}}
    with pytest.raises(CheckpointException):
        dcp.save(
            content,
            storage_writer=NvcompWriter(url, **storage),
            planner=FailingSavePlanner("resolve_data", survivors=1),
            no_dist=True,
        )
    fs = s3fs.S3FileSystem(**storage, use_listings_cache=False)
    assert fs.list_multipart_uploads(url.removeprefix("s3://").partition("/")[0]) == []
    assert names(any_s3_store) == []

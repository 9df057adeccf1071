"""The same saves and loads on every kind of store: a disk, memory, moto's S3, and a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from dcp_nvcomp import CheckpointExistsError, CheckpointNotFoundError, NvcompReader, NvcompWriter
from dcp_nvcomp.errors import IncompleteCheckpointError
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_holds, assert_loads, save
from tests.saving.test_files import FailsAt

Store = tuple[str, dict[str, Any]]


STORES = [
    "local",
    "memory",
    "s3_store",
    "real_s3_store",
    pytest.param("azure_store", marks=pytest.mark.azure),
    pytest.param("gcs_store", marks=pytest.mark.gcs),
]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param in ("local", "memory"):
        return (str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"), {}
    found: Store = request.getfixturevalue(request.param)
    return found


def nested_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(1500, 1000, generator=generator),
        "half": torch.randn(500, 700, generator=generator).bfloat16(),
        "small": {f"n{i}": torch.randn(20, generator=generator) for i in range(5)},
        "object": {"seed": seed},
    }


def check_loads(store: Store, seed: int, **options: Any) -> None:
    url, storage = store
    assert_loads(url, nested_state(seed), **options, **storage)


def names(store: Store) -> list[str]:
    filesystem = open_filesystem(store[0], storage_options=store[1])
    try:
        return sorted(filesystem.list_names())
    finally:
        filesystem.close()


def test_save_and_load(store: Store) -> None:
    url, storage = store
    writer = NvcompWriter(url, **storage)
    dcp.save(nested_state(1), storage_writer=writer, no_dist=True)
    assert len(names(store)) == 3
    check_loads(store, 1)
    check_loads(store, 1, verify="full", thread_count=1)


def test_save_again_at_the_same_path(store: Store) -> None:
    url, storage = store
    writer = NvcompWriter(url, single_file_per_rank=False, **storage)
    for seed in (1, 2):
        dcp.save(nested_state(seed), storage_writer=writer, no_dist=True)
        check_loads(store, seed)
        assert len(names(store)) == 2 + 8


def test_checkpoint_id_keeps_the_storage_options(store: Store) -> None:
    url, storage = store
    writer, reader = NvcompWriter(url, **storage), NvcompReader(url, **storage)
    for seed in (1, 2):
        dcp.save(nested_state(seed), storage_writer=writer, checkpoint_id=f"{url}/step-{seed}", no_dist=True)
    for seed in (2, 1):
        assert_holds(reader, nested_state(seed), checkpoint_id=f"{url}/step-{seed}", no_dist=True)


def test_overwrite_false(store: Store) -> None:
    url, storage = store
    save(url, nested_state(1), overwrite=False, **storage)
    before = names(store)
    with pytest.raises(CheckpointException) as caught:
        save(url, nested_state(2), overwrite=False, **storage)
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    assert names(store) == before
    check_loads(store, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_some_keys(store: Store) -> None:
    url, storage = store
    save(url, nested_state(1), **storage)
    loaded = _load_state_dict_from_keys({"small", "object.seed"}, storage_reader=NvcompReader(url, **storage))
    assert set(loaded) == {"small", "object"} and loaded["object"] == {"seed": 1}
    assert torch.equal(loaded["small"]["n3"], nested_state(1)["small"]["n3"])


def test_nothing_there_and_nothing_finished(store: Store) -> None:
    url, storage = store
    with pytest.raises(CheckpointNotFoundError) as caught:
        NvcompReader(url, **storage).read_metadata()
    assert url in str(caught.value) and not isinstance(caught.value, IncompleteCheckpointError)
    save(url, nested_state(1), **storage)
    open_filesystem(url, storage_options=storage).remove([".metadata"])
    with pytest.raises(IncompleteCheckpointError):
        NvcompReader(url, **storage).read_metadata()


def test_async_save(store: Store) -> None:
    url, storage = store
    state = nested_state(1)
    upload = dcp.async_save(state, storage_writer=NvcompWriter(url, **storage), no_dist=True)
    state["large"].zero_()
    upload.result(timeout=180)
    check_loads(store, 1)


def test_a_failed_save_leaves_nothing(store: Store) -> None:
    url, storage = store
    before: list[str] = []
    for _ in range(2):  # where nothing was, and over an earlier one
        with pytest.raises(CheckpointException):
            dcp.save(
                nested_state(2),
                storage_writer=NvcompWriter(url, **storage),
                planner=FailsAt("object.seed"),
                no_dist=True,
            )
        assert names(store) == before
        save(url, nested_state(1), **storage)
        before = names(store)
        check_loads(store, 1)


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
        dcp.save(content, storage_writer=NvcompWriter(url, **storage), planner=FailsAt("object.seed"), no_dist=True)
    fs = s3fs.S3FileSystem(**storage, use_listings_cache=False)
    assert fs.list_multipart_uploads(url.removeprefix("s3://").partition("/")[0]) == []
    assert names(any_s3_store) == []

"""Storages of torch_checkpointing as jobs make them, and what its writer and reader do with them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch


def storage_of(place: tuple[str, dict[str, Any]], **options: Any) -> Any:
    """Return a storage as another job would make it."""
    from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig

    config = NvcompStorageConfig(place[0], storage_options=place[1], **options)
    return pickle.loads(pickle.dumps(config)).create_storage()


def state(seed: int = 0) -> dict[str, Any]:
    """Return a small state with a tensor that is compressed."""
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 200, generator=generator), "b": torch.randn(3, generator=generator), "step": seed}


def put(storage: Any, path: str, value: Any) -> None:
    """Write a file as torch_checkpointing's writer does."""
    if not storage.isdir(Path(path).parent):
        storage.mkdir(Path(path).parent)
    with storage.get_write_stream(Path(path), value) as stream:
        torch.save(value, stream)


def get(storage: Any, path: str) -> Any:
    """Read a file as its reader does."""
    from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

    return load_torch_serialized_from_storage(Path(path), storage)


def commit(storage: Any, name: str = "step-1", seed: int = 0) -> dict[str, Any]:
    """Write a checkpoint of two ranks and commit it."""
    for rank in range(2):
        put(storage, f"tmp_{name}/model_{rank}.pt", state(seed + rank))
    storage.write(Path(f"tmp_{name}/parts/config.json"), b'{"a": 1}')
    assert storage.exists(Path(f"tmp_{name}"))
    assert not storage.exists(Path(name))
    storage.rename(Path(f"tmp_{name}"), Path(name), is_directory=True)
    return state(seed)

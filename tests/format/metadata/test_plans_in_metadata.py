"""Megatron-core's own strategy keeps the plans of all ranks in `.metadata`: they are ignored, and nothing is built."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_nvcomp import open_checkpoint


def test_plans_beside_the_metadata(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(6.0), "n": [3, "x"]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = dcp.FileSystemWriter(tmp_path).prepare_global_plan([planner.create_local_plan()])
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.all_local_plans = plan
    file.write_bytes(pickle.dumps(metadata))
    assert b"SavePlan" in file.read_bytes() and b"_StoragePrefix" in file.read_bytes()
    assert open_checkpoint(tmp_path)["w"][:].tolist() == list(range(6))

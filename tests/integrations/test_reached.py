"""What docs/frameworks says of functions that `install()` reaches, and of those that it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dcp_nvcomp import open_checkpoint
from dcp_nvcomp.integrations import install
from tests.integrations.launch import needs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


def test_accelerate_without_dcp(tmp_path: Path) -> None:
    needs("accelerate", "accelerate==1.15.0")
    from accelerate import PartialState
    from accelerate.utils import save_fsdp_model
    from torch.distributed.fsdp import StateDictType

    kind = StateDictType.SHARDED_STATE_DICT
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=kind, state_dict_config=None)
    accelerator = SimpleNamespace(process_index=0, num_processes=1, is_fsdp2=True)
    PartialState(cpu=True)  # its logger asks for it
    try:
        with install():
            save_fsdp_model(plugin, accelerator, torch.nn.Linear(2, 2), str(tmp_path), use_dcp=False)
    finally:
        PartialState._reset_state()
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model_fsdp_0_rank0.bin"]


def test_distributed_checkpoints_of_transformers(tmp_path: Path) -> None:
    needs("transformers", "transformers==5.24.0")
    from transformers.distributed.checkpoint import (
        _save_model_checkpoint_distributed,
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with install():
        save_optimizer_distributed(model, optimizer, str(tmp_path / "optimizer"))
        load_optimizer_distributed(model, optimizer, str(tmp_path / "optimizer"))
        _save_model_checkpoint_distributed(model, str(tmp_path / "model"))
    assert list((tmp_path / "optimizer").glob("__*.metadata"))
    assert "optimizer.state.weight.exp_avg" in open_checkpoint(tmp_path / "optimizer")
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".safetensors"}

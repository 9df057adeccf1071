"""What docs/frameworks shows: each block compiles, its imports are there, and what needs no job runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import open_checkpoint
from dcp_nvcomp.integrations import Installation, install, stock_classes
from tests.integrations.launch import needs

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"
# not in the environment of `make test`: tests/integrations/frameworks has their own
ELSEWHERE = {"torchtitan", "torchtune", "ray"}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def all_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in sorted(PAGES.glob("*.md"))
        for number, block in enumerate(blocks(page.name))
    ]


@pytest.mark.parametrize("block", all_blocks())
@pytest.mark.filterwarnings("ignore")  # of the frameworks
def test_every_import_is_there(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            modules, names = [node.module or ""], [one.name for one in node.names]
        elif isinstance(node, ast.Import):
            modules, names = [one.name for one in node.names], []
        else:
            continue
        for module in modules:
            package = module.split(".")[0]
            if package in ELSEWHERE or module == "dcp_nvcomp.integrations.torchtitan":
                continue
            if package == "megatron" or module.endswith(".megatron"):
                needs("megatron.core", "megatron-core==0.16.1")
            elif package != "dcp_nvcomp":
                needs(package, package)
            imported = importlib.import_module(module)
            assert all(hasattr(imported, name) for name in names), (module, names)


def test_the_page_of_install(tmp_path: Path) -> None:
    (block,) = blocks("index.md")
    names: dict[str, Any] = {"dcp": dcp, "state": {"w": torch.ones(3)}, "path": tmp_path}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "save", lambda *args, _save=dcp.save, **kwargs: _save(*args, no_dist=True, **kwargs))
        patch.setattr(dcp, "load", lambda *args, _load=dcp.load, **kwargs: _load(*args, no_dist=True, **kwargs))
        before = list(stock_classes._makers)
        exec(compile(block, "index.md", "exec"), names)
    assert isinstance(names["installation"], Installation)
    names["installation"].uninstall()
    assert stock_classes._makers == before
    assert open_checkpoint(tmp_path)["w"][0] == 1


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_lightning() -> None:
    needs("lightning", "lightning==2.6.6")
    (block,) = blocks("lightning.md")
    names: dict[str, Any] = {}
    exec(compile(block, "lightning.md", "exec"), names)
    assert names["trainer"].strategy is names["strategy"]


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

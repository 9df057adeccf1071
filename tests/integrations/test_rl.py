"""The calls of frameworks for reinforcement learning and fine-tuning, as docs/frameworks/rl.md has them.

Their packages need GPUs, Ray or vLLM; those that save through Megatron-core are in test_megatron.py, with that package.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_nvcomp.integrations import install
from tests.distributed.launch import RankPool, ranks  # noqa: F401

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "rl.md"

pytestmark = pytest.mark.ci


def _trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, DTensor):
        return a.placements == b.placements and torch.equal(a.to_local(), b.to_local())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _is_ours(path: Path) -> bool:
    return bool(list(path.glob("__*.metadata")))


class _Model:
    """NeMo-RL's ModelState."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model, options=StateDictOptions(cpu_offload=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class _Optimizer:
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(cpu_offload=True)
        return {"optim": get_optimizer_state_dict(self.model, self.optimizer, options=options)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])


def _as_nemo_rl(path: Path) -> None:
    model, optimizer = _trained(0)
    other, other_optimizer = _trained(1)
    with install(writer={"codec": "auto"}):
        dcp.save({"model": _Model(model)}, checkpoint_id=str(path / "weights"))
        dcp.save({"optim": _Optimizer(model, optimizer)}, checkpoint_id=str(path / "optimizer"))
        dcp.load(state_dict={"model": _Model(other)}, checkpoint_id=str(path / "weights"))
        state = {"optim": _Optimizer(other, other_optimizer)}
        dcp.load(state_dict=state, checkpoint_id=str(path / "optimizer"))
        assert _is_ours(path / "weights") and _is_ours(path / "optimizer")
        if dist.get_rank() == 0:
            dcp_to_torch_save(str(path / "weights"), str(path / "model.bin"))
    dist.barrier()
    assert _equal(_Model(other).state_dict(), _Model(model).state_dict())
    assert _equal(_Optimizer(other, other_optimizer).state_dict(), _Optimizer(model, optimizer).state_dict())
    exported = torch.load(path / "model.bin")["model"]
    assert all(torch.equal(exported[key], value.full_tensor()) for key, value in model.state_dict().items())


def test_nemo_rl(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(_as_nemo_rl, tmp_path, world_size=2, timeout_s=60)


class _Planner(dcp.DefaultSavePlanner):
    """Automodel's, with a place of its own in DCP's cache of plans."""

    def __init__(self, name: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = name


def _as_automodel(path: Path) -> None:
    model, optimizer = _trained(0)
    on_cpus = StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False)
    group, stager = dist.new_group(backend="gloo"), DefaultStager(on_cpus)
    with install(writer={"codec": "auto"}):
        for step, is_async in ((1, False), (2, False), (3, True), (4, True)):
            model(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
            state = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )
            arguments: dict[str, Any] = {
                "checkpoint_id": str(path / f"{step}" / "optim"),
                "storage_writer": None,
                "planner": _Planner("0:optimizer"),
                "process_group": group,
            }
            if is_async:
                by_process = AsyncCheckpointerType.PROCESS
                saving = dcp.async_save(state, async_stager=stager, async_checkpointer_type=by_process, **arguments)
                assert isinstance(saving, AsyncSaveResponse)
                saving.upload_completion.result()
            else:
                dcp.save(state, **arguments)
            loaded = {
                key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
                for key, value in state.items()
            }
            dcp.load(loaded, checkpoint_id=arguments["checkpoint_id"], storage_reader=None, process_group=group)
            assert _is_ours(path / f"{step}" / "optim") and _equal(loaded, state)
    stager.close()


def test_automodel(tmp_path: Path) -> None:
    pool = RankPool(2, tmp_path)  # of its own: DCP's process checkpointer stays with a rank's process
    try:
        pool.run(_as_automodel, tmp_path, timeout_s=120)
    finally:
        pool.close()


def _as_verl(path: Path) -> float:
    """Save and load as verl's module does, after docs/frameworks/rl.md's recipe."""
    model, optimizer = _trained(0)
    other, other_optimizer = _trained(1)
    recipe = re.search(r"```python\n(def compress_verl.*?)```", PAGE.read_text(), re.DOTALL)
    assert recipe
    names_of_recipe: dict[str, Any] = {}
    exec(recipe[1], names_of_recipe)  # the document's own code
    module = types.SimpleNamespace(torch=torch)
    names_of_recipe["compress_verl"](module)
    names = [str(path / f"{name}_world_size_2_rank_{dist.get_rank()}.pt") for name in ("model", "optim", "extra_state")]
    extra = {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()}}
    for state, name in zip((model.state_dict(), optimizer.state_dict(), extra), names, strict=True):
        module.torch.save(state, name)
    other.load_state_dict(module.torch.load(names[0], weights_only=False))
    other_optimizer.load_state_dict(module.torch.load(names[1], weights_only=False))
    assert _equal(module.torch.load(names[2], weights_only=False), extra)
    assert _equal(other.state_dict(), model.state_dict())
    assert _equal(other_optimizer.state_dict(), optimizer.state_dict())
    torch.save(model.state_dict(), path / f"plain-{dist.get_rank()}")
    return Path(names[0]).stat().st_size / (path / f"plain-{dist.get_rank()}").stat().st_size


def test_verl(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    assert max(ranks.run(_as_verl, tmp_path, world_size=2, timeout_s=60)) < 1

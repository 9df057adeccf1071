"""Megatron-core: a small GPT with tensor parallelism. Options: `registered`, or `mcore` or `nvrx`: asynchronous."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

from dcp_nvcomp.integrations.megatron import NvcompLoadStrategy, NvcompSaveStrategy, register
from tests.integrations.jobs.common import Job, nvrx_queue, stand_in_for_cuda

WRITER = {"codec": "auto"}


def new_queue(how: str) -> Any:
    """Return the queue that belongs to a way to save asynchronously."""
    return nvrx_queue() if how == "nvrx" else AsyncCallsQueue()


def asynchronously(how: str) -> dict[str, Any]:
    """Return the arguments of `dist_checkpointing.save` that let it save so."""
    has_choice = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_sharded_save": True, **({"async_strategy": how} if has_choice else {})}


def gpt() -> GPTModel:
    torch.manual_seed(0)
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    without = ["masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm"]
    config = TransformerConfig(
        **shape,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **dict.fromkeys(without, False),
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)


def main() -> None:
    job = Job()
    how = job.options[0]
    stand_in_for_cuda()
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(step: int) -> None:
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        mask = torch.ones(1, 1, 16, 16).tril() < 0.5
        model(tokens, torch.arange(16).expand(2, 16), mask, labels=tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sharded() -> dict[str, Any]:
        weights = model.sharded_state_dict(prefix="model.")
        moments = optimizer.state_dict()
        count = next(iter(moments["state"].values()))["step"].item()
        parameters = get_param_id_to_sharded_param_map(weights, model.parameters())
        optim_state_to_sharding_state(moments, parameters, exclude_keys="step")
        return {"model": weights, "optimizer": moments, "count": count}

    def state() -> list[Any]:
        weights = {name: one for name, one in model.state_dict().items() if "_extra_state" not in name}
        return [weights, optimizer.state_dict()["state"]]

    def restore(loaded: dict[str, Any]) -> None:
        for moments in loaded["optimizer"]["state"].values():
            moments["step"] = torch.tensor(float(loaded["count"]))
        model.load_state_dict({name.removeprefix("model."): one for name, one in loaded["model"].items()})
        optimizer.load_state_dict(loaded["optimizer"])

    queue, path = new_queue(how), job.directory / "iter_0000002"

    def save() -> None:
        if how == "registered":
            dist_checkpointing.save(sharded(), str(path))
            return
        strategy = FullyParallelSaveStrategyWrapper(NvcompSaveStrategy(writer=WRITER), dist.group.WORLD)
        request = dist_checkpointing.save(sharded(), str(path), strategy, **asynchronously(how))
        queue.schedule_async_request(request)

    if how == "registered":
        register(writer=WRITER)
    if job.resumes:
        train(0)  # so that there is state to load into
        strategy = None if how == "registered" else NvcompLoadStrategy()
        restore(dist_checkpointing.load(sharded(), str(path), strategy))
        job.note("loaded", 2, state())
        if how == "registered":
            _, missing, unexpected = dist_checkpointing.load(sharded(), str(path), strict="return_all")
            assert not missing and not unexpected, (missing, unexpected)
    for step in range(3 if job.resumes else 1, 5):
        train(step)
        if step == 2:
            if job.rank == 0:
                path.mkdir()
            dist.barrier()
            save()
            job.note("saved", 2, state())
    job.note("trained", 4, state())
    if not job.resumes:
        queue.maybe_finalize_async_calls(blocking=True)
        job.die()
    dist.barrier()  # a process whose peer is gone may be aborted while its group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

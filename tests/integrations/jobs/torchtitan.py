"""torchtitan's own trainer with a tiny llama3. Options: `override` or `url`, and torchtitan's mode of saving.

torchtitan 0.3 is made for GPUs: `on_a_cpu` puts something else in the place of each thing that CPUs lack.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.integrations.jobs.common import Job


def on_a_cpu() -> None:
    """Let torchtitan's trainer run on a CPU. To be called before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    if find_spec("triton") is None:  # kernels that are imported, and never called on a CPU
        sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    if not hasattr(dist, "set_timeout"):  # of torch 2.14
        dist.set_timeout = lambda *arguments: None  # type: ignore[attr-defined]
    stand_ins: dict[str, Any] = {
        "get_device_name": lambda *arguments: "cpu",
        "get_device_properties": lambda *arguments: types.SimpleNamespace(total_memory=1 << 30),
        "reset_peak_memory_stats": lambda *arguments: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *arguments: {},
    }
    for name, stand_in in stand_ins.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, stand_in)
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment,return-value]
    _sum_gradients()


def _sum_gradients() -> None:
    """Gloo can't scale while it sums."""
    before = FSDPModule.set_gradient_divide_factor

    def divided(self: FSDPModule, factor: float) -> None:
        before(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divided  # type: ignore[method-assign]


def without_gpu_parts() -> None:
    """Replace attention and staging, which need a GPU."""
    from torchtitan.components.checkpointer import dcp
    from torchtitan.models.common.attention import FlexAttention

    def attention(
        self: Any, q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **rest: Any
    ) -> Any:
        heads_first = [one.transpose(1, 2) for one in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)

    FlexAttention.forward = attention  # FlexAttention has no backward pass on CPUs
    options = dcp.StagingOptions
    dcp.StagingOptions = lambda **rest: options(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )


def tiny() -> Any:
    """Return torchtitan's configuration of its small llama3, on texts that are here; `--config` names it."""
    import datasets
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Bytes(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, tokenizer_path: Any = None, **rest: Any) -> None:
            super().__init__()
            self.eos_id = 0

        def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
            return [1, *text.encode(), 0]

        def decode(self, tokens: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 2048

    text = Path(__file__).read_text() * 8
    DATASETS["here"] = DatasetConfig(
        path="here",
        loader=lambda path: datasets.Dataset.from_dict({"text": [text, text[::-1]] * 4}),
        sample_processor=lambda sample: sample["text"],
    )
    config = llama3_debugmodel()
    config.tokenizer = Bytes.Config()
    config.dataloader.dataset = "here"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, 5
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.last_save_model_only = False
    return config


def arguments(job: Job, which: str, mode: str) -> list[str]:
    """Return torchtitan's command line."""
    kept = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]
    line = ["--module", tiny.__module__, "--config", "tiny", *kept, "--checkpoint.async_mode", mode]
    if which == "url":
        return [*line, "--dump_folder", "", "--checkpoint.folder", f"dcpz://{job.directory}/checkpoint"]
    nvcomp = 'dcp_nvcomp.integrations.torchtitan.nvcomp={"writer": {"codec": "auto"}}'
    return [*line, "--dump_folder", str(job.directory), "--override.imports", nvcomp]


def watch(job: Job) -> None:
    """Note what is saved and loaded, save only steps up to 3, and die at step 5."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    should_save, load, save = CheckpointManager._should_save, CheckpointManager._load, CheckpointManager._save

    def state(manager: Any) -> Any:
        return manager._flattened_model_states_sd()

    def wanted(self: Any, step: int, last_step: bool = False) -> bool:
        return bool(step <= 3 and not job.resumes and should_save(self, step, last_step))

    def saved(self: Any, step: int, last_step: bool = False) -> Any:
        done = save(self, step, last_step)
        if step <= 3 and not job.resumes:
            job.note("saved", step, state(self))
        if step == 5:
            trained = state(self)
            del trained["dataloader"]  # of it the state tells when it was made, too; what it delivers shows in the rest
            job.note("trained", 5, trained)
            if not job.resumes:
                if self.save_future is not None:
                    self._maybe_wait_for_staging()
                    self._wait_for_saving()
                job.die()
        return done

    def loaded(self: Any, step: int = -1) -> Any:
        done = load(self, step)
        if done:
            job.note("loaded", self.states["train_state"].step, state(self))
        return done

    CheckpointManager._should_save, CheckpointManager._save, CheckpointManager._load = wanted, saved, loaded


def main() -> None:
    job = Job()
    which, mode = job.options
    on_a_cpu()
    without_gpu_parts()
    watch(job)
    from torchtitan.train import main as train

    sys.argv[1:] = arguments(job, which, mode)
    train()


if __name__ == "__main__":
    # torchtitan imports the module that `--module` names, so this one runs under that name too
    from tests.integrations.jobs import torchtitan as this

    this.main()

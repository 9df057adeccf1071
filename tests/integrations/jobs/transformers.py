"""Transformers' Trainer with FSDP2, with `install`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dcp_nvcomp.integrations import install
from tests.integrations.jobs.common import Job


def main() -> None:
    job = Job()
    install(writer={"codec": "auto"})
    arguments = TrainingArguments(
        str(job.directory / "run"),
        use_cpu=True,
        max_steps=5,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
        },
    )
    assert arguments.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as in the job of Accelerate
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))
    seeds = (torch.Generator().manual_seed(number) for number in range(64))
    rows = [torch.randint(0, 64, (8,), generator=seed) for seed in seeds]

    class Notes(TrainerCallback):  # type: ignore[misc]
        def _note(self, what: str, step: int, parts: dict[str, Any]) -> None:
            job.note(what, step, [parts["model"].state_dict(), parts["optimizer"].state_dict()])

        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if job.resumes:
                self._note("loaded", state.global_step, parts)

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            control.should_save = not job.resumes and state.global_step <= 3
            if state.global_step == 5:
                self._note("trained", 5, parts)
                if not job.resumes:
                    job.die()

        def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self._note("saved", state.global_step, parts)

    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[Notes()]
    )
    trainer.train(resume_from_checkpoint=True if job.resumes else None)


if __name__ == "__main__":
    main()

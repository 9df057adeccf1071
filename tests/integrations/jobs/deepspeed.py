"""DeepSpeed: `save_checkpoint` and `load_checkpoint` of ZeRO, through `NvcompCheckpointEngine`.

Options: the stage, then `bf16`, and `plain` to train with DeepSpeed's own engine. Without `plain`, after the last step
a save fails on rank 1, and then rank 1 dies in a save.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import Any, NoReturn
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.utils import logger

from dcp_nvcomp.errors import CheckpointError, StorageError
from dcp_nvcomp.integrations.deepspeed import NvcompCheckpointEngine
from dcp_nvcomp.storage.local.output import PosixReplacement
from tests.integrations.jobs.common import Job, batch, net

SAVED, LAST = 3, 5


def main() -> None:
    job = Job()
    stage, *more = job.options
    logger.setLevel(logging.WARNING)
    # its own all-reduce on CPUs would be compiled first, which takes minutes: gloo's is used instead
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": int(stage)},
            "zero_allow_untested_optimizer": True,
            **({"bf16": {"enabled": True}} if "bf16" in more else {}),
        },
    )
    dtype = next(engine.module.parameters()).dtype
    if "plain" not in more or job.resumes:
        engine.checkpoint_engine = NvcompCheckpointEngine(codec="auto")
    run = str(job.directory / "run")

    def state() -> dict[str, Any]:
        return {"weights": engine.module_state_dict(), "optimizer": engine.optimizer.state_dict()}

    first = 1
    if job.resumes:
        _, client = engine.load_checkpoint(run)
        assert client["noted"].tolist() == [SAVED, 7]
        job.note("loaded", SAVED, state())
        first = SAVED + 1
    for step in range(first, LAST + 1):
        data = batch(step, job.rank).to(dtype)
        engine.backward((engine(data) - data).float().pow(2).mean())
        engine.step()
        if step <= SAVED and not job.resumes:
            engine.save_checkpoint(run, client_state={"noted": torch.tensor([step, 7])})
            job.note("saved", step, state())
    job.note("trained", LAST, state())
    if job.resumes:
        return
    if "plain" in more:
        job.die()
    with patch.object(PosixReplacement, "_finish", fails if job.rank else PosixReplacement._finish):
        try:
            engine.save_checkpoint(run)
        except CheckpointError as error:
            job.note("failed", LAST, "no space" in str(error))
    with patch.object(PosixReplacement, "_finish", dies if job.rank else PosixReplacement._finish):
        engine.save_checkpoint(run)


def fails(output: Any) -> NoReturn:
    raise StorageError("Could not write: no space.", path=output._final)


def dies(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    main()

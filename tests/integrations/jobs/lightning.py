"""Lightning: `Trainer` (options `trainer-fsdp`, `trainer-mp`) and `Fabric` (`fabric-fsdp`, `fabric-mp`)."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dcp_nvcomp.integrations.lightning import (
    NvcompFabricFSDPStrategy,
    NvcompFabricModelParallelStrategy,
    NvcompFSDPStrategy,
    NvcompModelParallelStrategy,
)
from tests.integrations.jobs.common import FEATURES, Job, batch, net

WRITER = {"codec": "auto"}


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model as users of ModelParallelStrategy do."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    """Shard a model with FSDP1, which has to know that it runs on CPUs."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(number))


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind, self.is_sharded = net(), kind, False

    def configure_model(self) -> None:
        if not self.is_sharded:
            self.is_sharded = True
            self.net = fsdp1(self.net) if self.kind == "fsdp" else sharded(self.net, self.device_mesh)

    def training_step(self, _: torch.Tensor, number: int) -> torch.Tensor:
        data = batch(self.global_step, self.global_rank)  # Lightning's own loader begins its epoch again
        loss: torch.Tensor = (self.net(data) - data).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Notes(Callback):  # type: ignore[misc]
    def __init__(self, job: Job) -> None:
        self.job = job

    def _note(self, what: str, trainer: lightning.Trainer) -> None:
        strategy = trainer.strategy
        moments = [strategy.optimizer_state(one) for one in trainer.optimizers]
        self.job.note(what, trainer.global_step, [strategy.lightning_module_state_dict(), moments])

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.job.resumes:
            self._note("loaded", trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, *arguments: Any) -> None:
        if trainer.global_step == 2 and not self.job.resumes:
            trainer.save_checkpoint(self.job.directory / "step-2")
            self._note("saved", trainer)
        if trainer.global_step == 4:
            self._note("trained", trainer)
            if not self.job.resumes:
                self.job.die()


def with_trainer(job: Job, kind: str) -> None:
    strategy: Any
    if kind == "mp":
        strategy = NvcompModelParallelStrategy(writer=WRITER, data_parallel_size=2, tensor_parallel_size=1)
    else:
        strategy = NvcompFSDPStrategy(writer=WRITER, state_dict_type="sharded", use_orig_params=True)
    keeping = ModelCheckpoint(dirpath=job.directory / "kept", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=4,
        callbacks=[keeping, Notes(job)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=False)
    path = str(job.directory / "step-2") if job.resumes else None
    trainer.fit(Module(kind), data, ckpt_path=path, weights_only=False)


def with_fabric(job: Job, kind: str) -> None:
    strategy: Any
    if kind == "mp":
        strategy = NvcompFabricModelParallelStrategy(
            sharded, writer=WRITER, data_parallel_size=2, tensor_parallel_size=1
        )
    else:
        strategy = NvcompFabricFSDPStrategy(writer=WRITER, state_dict_type="sharded", use_orig_params=True)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(fsdp1(net()) if kind == "fsdp" else net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}

    def note(what: str, step: int) -> None:
        weights = dict(model.named_parameters())
        moments = {name: dict(optimizer.state[one]) for name, one in weights.items() if one in optimizer.state}
        job.note(what, step, [weights, moments])

    if job.resumes:
        fabric.load(job.directory / "step-2", state)
        note("loaded", int(state["step"]))
    for step in range(3 if job.resumes else 1, 5):
        data = batch(step, job.rank)
        fabric.backward((model(data) - data).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            fabric.save(job.directory / "step-2", {**state, "step": step})
            note("saved", step)
    note("trained", 4)
    if not job.resumes:
        job.die()


def main() -> None:
    job = Job()
    which, kind = job.options[0].split("-")
    (with_trainer if which == "trainer" else with_fabric)(job, kind)


if __name__ == "__main__":
    main()

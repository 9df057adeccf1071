"""Training with any of torch's optimizers, stopped after three steps and resumed, as jobs of one or more ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_nvcomp import CheckpointManager, TrainingState

# Torch's Adafactor, LBFGS and Rprop make steps of plain tensors only.
SHARDED: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Adadelta": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True},
    "ASGD": {"lr": 0.1, "t0": 2},
    "Muon": {"lr": 0.1},
    "AdamW fused": {"lr": 0.1, "fused": True},
}
PLAIN: dict[str, dict[str, Any]] = {
    **SHARDED,
    "Adafactor": {"lr": 0.1},
    "LBFGS": {"lr": 0.1, "history_size": 2, "line_search_fn": None},
    "Rprop": {"lr": 0.1},
}
CASES = ("all trained", "frozen", "empty group", "extra entries", "tensor lr")
# Torch refuses these: one group only, matrices only, or a learning rate that is no tensor.
IMPOSSIBLE = {("LBFGS", "empty group"), ("ASGD", "tensor lr"), ("Rprop", "tensor lr"), ("SGD", "tensor lr")}


def combinations(names: dict[str, Any]) -> list[tuple[str, str]]:
    """Return optimizers and cases."""
    return [(name, case) for name in names for case in CASES if (name, case) not in IMPOSSIBLE]


class Training:
    """A model of two layers, its optimizer, and gradients that depend on the number of the step only."""

    def __init__(self, name: str, case: str, *, has_resumed: bool) -> None:
        torch.manual_seed(3)
        bias = name != "Muon"
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 8, bias=bias), torch.nn.Linear(8, 6, bias=bias))
        if dist.is_initialized():
            fully_shard(self.model)
        options: dict[str, Any] = dict(PLAIN[name])
        if case == "tensor lr":
            options["lr"] = torch.tensor(options["lr"])
            if name not in ("Adafactor", "Muon", "LBFGS", "AdamW fused"):
                options["foreach"] = False
        if case == "empty group" or (case == "frozen" and has_resumed):
            self.model[0].requires_grad_(False)
        groups: Any = list(self.model.parameters())
        if case == "empty group":
            trained = [one for one in groups if one.requires_grad]
            groups = [{"params": [], "lr": 1e-5, "weight_decay": 0.25}, {"params": trained}]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name.split()[0])(groups, **options)
        self.case, self.number = case, 0
        self.state = TrainingState(self.model, self.optimizer)

    def steps(self, count: int) -> None:
        """Make steps."""
        for _ in range(count):
            self.number += 1
            generator = torch.Generator().manual_seed(self.number)
            for parameter in self.model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                if not parameter.requires_grad:
                    parameter.grad = None
                elif isinstance(parameter, DTensor):
                    parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                else:
                    parameter.grad = gradient
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(lambda: torch.tensor(1.0))
            else:
                self.optimizer.step()

    def until_saved(self) -> None:
        """Train up to the save."""
        self.steps(2)
        if self.case == "frozen":
            self.model[0].requires_grad_(False)
        if self.case == "extra entries":
            for group in self.optimizer.param_groups:
                group.update(initial_lr=0.5, mine={"a": [1, 2], 7: None})
            first = self.optimizer.param_groups[0]["params"][0]
            self.optimizer.state[first]["note"] = torch.arange(3)
        self.steps(1)

    def after(self) -> None:
        """Train on from where it was saved."""
        self.number = 3
        if self.case == "frozen":
            self.model[0].requires_grad_(True)
        self.steps(3)

    def values(self) -> dict[str, Any]:
        """Return everything, on each rank all of it."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            "model": {name: _whole(value) for name, value in self.model.state_dict().items()},
            "state": {names[parameter]: _whole(state) for parameter, state in self.optimizer.state.items()},
            "groups": [
                {key: _whole(value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
        }


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_whole(one) for one in value])
    return value


def train(place: str | os.PathLike[str], names: dict[str, Any]) -> list[Any]:
    """Train with each, save, and train on; return what was saved, and what came of it."""
    found = []
    with CheckpointManager(place, every=1, run_id="job", preemption_signals=()) as manager:
        for number, (name, case) in enumerate(combinations(names), 1):
            training = Training(name, case, has_resumed=False)
            training.until_saved()
            manager.save(number, {"t": training.state})
            manager.wait()
            saved = training.values()
            training.after()
            found.append((saved, training.values()))
    return found


def resume(place: Path, names: dict[str, Any]) -> list[Any]:
    """Restore each, and train on; return the same as `train`."""
    found = []
    with CheckpointManager(place, every=1, run_id="job", preemption_signals=()) as manager:
        for number, (name, case) in enumerate(combinations(names), 1):
            training = Training(name, case, has_resumed=True)
            manager.restore({"t": training.state}, step=number)
            restored = training.values()
            training.after()
            found.append((restored, training.values()))
    return found

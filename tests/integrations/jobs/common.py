"""What the jobs have in common: digests of a state, notes for the test, and a sudden end."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")

FEATURES = 64


def digest(state: Any) -> str:
    """Return a hash of a state: of tensors this rank's part, of what has a `state_dict` that."""
    sums = hashlib.sha256()
    _add(state, sums)
    return sums.hexdigest()


def _add(value: Any, sums: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            sums.update(str(key).encode())
            _add(value[key], sums)
    elif isinstance(value, list | tuple):
        for one in value:
            _add(one, sums)
    elif hasattr(value, "state_dict"):
        _add(value.state_dict(), sums)
    elif hasattr(value, "to_local"):  # DTensor
        _add(value.to_local(), sums)
    elif hasattr(value, "local_shards"):  # ShardedTensor
        _add([shard.tensor for shard in value.local_shards()], sums)
    elif isinstance(value, torch.Tensor):
        sums.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sums.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        sums.update(repr(value).encode())


def _let_go() -> None:
    """Wait for gloo's threads: they abort a process that ends right after a collective (docs/troubleshooting.md)."""
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.3)  # frameworks may hold their groups


class Job:
    """One start of a job: its directory, which start it is, and what it notes for the test."""

    def __init__(self) -> None:
        self.directory, self.how = Path(sys.argv[1]), sys.argv[2]
        self.resumes = self.how == "resume"
        self.options = sys.argv[3:]
        self.rank = int(os.environ["RANK"])
        torch.set_num_threads(1)
        atexit.register(_let_go)

    def note(self, what: str, step: int, state: Any) -> None:
        """Note the digest of the state for the test."""
        with open(self.directory / f"notes-{self.rank}.jsonl", "a") as file:
            print(json.dumps([self.how, what, step, digest(state)]), file=file)

    def die(self) -> NoReturn:
        """End as if the machine had failed, with the processes that write for this one, once all ranks are here."""
        for process in multiprocessing.active_children():
            process.kill()
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def net() -> nn.Sequential:
    """Return a small model, the same on each rank and at each start."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.ReLU(), nn.Linear(2 * FEATURES, FEATURES))


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the data of a step."""
    return torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))


class Sharded:
    """A model that is sharded by FSDP2, its optimizer, and their state as DCP's functions give it."""

    def __init__(self, job: Job) -> None:
        self.rank, self.model = job.rank, net()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def train(self, step: int) -> None:
        data = batch(step, self.rank)
        (self.model(data) - data).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def nvrx_queue(**options: Any) -> Any:
    """Return a queue of nvidia-resiliency-ext for CPUs: the process of newer ones asks for a GPU otherwise."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters:
        options["cpu_shm_mode"] = True
    return AsyncCallsQueue(**options)


def stand_in_for_cuda() -> None:
    """Let code that takes a GPU for granted find the CPU in its place."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.device_count = lambda: 1
    torch.cuda.synchronize = lambda *arguments: None
    torch.cuda.set_device = lambda *arguments: None

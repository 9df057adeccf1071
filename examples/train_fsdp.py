"""Train a small GPT with FSDP2 as a run of checkpoints: kept, copied to other nodes, resumed on any number of ranks.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --checkpoints runs/demo --every 100 --steps 200
    torchrun --nproc-per-node 2 examples/train_fsdp.py --checkpoints runs/demo --every 100 --steps 300

The second command goes on where the first one ended, or died. `--checkpoints` takes a directory or a URL such as
s3://bucket/run.
With `--fast /dev/shm/$USER/demo --fast-every 10 --copies 1` each node also saves to its own memory, and its peer has a
copy. What is particular to dcp_nvcomp is in `main`; the rest is any FSDP2 training script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_gpt import TinyGPT, draw_batch, load_corpus
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import dcp_nvcomp
from dcp_nvcomp import Best, CheckpointManager, Keep, TrainingState


def load(training: Training, path: str) -> None:
    dcp_nvcomp.load(training.state_dict(), path)


class Progress(Stateful):
    """Progress of the training: the step, and the generator that draws the batches."""

    def __init__(self, seed: int) -> None:
        self.step = 0
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.generator.set_state(state_dict["generator"])


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where there are instructions for it: on a CPU without, it takes forty times as long as float32.

    What is saved is the same: FSDP2 keeps parameters and the optimizer's state in float32.
    """
    is_fast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
    return torch.bfloat16 if is_fast else torch.float32


class Training:
    """A sharded model with its optimizer, and where it is in its data."""

    def __init__(self, device: torch.device, *, width: int, depth: int, seed: int = 0) -> None:
        self.device = device
        torch.manual_seed(seed)
        self.model = TinyGPT(width=width, depth=depth).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.progress = Progress(seed)
        self.corpus = load_corpus()

    def state_dict(self) -> dict[str, Any]:
        return {"train": TrainingState(self.model, self.optimizer), "progress": self.progress}

    def train_step(self, global_batch: int) -> float:
        """One optimizer step; returns the mean loss over all ranks."""
        self.progress.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, self.progress.step / 50)
        inputs, targets = draw_batch(
            self.corpus, self.progress.generator, global_batch, dist.get_rank(), dist.get_world_size()
        )
        logits = self.model(inputs.to(self.device)).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


def fingerprint(state: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """SHA-256 of every full tensor of a state, gathered from its shards, and what else there is, as text."""
    found: dict[str, str] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Stateful):
            value = value.state_dict()
        if isinstance(value, dict):
            found.update(fingerprint(value, f"{name}."))
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            data = full.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found[name] = hashlib.sha256(data.numpy()).hexdigest()
        else:
            found[name] = repr(value)
    return found


def start_distributed() -> torch.device:
    """NCCL where every rank has a GPU of its own; else gloo, on shared GPUs or on the CPU."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu_count = torch.cuda.device_count()
    if gpu_count == 0:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % gpu_count)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu_count >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    return device


def end_distributed() -> None:
    dist.barrier()  # gloo aborts a rank that leaves while another one is still at work
    dist.destroy_process_group()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=8, help="sequences a step, over all ranks")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--checkpoints", required=True, help="directory or URL; its checkpoints are step-N in it")
    parser.add_argument("--every", type=int, default=100, metavar="STEPS", help="between checkpoints there")
    parser.add_argument("--fast", help="directory in this node's memory or on its disk")
    parser.add_argument("--fast-every", type=int, metavar="STEPS", help="between checkpoints there")
    parser.add_argument("--copies", type=int, default=0, help="how many other nodes have what is in the fast tier")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--record", type=Path, help="JSON lines: each loss, and hashes of what is saved and loaded")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="kill this node's ranks after this step")
    return parser.parse_args()


class Recorder:
    """Prints for people and, if asked, writes JSON lines for the demo; on rank 0 only."""

    def __init__(self, path: Path | None) -> None:
        self.lines = path.open("w", buffering=1) if path and dist.get_rank() == 0 else None

    def say(self, message: str) -> None:
        if dist.get_rank() == 0:
            print(message, flush=True)

    def gather(self, nbytes: Mapping[str, int]) -> dict[str, int]:
        """Add up the sizes of all ranks, by name."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dict(nbytes))
        return {name: sum(one.get(name, 0) for one in found) for name in sorted({*found[0]}.union(*found))}

    def record(self, **fields: Any) -> None:
        if self.lines:
            self.lines.write(json.dumps(fields) + "\n")


def main() -> None:
    arguments = parse_arguments()
    device = start_distributed()
    training = Training(device, width=arguments.width, depth=arguments.depth)
    progress, state = training.progress, training.state_dict()
    recorder = Recorder(arguments.record)
    parameter_count = sum(parameter.numel() for parameter in training.model.parameters())
    recorder.say(f"{parameter_count / 1e6:.1f} M parameters on {dist.get_world_size()} ranks, {device.type}")

    with CheckpointManager(
        arguments.checkpoints,
        every=arguments.every,
        keep=Keep(last=2, best=Best("loss", "min")),
        fast=arguments.fast,
        fast_every=arguments.fast_every,
        copies=arguments.copies,
    ) as manager:
        restored = manager.restore(state)  # None at the first start
        if restored is not None:
            recorder.say(str(restored))
            sources = recorder.gather(restored.nbytes)
            if arguments.record:
                recorder.record(step=restored.step, loaded=fingerprint(state), sources=sources)
        while progress.step < arguments.steps and not manager.preempted:
            start = time.perf_counter()
            loss = training.train_step(arguments.global_batch)
            step, seconds = progress.step, time.perf_counter() - start
            recorder.record(step=step, loss=loss, seconds=seconds)
            if step % arguments.print_every == 0:
                recorder.say(f"step {step:4d}  loss {loss:.4f}  {seconds:.2f} s")
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss})
                if arguments.record:
                    recorder.record(step=step, saved=fingerprint(state))
            if step == arguments.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    for saved in manager.report().saves[-2:]:
        recorder.say(str(saved))
    recorder.say(f"look at it: dcp-nvcomp ls {arguments.checkpoints}")
    end_distributed()


if __name__ == "__main__":
    main()

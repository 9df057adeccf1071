"""Small training jobs for the tests of runs: plain functions, as ranks of a gloo group call them.

Nodes are simulated: ranks `2n` and `2n + 1` are on node n, which has a directory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_nvcomp import CheckpointManager
from dcp_nvcomp.runs import list_run
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem

SHAPE = (48, 64)


def full_of(step: int) -> torch.Tensor:
    """Return what the weights are after a step, whatever the number of ranks."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def state_of(step: int, replicas: int = 1) -> dict[str, Any]:
    """Return the state after a step: a tensor that is sharded (within each replica), a replicated one, a number."""
    if not dist.is_initialized():
        return {"w": full_of(step), "bias": full_of(step + 1000)[0].clone(), "step": step}
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    weight = distribute_tensor(full_of(step), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    return {"w": weight, "bias": full_of(step + 1000)[0].clone(), "step": step}


def assert_state_of(step: int, state: dict[str, Any], replicas: int = 1) -> None:
    """Check that a state is that of a step, bit for bit."""
    expected = state_of(step, replicas)
    for key in ("w", "bias"):
        found, wanted = (
            one[key].to_local() if isinstance(one[key], DTensor) else one[key] for one in (state, expected)
        )
        assert torch.equal(found, wanted), (key, step)
    assert state["step"] == step


def fast_of(place: Path, node: int) -> Path:
    """Return the directory of a node's fast tier."""
    return place / f"node-{node}"


def manager_of(place: Path, *, root: str | None = None, per_node: int = 2, **options: Any) -> CheckpointManager:
    """Return a manager of this rank, with a fast tier if `fast_every` is given."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    node = rank // per_node
    if "fast_every" in options:
        options["fast"] = fast_of(place, node)
    return CheckpointManager(
        root or str(place / "run"), node=f"node {node}", run_id="job", preemption_signals=(), **options
    )


def save_steps(
    place: Path, steps: list[int], *, state_of: Callable[[int], dict[str, Any]] = state_of, **options: Any
) -> dict[str, Any]:
    """Save steps, and return what this rank's manager reports."""
    with manager_of(place, **options) as manager:
        for step in steps:
            state = state_of(step)
            manager.save(step, state, metrics={"loss": 1.0 / (step + 1)})
            spoil(state)
        manager.wait()
        return reported(manager)


def reported(manager: CheckpointManager) -> dict[str, Any]:
    """Return what a manager reports of its saves."""
    report = manager.report()
    return {
        "tiers": {saved.step: set(saved.tiers) for saved in report.saves},
        "uploaded": sum(saved.uploaded_nbytes for saved in report.saves),
        "copied": sum(saved.copied_nbytes for saved in report.saves),
        "differing": report.differing,
    }


def steps_in(run: Path) -> list[int | None]:
    """Return the steps that are in a run."""
    return [step.step for step in list_run(run).steps]


@contextmanager
def durable_reads(place: Path) -> Iterator[list[str]]:
    """Collect the paths of files of steps in the durable tier that this process reads."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "read_into", "read_all"):
            call = getattr(PosixFilesystem, name)

            def counted(filesystem: PosixFilesystem, file: str, *args: Any, call: Any = call, **kwargs: Any) -> Any:
                if f"{place}/run/step-" in filesystem.location(file):
                    found.append(filesystem.location(file))
                return call(filesystem, file, *args, **kwargs)

            patch.setattr(PosixFilesystem, name, counted)
        yield found


def restore(place: Path, step: int | None, **options: Any) -> dict[str, Any]:
    """Restore, check the state, and return where its files came from; `step` is what is expected, None for nothing."""
    state = state_of(987654)
    with manager_of(place, **options) as manager:
        restored = manager.restore(state)
        if step is None:
            assert restored is None
            return {}
        assert restored is not None and restored.step == step, restored
        assert_state_of(step, state)
        manager.wait()  # for uploads that go on
        return {**restored.files, "damaged": restored.damaged}


def spoil(state: dict[str, Any]) -> None:
    """Change a state, as the next training step does."""
    for value in state.values():
        if isinstance(value, dict):
            spoil(value)
        elif isinstance(value, torch.Tensor):
            (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)

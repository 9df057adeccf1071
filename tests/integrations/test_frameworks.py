"""Frameworks whose job is saved, killed and resumed, and nothing else: one row for each way to save.

Those marked `frameworks` need `make test-frameworks`. Lightning, Megatron-core and torchtitan have files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start


@dataclass(frozen=True)
class Row:
    """A job, and what is there in the end."""

    job: str
    packages: tuple[tuple[str, str], ...]  # what it needs, and what pip calls that
    saved: int  # the step that it resumes from
    last: int
    ours: tuple[str, ...]  # checkpoints; of the last one a dead save's file is cleaned
    options: tuple[str, ...] = ()
    there: tuple[str, ...] = ()  # all that begins like the first of them


ACCELERATE = ("accelerate", "accelerate==1.15.0")
STEPS = ("step-1", "step-2")
PARTS = ("pytorch_model_fsdp_0", "optimizer_0")
ROWS = {
    "accelerate": Row(
        "accelerate",
        (ACCELERATE,),
        3,
        5,
        tuple(f"checkpoints/checkpoint_2/{part}" for part in PARTS),
        there=("checkpoints/checkpoint_1", "checkpoints/checkpoint_2"),
    ),
    "transformers": Row(
        "transformers",
        (("transformers", "transformers==5.24.0"), ACCELERATE),
        3,
        5,
        tuple(f"run/checkpoint-3/{part}" for part in PARTS),
        there=("run/checkpoint-2", "run/checkpoint-3"),
    ),
    **{
        f"resiliency, {queue}": Row(
            "resiliency",
            (("nvidia_resiliency_ext", "--no-deps nvidia-resiliency-ext==0.4.1"),),
            2,
            4,
            STEPS,
            options=(queue,),
        )
        for queue in ("fork", "persistent")
    },
    "torchtune": Row(
        "torchtune", (("torchtune", "torchtune==0.6.1 torchao==0.15.0"),), 2, 4, ("dist_epoch_1", "dist_epoch_2")
    ),
}


# The Trainer of Transformers saves as Accelerate does.
MARKS = {"accelerate": pytest.mark.slow, "resiliency, fork": pytest.mark.slow, "torchtune": pytest.mark.frameworks}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.ci)) for name in ROWS])
def test_saved_killed_and_resumed(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    for package, requirement in row.packages:
        needs(package, requirement)
    start(row.job, tmp_path, "train", *row.options, killed=True)
    start(row.job, tmp_path, "resume", *row.options)
    check_resumed(tmp_path, saved=row.saved, last=row.last)
    if row.there:
        found = tmp_path.glob(f"{row.there[0][:-1]}*")
        assert sorted(str(path.relative_to(tmp_path)) for path in found) == list(row.there)
    for checkpoint in row.ours:
        check_ours(tmp_path / checkpoint)
    check_cleaned(tmp_path, tmp_path / row.ours[-1])

"""What is large, or not there, is imported by those who use it alone: torch, what is for a GPU, and extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcp_nvcomp import Keep, save
from dcp_nvcomp.runs import prune_run

SAVE_AND_LOAD = """
import sys, warnings
warnings.filterwarnings("error")
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
{before}
import torch, torch.distributed.checkpoint as dcp
from dcp_nvcomp import NvcompReader, NvcompWriter
state, into = {{"w": torch.randn(1 << 19).bfloat16()}}, {{"w": torch.zeros(1 << 19).bfloat16()}}
dcp.save(state, storage_writer=NvcompWriter(sys.argv[1]))
dcp.load(into, storage_reader=NvcompReader(sys.argv[1]))
assert torch.equal(state["w"], into["w"])
found = sys.modules
"""

ABSENT = "sys.modules.update(dict.fromkeys(['s3fs', 'matplotlib', 'tqdm', 'rich', 'typer', 'nvidia.nvcomp', 'cupy']))"

COMMAND = """
import sys
from dcp_nvcomp.cli.app import app
for arguments in (["--help"], ["--version"], ["inspect", "--help"], ["ls", "--help"]):
    try:
        app(arguments)
    except SystemExit:
        found = sys.modules
"""

PROGRAMS = {
    "a save and a load": (SAVE_AND_LOAD.format(before=""), ("nvidia.nvcomp", "cupy")),
    "they are not there": (SAVE_AND_LOAD.format(before=ABSENT), ()),
    "the package": ("import sys, dcp_nvcomp; found = set(sys.modules); dcp_nvcomp.NvcompWriter", ("torch",)),
    "help and version": (COMMAND, ("torch", "numpy", "fsspec")),
    "ls of what was seen": (
        "import sys, dcp_nvcomp; dcp_nvcomp.runs.list_run(sys.argv[1]); found = sys.modules",
        ("torch",),
    ),
    "metrics": (
        "import sys, dcp_nvcomp.integrations.metrics; found = sys.modules",
        ("wandb", "prometheus_client", "opentelemetry", "tensorboard"),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_not_imported(tmp_path: Path, name: str) -> None:
    program, not_imported = PROGRAMS[name]
    if name == "ls of what was seen":
        save({"w": torch.zeros(1000)}, tmp_path / "step-1", no_dist=True)
        prune_run(tmp_path, Keep())  # writes down what it has seen
    check = f"\nassert not [name for name in found if name.startswith({not_imported!r})]"
    command = [sys.executable, "-c", program + check, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr

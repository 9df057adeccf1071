"""The CPU path needs neither nvCOMP nor CuPy, and does not import them where they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAVE_AND_LOAD = """
import sys, warnings
warnings.filterwarnings("error")
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
{before}
import torch, torch.distributed.checkpoint as dcp
from dcp_nvcomp import NvcompReader, NvcompWriter
state, into = {{"w": torch.randn(1 << 19).bfloat16()}}, {{"w": torch.zeros(1 << 19).bfloat16()}}
dcp.save(state, storage_writer=NvcompWriter({path!r}))
dcp.load(into, storage_reader=NvcompReader({path!r}))
assert torch.equal(state["w"], into["w"])
{after}
"""


def run(path: Path, before: str = "", after: str = "") -> None:
    program = SAVE_AND_LOAD.format(path=str(path), before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_gpu_packages_absent(tmp_path: Path) -> None:
    run(tmp_path, before="sys.modules['nvidia.nvcomp'] = sys.modules['cupy'] = None")


def test_gpu_packages_are_not_imported(tmp_path: Path) -> None:
    run(tmp_path, after="assert not [name for name in sys.modules if name.startswith(('nvidia.nvcomp', 'cupy'))]")


def test_what_only_some_need_is_not_imported(tmp_path: Path) -> None:
    run(tmp_path, before="sys.modules.update(dict.fromkeys(['s3fs', 'matplotlib', 'tqdm']))")

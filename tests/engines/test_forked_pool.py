"""A forked child leaves its parent's engines alone: CUDA does not work there, not even to free what it holds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import torch
from dcp_nvcomp.engines.cuda import pool
from dcp_nvcomp.engines.cuda.engine import EnginePolicy
from tests.engines.kernels_on_cpu import ReferenceKernels
from tests.engines.nvcomp_stand_in import StandInDevice

class Device(StandInDevice):
    def __del__(self):
        os.write(1, f"{name} ends {id(self)}\\n".encode())

name = "parent"
pool._pool = pool.EnginePool(lambda device: Device(ReferenceKernels()), lambda engine, device: None)
pool.atexit.register(pool._drop_engines)
def fork():
    global name
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        return
    name = "child"
    CHILD
    sys.exit(0)

def lend():
    return pool.shared_pool().lend(torch.device("cpu"), EnginePolicy(1 << 20))

with lend(), lend():
    pass
fork()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(
    "child",
    [
        pytest.param("pass", id="that just ends", marks=pytest.mark.slow),
        pytest.param(
            "import gc; gc.collect(); assert pool.shared_pool() is pool.shared_pool() is not None",
            id="that makes a pool of its own",
        ),
    ],
)
def test_a_child(child: str) -> None:
    script = SCRIPT.replace("CHILD", child)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ends = done.stdout.splitlines()
    assert len(ends) == 2 and all(end.startswith("parent ends") for end in ends), ends

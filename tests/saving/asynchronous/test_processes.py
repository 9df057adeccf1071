"""async_save and the end of a process, or its fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from dcp_nvcomp import async_save
from dcp_nvcomp.saving.process_state import process_state
from tests.checkpoints import assert_loads, file_names
from tests.states import constant_state


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.ci
def test_a_process_that_ends_finishes_its_save_first(tmp_path: Path) -> None:
    """And removes what it replaced."""
    script = """
        import sys, torch
        from dcp_nvcomp import async_save
        for seed in range(2):
            state = {f"w{n}": torch.full((1000,), float(n + seed)) for n in range(20)}
            async_save(state, sys.argv[1], no_dist=True, single_file_per_rank=False)
        """
    done = run(script, str(tmp_path))
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert_loads(tmp_path, {f"w{n}": torch.full((1000,), float(n + 1)) for n in range(20)})
    assert len(file_names(tmp_path)) == 22


def test_a_save_that_fails_while_the_process_ends_says_so(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from dcp_nvcomp import async_save
        from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
        def publish(*arguments, **options): raise OSError(5, "on purpose")
        PosixFilesystem.publish = publish
        async_save({"w": torch.ones(1000)}, sys.argv[1], no_dist=True)
        """
    done = run(script, str(tmp_path))
    assert "An asynchronous save failed" in done.stderr and "on purpose" in done.stderr
    assert ".metadata" not in file_names(tmp_path)


def test_storage_works_while_the_interpreter_waits_for_a_save(tmp_path: Path) -> None:
    """No thread can be started any more then, and each file has to be removed or looked at all the same."""
    script = """
        import sys, threading
        from dcp_nvcomp.storage.open import open_filesystem
        def late():
            threading.main_thread().join()
            print(open_filesystem(sys.argv[1]).map(str, range(3)))
        threading.Thread(target=late).start()
        """
    done = run(script, str(tmp_path))
    assert done.stdout.strip() == "['0', '1', '2']" and not done.stderr, done.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_saves_on_its_own(tmp_path: Path) -> None:
    saving = async_save(constant_state(1), tmp_path / "parent", no_dist=True)
    saving.upload_completion.result(100)
    mine = process_state()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert process_state() is not mine and not process_state().stores.plain.nbytes
            async_save(constant_state(2), tmp_path / "child", no_dist=True).upload_completion.result(100)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert_loads(tmp_path / "child", constant_state(2))
    assert process_state() is mine
    async_save(constant_state(3), tmp_path / "parent", no_dist=True).upload_completion.result(100)
    assert_loads(tmp_path / "parent", constant_state(3))

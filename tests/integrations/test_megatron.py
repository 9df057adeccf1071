"""Megatron-core's `dist_checkpointing`: with our strategies, with ours as its defaults, and asynchronously."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start


@pytest.mark.parametrize("how", ["strategies", "registered", "asynchronous"])
def test_saved_killed_and_resumed(tmp_path: Path, how: str) -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    start("megatron", tmp_path, "train", how, killed=True)
    start("megatron", tmp_path, "resume", how)
    check_resumed(tmp_path, saved=2, last=4)
    path = tmp_path / "iter_0000002"
    check_ours(path)
    check_cleaned(tmp_path, path)
    assert {"common.pt", "metadata.json"} <= {one.name for one in path.iterdir()}


WRONG = """
from dcp_nvcomp import ConfigurationError
from dcp_nvcomp.integrations.megatron import NvcompLoadStrategy, NvcompSaveStrategy, register

for make, options in (
    (NvcompSaveStrategy, {"writer": {"codek": "auto"}}),
    (NvcompLoadStrategy, {"reader": {"verify": "nosuch"}}),
    (register, {"reader": {"thread_counts": 3}}),
):
    try:
        make(**options)
    except ConfigurationError as error:
        print(error)
"""


def test_wrong_options_fail_at_once() -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    # elsewhere: the import of Megatron-core warns of all that is not installed
    done = subprocess.run(
        [sys.executable, "-c", WRONG], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    codec, verify, threads = done.stdout.splitlines()
    assert "did you mean 'codec'" in codec and "nosuch" in verify and "did you mean 'thread_count'" in threads

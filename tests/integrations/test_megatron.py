"""Megatron-core's `dist_checkpointing`: with our strategies, with ours as its defaults, and asynchronously.

In the environment of `make test` this is Megatron-core 0.16; `make test-frameworks` runs it with a newer one.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, notes, start


def _version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0, 16)


# Since 0.17 there are two ways to save asynchronously.
ASYNCHRONOUS = ["mcore"] if _version() < (0, 17) else ["mcore", "nvrx"]


@pytest.mark.parametrize("how", ["registered", *ASYNCHRONOUS])
def test_saved_killed_and_resumed(tmp_path: Path, how: str) -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    start("megatron", tmp_path, "train", how, killed=True)
    start("megatron", tmp_path, "resume", how)
    check_resumed(tmp_path, saved=2, last=4)
    path = tmp_path / "iter_0000002"
    check_ours(path)
    check_cleaned(tmp_path, path)
    assert (path / "metadata.json").exists()
    assert (path / "common.pt").exists() == (_version() < (0, 19))


@pytest.mark.parametrize("how", ["strategies", *ASYNCHRONOUS])
def test_killed_in_a_save_and_resumed_on_more_ranks(tmp_path: Path, how: str) -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    start("megatron_resharded", tmp_path, "train", how, killed=True)
    start("megatron_resharded", tmp_path, "resume", how, ranks=3)
    found = notes(tmp_path, ranks=3)
    for rank in range(3):
        for step in (1, 2):  # the second was saved on three ranks, to the directory of the dead save
            assert found[rank, "resume", "loaded", step] == found[rank, "resume", "right", step]
    for step in (1, 2):
        check_ours(tmp_path / f"iter_000000{step}")


def _printed(script: str) -> list[str]:
    """Run a script elsewhere: the import of Megatron-core warns of all that is not installed."""
    needs("megatron.core", "megatron-core==0.16.1")
    done = subprocess.run(
        [sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


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
    codec, verify, threads = _printed(WRONG)
    assert "did you mean 'codec'" in codec and "nosuch" in verify and "did you mean 'thread_count'" in threads


UNKNOWN = """
import megatron.core
from megatron.core.dist_checkpointing.strategies import torch as strategies

from dcp_nvcomp import ConfigurationError
from dcp_nvcomp.integrations.megatron import NvcompLoadStrategy, NvcompSaveStrategy, register

def refusals():
    for make in (NvcompSaveStrategy, NvcompLoadStrategy, register):
        try:
            make()
        except ConfigurationError as error:
            print(error)

real = megatron.core.__version__
megatron.core.__version__ = "0.20.1"
refusals()
megatron.core.__version__ = real
del strategies._get_filesystem_reader
refusals()
"""


def test_a_megatron_that_is_not_known_is_refused_before_a_save() -> None:
    printed = _printed(UNKNOWN)
    assert len(printed) == 6
    assert all("Megatron-core 0.20.1" in line and "0.16 to 0.19" in line for line in printed[:3])
    assert all("has no megatron.core.dist_checkpointing.strategies.torch._get" in line for line in printed[3:])

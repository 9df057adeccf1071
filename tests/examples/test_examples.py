"""Every example runs and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str | Path, **environment: str) -> str:
    """Runs a Python program to its end, without a warning that points at our code; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not re.search(r"dcp_nvcomp/\S+\.py:\d+: \w*Warning", done.stderr), done.stderr
    return done.stdout


PROGRAMS = [program for program in sorted(EXAMPLES.glob("*.py")) if "__main__" in program.read_text()]


# one process for all of them: most of the time is PyTorch's import
HELP = """
import contextlib, runpy, sys
sys.path.insert(0, sys.argv.pop(1))
for program in sys.argv[1:]:
    sys.argv = [program, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(program, run_name="__main__")
"""


def test_they_say_how_they_are_used() -> None:
    printed = run("-c", HELP, EXAMPLES, *PROGRAMS)
    assert re.findall(r"^usage: (\S+)", printed, re.MULTILINE) == [program.name for program in PROGRAMS]


def test_save_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(EXAMPLES / "save_load.py")
    assert "equal to what was saved\nlook at it: dcp-nvcomp inspect examples-out/save-load" in printed
    assert (tmp_path / "examples-out" / "save-load" / ".metadata").exists()


def test_a_demo_is_published(tmp_path: Path) -> None:
    output, page = tmp_path / "demo-out", tmp_path / "docs" / "performance" / "demo.md"
    output.mkdir()
    page.parent.mkdir(parents=True)
    (output / "table.md").write_text("| a |\n")
    (output / "demo.png").write_bytes(b"drawn")
    page.write_text((EXAMPLES.parent / "docs" / "performance" / "demo.md").read_text())
    sys.path.insert(0, str(EXAMPLES))
    try:
        from demo_report import publish
    finally:
        sys.path.remove(str(EXAMPLES))
    publish(output, tmp_path)
    assert "<!-- measured by make demo -->\n| a |\n<!-- end -->\n\nMB are" in page.read_text()
    assert (tmp_path / "docs" / "images" / "demo.png").read_bytes() == b"drawn"


@pytest.mark.tools
def test_reshard(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "reshard.py", tmp_path / "checkpoint")
    assert "rows loaded as (1000, 150)" in printed
    assert "tiles loaded as (500, 300)" in printed
    assert "whole loaded as (1000, 300)" in printed


def ranks(count: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]


@pytest.mark.parametrize(
    ("steps", "saves"), [pytest.param(7, 3, marks=pytest.mark.tools), pytest.param(400, 200, marks=pytest.mark.slow)]
)
def test_train_async(tmp_path: Path, steps: int, saves: int) -> None:
    """With collectives of training beside those of the saves."""
    size = ["--width", "16", "--depth", "1", "--steps", str(steps), "--save-every", "2"]
    printed = run(*ranks(2), EXAMPLES / "train_async.py", "--checkpoints", tmp_path, *size)
    assert printed.count("saving in the background") == printed.count("saved ") == saves
    assert f"loaded step {2 * saves}" in printed


@pytest.mark.tools
def test_train_deepspeed(tmp_path: Path) -> None:
    common = ["--checkpoints", tmp_path, "--width", "16", "--depth", "1", "--save-every", "2"]
    for steps in ("4", "8"):
        program = EXAMPLES / "train_deepspeed.py"
        printed = run(*ranks(2), program, *common, "--steps", steps, DS_ACCELERATOR="cpu")
        assert len(re.findall(r"step \d+  loss \S+  saved", printed)) == 2
    assert "goes on after step 4" in printed


@pytest.mark.tools
def test_train_torch_checkpointing(tmp_path: Path) -> None:
    common = ["--checkpoints", tmp_path, "--width", "16", "--depth", "1", "--save-every", "2"]
    for steps in ("4", "8"):
        printed = run(*ranks(2), EXAMPLES / "train_torch_checkpointing.py", *common, "--steps", steps)
        assert printed.count("saving in the background") == 2
    assert "goes on after step 4" in printed and len(list(tmp_path.glob("step-*/.commit.json"))) == 4


@pytest.mark.tools
@pytest.mark.parametrize(
    "store", ["disk", *(pytest.param(f"{one}s3_store", marks=pytest.mark.s3) for one in ("", "real_"))]
)
def test_run(tmp_path: Path, store: str, request: pytest.FixtureRequest) -> None:
    url, options, keys = str(tmp_path), list[str](), dict[str, str]()
    if store != "disk":
        url, given = request.getfixturevalue(store)
        options = ["--endpoint-url", given["endpoint_url"]]
        keys = {"AWS_ACCESS_KEY_ID": given["key"], "AWS_SECRET_ACCESS_KEY": given["secret"]}
        printed = run(EXAMPLES / "s3.py", f"{url}/step-1", *options, **keys)
        assert "loaded 1.weight alone" in printed
    common = [EXAMPLES / "run.py", f"{url}/run", "--fast", tmp_path / "fast", *options]
    first = run(*ranks(4), *common, "--steps", "41", **keys)
    second = run(*ranks(2), *common, "--steps", "71", **keys)
    assert "steps [20, 40], 656 samples" in first
    assert "goes on after step 40, 656 samples" in second
    assert "steps [40, 60, 70], 896 samples" in second


@pytest.mark.tools
@pytest.mark.timeout(1200)
def test_demo_and_train_fsdp(tmp_path: Path) -> None:
    quick = ["--every", "6", "--fast-every", "2", "--width", "32", "--repeats", "1"]
    printed = run(EXAMPLES / "demo.py", "--output", tmp_path, *quick)
    assert re.search(r"Step 10 was restored bit for bit: .* MB from own, .* MB from peer\.\n", printed)
    assert re.search(r"Step 12 was restored bit for bit: .*; [0-9.]+ MB from durable\.\n", printed)
    assert printed.count("The loss goes on from there") == 2
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "| exp_avg_sq |" in (tmp_path / "table.md").read_text()

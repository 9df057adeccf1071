"""The acceptance run on its stand-in, and its runner among steps that raise, crash and hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_pages, pages
from benchmarks.gpu_acceptance import build, merge, runner
from benchmarks.gpu_acceptance.results import TABLES
from benchmarks.gpu_acceptance.runner import FILE_NAME, Runner
from benchmarks.gpu_acceptance.steps import STEPS, Step
from benchmarks.gpu_codecs import EngineWork
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine
from tests.engines.kernels_on_cpu import ReferenceKernels
from tests.engines.nvcomp_stand_in import StandInDevice

ROOT = Path(__file__).parents[2]

# What a GPU host need not have; pytest's plugins, which it may lack too, are switched off by a variable.
LACKING = ("s3fs", "moto", "boto3", "atheris", "safetensors", "rich", "typer", "tqdm", "matplotlib", "zipnn")
BLOCKER = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {LACKING} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a whole run on a host that has little more than torch, numpy and pytest."""
    folder = tmp_path_factory.mktemp("acceptance")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--stand-in", "--out", str(folder / "out")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (folder / "out").iterdir()] == [FILE_NAME]
    found: dict[str, Any] = json.loads((folder / "out" / FILE_NAME).read_text())
    return found


@pytest.mark.tools
def test_every_step_runs_on_the_stand_in(result: dict[str, Any]) -> None:
    assert result["stand_in"] and result["complete"]
    assert list(result["steps"]) == [step.name for step in STEPS]
    statuses = {name: step["status"] for name, step in result["steps"].items()}
    assert statuses == {step.name: "observed" if step.may_fail else "passed" for step in STEPS}
    for name, step in result["steps"].items():
        assert {probe["status"] for probe in step["probes"].values()} <= {"passed", "skipped"}, name
    assert result["tables"].keys() == TABLES.keys()
    for name, table in result["tables"].items():
        assert all(row.keys() == table["columns"].keys() for row in table["rows"]), name
    assert not any(row["encoded_wrong"] + row["both_wrong"] for row in result["tables"]["correct"]["rows"])


@pytest.mark.tools
def test_the_page_is_made_from_it_unless_it_is_the_stand_ins(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    places = "".join(f"<!-- gpu {part} -->\nold\n<!-- end -->\n" for part in ("summary", "section"))
    without = pages.filled(places)
    assert "no figures" in without and "old" not in without
    for part, document in {"summary": "performance.md", "section": "performance/gpu.md"}.items():
        assert f"<!-- gpu {part} -->" in (ROOT / "docs" / document).read_text()
    (tmp_path / gpu_pages.RESULT_NAME).write_text(json.dumps(result))
    with pytest.raises(ValueError, match="stand-in"):
        pages.filled(without)
    machine = result["machine"] | {"gpu": "Example GPU", "gpu_memory_nbytes": 8 << 30}
    as_of_a_gpu = result | {"stand_in": False, "machine": machine}
    (tmp_path / gpu_pages.RESULT_NAME).write_text(json.dumps(as_of_a_gpu))
    filled = pages.filled(without)
    assert "no figures" not in filled and "Example GPU" in filled
    for title, columns in TABLES.values():
        assert title in filled
        assert all(header in filled for header, _ in columns.values()), title
    for step in STEPS:
        assert f"| {step.name} | {step.about} |" in filled
    assert pages.filled(filled) == filled


def a_step(name: str, module: str, **more: Any) -> Step:
    return Step(name, "for a test", module, more.pop("seconds", 60.0), more.pop("probe_seconds", 20.0), **more)


@pytest.mark.tools
def test_a_step_that_raises_crashes_or_hangs_leaves_the_others_done(tmp_path: Path) -> None:
    steps = [
        a_step("wild", "tests.benchmarks.acceptance_steps", probe_seconds=3.0, seconds=60.0),
        a_step("no module", "tests.benchmarks.no_such_module"),
        a_step("tame", "benchmarks.gpu_acceptance.hardware"),
        a_step("too slow", "tests.benchmarks.acceptance_steps", seconds=3.0),
        a_step("short of time", "tests.benchmarks.acceptance_steps", seconds=1.0),
    ]
    seen: list[tuple[str, dict[str, str]]] = []

    def say(text: str) -> None:
        found = json.loads((tmp_path / FILE_NAME).read_text())["steps"]["wild"]["probes"]
        seen.append((text, {name: probe["status"] for name, probe in found.items()}))

    result = Runner(tmp_path, {}, stand_in=True, seconds=1000.0, say=say).run(steps)
    assert json.loads((tmp_path / FILE_NAME).read_text()) == json.loads(json.dumps(result))
    wild = result["steps"]["wild"]
    assert {name: probe["status"] for name, probe in wild["probes"].items()} == {
        "passes": "passed",
        "raises": "failed",
        "is skipped": "skipped",
        "crashes": "crashed",
        "ends the process": "crashed",
        "hangs": "timed out",
        "has a child that hangs": "timed out",
        "passes at last": "passed",
    }
    assert wild["status"] == "failed"
    assert wild["probes"]["raises"]["error"] == "ValueError: no such thing"
    assert "raise_" in wild["probes"]["raises"]["trace"]
    assert "SIGABRT" in wild["probes"]["crashes"]["reason"]
    assert "Fatal Python error" in wild["output"]
    assert result["tables"]["raw"]["rows"] == [{"coder": "none"}] * 2  # of both steps that ran the probe
    assert result["steps"]["no module"]["status"] == "failed"
    assert "No module named" in result["steps"]["no module"]["output"]
    assert result["steps"]["tame"]["status"] == "passed"
    slow = result["steps"]["too slow"]
    assert (slow["status"], slow["reason"]) == ("failed", "the time of the step was up")
    assert slow["probes"]["passes"]["status"] == "passed"
    assert slow["probes"]["hangs"]["status"] == "timed out"
    assert slow["probes"]["passes at last"]["status"] == "not run"
    assert result["steps"]["short of time"]["reason"] == "no time was left for it"
    # the file is written after each probe, not at the end
    _, statuses = next(item for item in seen if item[0].startswith("  raises"))
    assert statuses["passes"] == "passed"


class Undying:
    """A process that hangs inside the driver, where no signal reaches it."""

    exitcode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.waited: list[float | None] = []

    def join(self, timeout: float | None = None) -> None:
        self.waited.append(timeout)


def test_a_process_that_can_not_be_killed_is_left_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as real:
        process = Undying(real.pid)
        assert runner._end(process, 0.0) == -signal.SIGKILL  # type: ignore[arg-type]
        assert real.wait(60) in (-signal.SIGTERM, -signal.SIGKILL)
    assert len(process.waited) == 3 and None not in process.waited, "each wait has a limit"


def test_kernels_that_are_there_and_do_not_load_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_another_machine.abi3.so").write_bytes(b"\x7fELF" + bytes(60))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(build, "_KERNELS", ["of_another_machine", *build._KERNELS])
    assert build.missing_cpu_kernels() == ["of_another_machine"]


def test_an_engine_that_is_metered_does_not_doubt_what_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> Any:
        raise AssertionError("left to the CPU")

    monkeypatch.setattr(CopyingEngine, "encode_block", fails)
    monkeypatch.setattr(CopyingEngine, "decoded", fails)
    device = StandInDevice(ReferenceKernels())
    state = {f"{at}": torch.randn(1 << 18) for at in range(4)}
    arena = torch.zeros(8 << 20, dtype=torch.uint8)
    work = EngineWork(state, "planes-zstd", device, 2 << 20, arena)
    work.encode()
    work.decode()
    work.assert_decoded()
    work.show_arena()
    encoded, calls = arena.clone(), len(device.nvcomp.kernel_calls)
    arena.zero_()
    work.encode(metered=True)
    arena.copy_(encoded)
    work.decode(metered=True)
    assert len(device.nvcomp.kernel_calls) > calls, "it works on the device"
    assert work._metered.health.unusable is None and not work._metered._copying.reason


@pytest.mark.tools
def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    result = Runner(tmp_path, {}, stand_in=True, seconds=0.0, say=lambda text: None).run(STEPS)
    assert result["complete"] and len(result["steps"]) == len(STEPS)
    assert {step["reason"] for step in result["steps"].values()} == {"no time was left for it"}


@pytest.mark.tools
def test_the_gpu_tests_download_nothing_where_everything_is_there(tmp_path: Path) -> None:
    """NvCOMP and CuPy are not here, so two empty modules stand for them: only collection is asked for."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    for name in ("cupy", "nvidia/nvcomp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables = [f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}", "ARGS=--collect-only -q -p no:cacheprovider"]
    done = subprocess.run(["make", "test-gpu", *variables], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_cuda_gpu.py::" in done.stdout and "test_gpu.py::" in done.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    "module", [pytest.param("smoke", marks=pytest.mark.ci), pytest.param("timeline", marks=pytest.mark.tools)]
)
def test_the_first_looks(module: str, tmp_path: Path) -> None:
    """They run on the stand-in, and end with 0 if nothing failed."""
    arguments = ["--stand-in", *(["--out", str(tmp_path)] if module == "timeline" else [])]
    command = [sys.executable, "-m", f"benchmarks.gpu_acceptance.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    if module == "timeline":
        rows = json.loads((tmp_path / "timeline.json").read_text())["rows"]
        assert len(rows) == 3 and not any("error" in row for row in rows.values())


def test_parts_become_one_run() -> None:
    """A later part's step replaces an earlier one's; parts of two GPUs, or of none, are refused."""
    machine = {"machine": {"gpu": "NVIDIA Made-up"}}
    common = {"stand_in": False, "complete": True, "notes": [], "command": "python -m x --out DIR --step versions"}
    row = {"codec": "auto", "device_encode_rate": {"median": 250.0}, "device_decode_rate": {"median": 1.0}}
    engine = {"about": "", "status": "passed", "probes": {"a": {"status": "passed", "rows": {"engine": [row]}}}}
    first = {
        **common,
        **machine,
        "steps": {"engine": {**engine, "probes": {}}, "versions": {"status": "passed", "probes": {}}},
    }
    joined = merge.merged([first, {**common, "steps": {"engine": engine}}])
    assert list(joined["steps"]) == ["versions", "engine"] and joined["command"] == "python -m x --out DIR"
    assert joined["tables"]["engine"]["rows"] == [row]
    assert [check["met"] for check in joined["checks"]] == [True, False]
    probes = {"a": {"status": "passed"}, "b": {"status": "running"}, "c": {"status": "not run"}}
    cut = {**common, "complete": False, "steps": {"raw": {"status": "not run", "probes": probes, "output": "/tmp"}}}
    joined = merge.merged([first, cut])
    assert not joined["complete"] and joined["steps"]["raw"]["status"] == "failed"
    assert [one["status"] for one in joined["steps"]["raw"]["probes"].values()] == ["passed", "timed out", "not run"]
    with pytest.raises(ValueError, match="should be of one"):
        merge.merged([first, {**first, "machine": {"gpu": "another"}}])
    with pytest.raises(ValueError, match="should be of one"):
        merge.merged([{**common, "steps": {}}])
    with pytest.raises(ValueError, match="stand-in"):
        merge.merged([first, {**common, "stand_in": True, "steps": {}}])

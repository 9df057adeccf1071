"""Each suite runs with --quick: it prints its tables, and its JSON and its picture hold what they should."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from rich.console import Console

from benchmarks import gpu_codecs, gpu_host, slices, torch_checkpointing_peer
from benchmarks.__main__ import run_suite
from benchmarks.asynchronous import CONTENDERS
from benchmarks.in_memory import EngineCoder, have_zipnn, zstd_nbytes
from benchmarks.measuring import Case, Settings, Spread, alternate, paired
from benchmarks.plots import draw, plots_of
from benchmarks.results import Report
from benchmarks.sinks import LimitedFileSystem, link
from benchmarks.states import State, build_state, component, load_state, nbytes_of, small_tensors
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason

from ..engines.kernels_on_cpu import ReferenceKernels
from ..engines.nvcomp_stand_in import StandInDevice
from ..engines.reference_literals import ReferenceLiterals

Tables = dict[str, list[dict[str, Any]]]
ROOT = Path(__file__).parents[2]
REASON = cuda_unavailable_reason()


def checked(report: Report, tmp_path: Path) -> Tables:
    """What a report comes to as text, picture and JSON; returns the tables' rows from the JSON."""
    console = Console(width=250, record=True, file=io.StringIO())
    report.show(console)
    text = " ".join(console.export_text().split())  # the title of a narrow table takes several lines
    report.write_json(tmp_path / "results" / "report.json")
    found = json.loads((tmp_path / "results" / "report.json").read_text())
    assert plots_of(found) == [replace(p, series={k: list(v) for k, v in p.series.items()}) for p in report.plots]
    if report.plots:  # a suite whose tables say it all has none
        draw(plots_of(found), found["machine"], tmp_path / "plots" / "plot.png")
        assert (tmp_path / "plots" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {"suite", "quick", "machine", "versions", "command", "date", "tables", "checks", "notes"} <= found.keys()
    assert found["quick"] and {"cpu", "cores", "load_before"} <= found["machine"].keys()
    for table in report.tables:
        assert table.rows and table.title.split(",")[0][:30] in text
        for row in table.rows:
            assert set(table.columns) <= row.keys() | {"stock_save_peak", "stock_load_peak"}, table.name
    assert all(math.isfinite(check["value"]) for check in found["checks"])
    return {name: table["rows"] for name, table in found["tables"].items()}


def run_quick(suite: str, tmp_path: Path, **options: Any) -> Tables:
    said: list[str] = []
    rows = checked(run_suite(suite, Settings(quick=True, say=said.append, **options)), tmp_path)
    assert said
    return rows


def test_ratio(tmp_path: Path) -> None:
    rows = {row["coder"]: row for row in run_quick("ratio", tmp_path)["ratio"]}
    assert {"dcp_nvcomp auto", "dcp_nvcomp none", "dcp", "dcp+zstd", "zstd -3", "zstd -9"} <= rows.keys()
    assert have_zipnn() == ("zipnn" in rows)
    # sizes do not depend on the machine: here even a quick run means something
    assert rows["dcp_nvcomp auto"]["large tensors"] >= 1.11 * rows["dcp+zstd"]["large tensors"]
    for coder, row in rows.items():
        if not coder.startswith("dcp"):  # their files' own parts weigh on so small a state
            assert row["large tensors"] == pytest.approx(row["together"], rel=0.005), coder


@pytest.mark.tools
def test_asynchronous(tmp_path: Path) -> None:
    rows = run_quick("asynchronous", tmp_path)
    absent = () if torch_checkpointing_peer.is_installed() else ("torch_checkpointing",)
    assert [row["peer"] for row in rows["lost-1"]] == [name for name in CONTENDERS if name not in absent]
    for row in rows["lost-1"]:
        assert 0 < row["stall"]["median"] <= row["lost"]["median"] and row["stall"]["median"] < row["durable"]["median"]
    (bounds,) = rows["bounds-1"]
    assert bounds["copy"]["median"] > 0 and bounds["encode"]["median"] > 0 and bounds["encoded"] > 0
    assert len(rows["small"]) == 2 and len(rows["returns"]) == 1


@pytest.mark.tools
def test_gpu_measurements_on_a_stand_in(tmp_path: Path) -> None:
    """All that does not need the GPU itself: blocks, batches, arenas, sums."""
    device = StandInDevice(ReferenceKernels(), literals=ReferenceLiterals())
    report = Report("gpu", Settings(quick=True, nbytes=3 << 20))
    gpu_codecs.codecs(report, device, names=("auto", "ans"))
    gpu_codecs.staging(report, device, names=("auto",))
    coders = {name: slices.EXPONENT_CODERS[name] for name in ("Deflate 0",)}
    slices.measure(report, device, coders)
    rows = checked(report, tmp_path)
    auto = next(row for row in rows["codecs"] if row["codec"] == "auto" and row["state"] == "all")
    assert auto["ratio"] > 1.2 and auto["device_encode_rate"]["median"] > 0
    assert {row["coder"] for row in rows["slices"]} == {"Deflate 0", "ANS, 1 state", "ANS, 2 states"}


@pytest.mark.tools
@pytest.mark.skipif(REASON is None, reason="there is a GPU")
@pytest.mark.parametrize("module", ["benchmarks gpu", "benchmarks.slices"])
def test_without_a_gpu_it_says_so(module: str) -> None:
    command = [sys.executable, "-m", *module.split(), "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "can't run here" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.tools
def test_the_command_line(tmp_path: Path) -> None:
    words = ["overlap", "--quick", "--part", "sinks", "--repeats", "2", "--megabytes", "4"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    command = [sys.executable, "-m", "benchmarks", *words, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "Save of 3 MB" in done.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["command"].startswith("python -m benchmarks overlap --quick --part sinks")
    assert (
        list(found["tables"]) == ["sinks"] and len(found["tables"]["sinks"]["rows"][0]["save_seconds"]["values"]) == 2
    )
    assert (tmp_path / "a.png").exists()


# ---- the pieces that figures rest on ---------------------------------------------------------------------------------


def of(state: State, kind: str) -> State:
    return {name: tensor for name, tensor in state.items() if component(name) == kind and tensor.dim() == 2}


@pytest.mark.parametrize("kind", ["model", "grad", "exp_avg", "exp_avg_sq"])
def test_copies_of_the_state_pack_no_better_than_the_original(kind: str) -> None:
    real, copies = of(load_state(), kind), of(build_state(40 << 20), kind)
    assert nbytes_of(copies) > 8 * nbytes_of(real)
    for level in (3, 9):
        one = nbytes_of(real) / zstd_nbytes(real, level)
        many = nbytes_of(copies) / zstd_nbytes(copies, level)
        assert one * 0.99 < many < one * 1.005, level
    coder = EngineCoder(1)
    one, many = (nbytes_of(state) / coder.nbytes(coder.encode(state)) for state in (real, copies))
    coder.close()
    assert many == pytest.approx(one, rel=0.005)


def test_a_window_over_all_copies_finds_nothing_either() -> None:
    """As DCP's zstd stream over a tensor in which copies are stacked, and any larger window."""
    state = of(build_state(24 << 20), "exp_avg")
    (tensor,) = [tensor for name, tensor in state.items() if name.endswith("o.weight")]
    real = load_state()["exp_avg.b.1.o.weight"]
    parameters = zstandard.ZstdCompressionParameters.from_level(9, window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    ratios = [
        one.nbytes / len(compressor.compress(one.view(torch.uint8).numpy().reshape(-1).data)) for one in (real, tensor)
    ]
    assert ratios[1] < 1.01 * ratios[0]


def test_a_state_is_as_large_as_asked_and_the_same_each_time() -> None:
    state, again = build_state(20 << 20), build_state(20 << 20)
    assert nbytes_of(state) == pytest.approx(20 << 20, rel=0.1)
    assert all(torch.equal(state[name], again[name]) for name in state)
    small = small_tensors(1000)
    assert len(small) == 1000 and all(tensor.nbytes == 1024 for tensor in small.values())


def test_cases_alternate_and_start_in_turn() -> None:
    ran: list[str] = []
    cases = {name: Case(run=lambda name=name: ran.append(name)) for name in "abc"}
    seconds = alternate(cases, repeats=3, warmups=0)
    assert "".join(ran) == "abcbcacab"
    assert all(len(spread.values) == 3 for spread in seconds.values())


def test_quotients_are_of_the_same_repeat() -> None:
    assert paired(Spread((2.0, 40.0)), Spread((1.0, 10.0))).values == (2.0, 4.0)


def test_a_limited_file_keeps_to_its_rate_and_counts(tmp_path: Path) -> None:
    rate, nbytes = 50e6, 5_000_000
    counts = link(rate, "test")
    filesystem = LimitedFileSystem(rate, "test")

    def write() -> None:
        with filesystem.open(f"limited://{tmp_path}/file", "wb") as file:
            for _ in range(10):
                file.write(bytes(nbytes // 10))

    seconds = alternate({"write": Case(write)}, repeats=1, warmups=0)["write"].median
    assert seconds > 0.9 * nbytes / rate
    assert counts.writing.passed_nbytes == nbytes == (tmp_path / "file").stat().st_size
    assert filesystem.cat_file(f"limited://{tmp_path}/file", 100, 300) == bytes(200)
    assert 200 <= counts.reading.passed_nbytes < 1 << 20


@pytest.mark.tools
def test_the_host_beside_a_null_device() -> None:
    """What is encoded and decoded on it are whole batches, whose addresses are real."""
    found = gpu_host.measured(32 << 20, 20, 1)
    assert set(found) == {"encode", "decode", "feed"} and all(milliseconds > 0 for milliseconds in found.values())


def _cpu(rows: Tables) -> None:
    assert [(row["writer"], row["threads"]) for row in rows["checkpoints"]] == [
        (writer, threads) for threads in (1, 2) for writer in ("dcp_nvcomp", "dcp", "dcp+zstd")
    ]
    assert {row["state"] for row in rows["coders"]} == {"bf16", "fp32", "together"}


def _plans(rows: Tables) -> None:
    anew, kept, *_ = rows["simulated"]
    assert kept["to"] < anew["to"] and kept["back"] < anew["back"]


def _overlap(rows: Tables) -> None:
    slowest = rows["sinks"][0]
    assert slowest["factor"] == 0.2
    # however busy the machine is, a sink's rate is not exceeded
    assert slowest["save_seconds"]["median"] > 0.9 * slowest["write_seconds"]["low"]


def _reshard(rows: Tables) -> None:
    columns, whole = rows["reshard"]
    assert (whole["saved"], whole["loaded"]) == ("2 rows", "1 whole")
    assert 1.0 <= whole["factor"] < 1.01 and whole["stock_factor"] >= 1.0
    assert 1.0 <= columns["factor"] <= 2.01  # a rank wants half of each row: of narrow matrices, half of each block
    (square,) = rows["squares"]
    assert 1.0 <= square["factor"] < 1.05 and square["stock_factor"] >= 2.0


def _scale(rows: Tables) -> None:
    assert rows["tensors"][-1]["metadata_nbytes"] <= rows["tensors"][-1]["stock_metadata_nbytes"]
    assert all(row["metadata"] <= 1.0 for row in rows["added"])


def _tensors(rows: Tables) -> None:
    for name, writers in (("checkpoints", 5), ("link", 3)):
        assert len(rows[name]) == 4 * writers
        assert all(row["ratio"] > 1.05 for row in rows[name] if row["writer"].startswith("dcp_nvcomp"))
    # a footer's description of the codecs is much of a file of zeros
    assert all(row["size"] <= 1.003 for row in rows["auto"] if row["ratio"] < 10)


def _limits(rows: Tables) -> None:
    for row in rows["bounds"]:
        assert row["possible"] == pytest.approx(row["stock"]["median"] / row["least"])
    assert all(row["planner"]["median"] > 0 and row["rest"]["median"] > 0 for row in rows["planning"])


def _codecs(rows: Tables) -> None:
    ratios = {row["codec"]: row["ratio"] for row in rows["codecs"]}
    assert ratios["auto"] > 1.25 > ratios["zstd"] > ratios["none"]


def _predictions(rows: Tables) -> None:
    places = ["memory", "link of 200 MB/s", "S3"]
    found = [(row["storage"], row["codec"]) for row in rows["predictions"]]
    assert found == [(place, codec) for place in places for codec in ("auto", "none")]


def _s3(rows: Tables) -> None:
    ours, *_, as_many = rows["s3"]
    assert (ours["writer"], as_many["writer"]) == ("dcp_nvcomp", "boto3, as many as encoded")
    assert ours["stored"] == pytest.approx(as_many["stored"], rel=0.01)


def _stores(rows: Tables) -> None:
    for ours, theirs in itertools.pairwise(rows["stores"]):
        if theirs["writer"] == "dcp":
            assert ours["writer"] == "dcp_nvcomp" and ours["stored"] < theirs["stored"]


def _loads(rows: Tables) -> None:
    assert all(row["copies"] <= 1.02 for row in rows["exchange"] if row["way"] == "always")
    ours, theirs = rows["planning"]
    assert ours["nbytes"] < theirs["nbytes"]


def _incremental(rows: Tables) -> None:
    nbytes = [row["nbytes"]["median"] for row in rows["saves"] if row["way"] != "whole"]
    assert nbytes[0] < 0.2 and nbytes[0] < nbytes[1] < 0.8 < nbytes[2]


def _torch_checkpointing(rows: Tables) -> None:
    own, ours, *_ = rows["saves"]
    assert ours["ratio"] > 1.2 > own["ratio"]


CHECKS: dict[str, tuple[Callable[[Tables], None], dict[str, Any]]] = {
    "cpu": (_cpu, {}),
    "plans": (_plans, {}),
    "loads": (_loads, {}),
    "incremental": (_incremental, {}),
    "overlap": (_overlap, {}),
    "torch_checkpointing": (_torch_checkpointing, {}),
    "reshard": (_reshard, {}),
    "scale": (_scale, {"parts": ("tensors", "size", "ranks", "planning", "memory")}),
    "tensors": (_tensors, {"nbytes": 3 << 20}),
    "limits": (_limits, {"nbytes": 24 << 20}),
    "codecs": (_codecs, {}),
    "predictions": (_predictions, {}),
    "s3": (_s3, {}),
    "stores": (_stores, {}),
}


@pytest.mark.tools
@pytest.mark.s3
@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # adlfs does
@pytest.mark.parametrize("suite", CHECKS)
def test_a_suite(
    suite: str, tmp_path: Path, moto_endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, options = CHECKS[suite]
    if suite == "stores":
        request.getfixturevalue("azure_store")
        monkeypatch.setenv("DCP_NVCOMP_TEST_S3", moto_endpoint)
    check(run_quick(suite, tmp_path, **options, s3=moto_endpoint))


@pytest.mark.gpu
@pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")
@pytest.mark.parametrize("suite", ["gpu", "slices"])
def test_on_a_gpu(tmp_path: Path, suite: str) -> None:
    assert run_quick(suite, tmp_path)

"""Each suite runs with --quick: it prints its tables, and its JSON and its picture hold what they should."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from rich.console import Console

from benchmarks import gpu_checkpoints, gpu_codecs, gpu_host, slices, torch_checkpointing_peer
from benchmarks.__main__ import run_suite
from benchmarks.asynchronous import CONTENDERS
from benchmarks.auto_states import auto_states
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

ROOT = Path(__file__).parents[2]
REASON = cuda_unavailable_reason()


def checked(report: Report, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """What a report comes to as text, picture and JSON; returns the tables' rows from the JSON."""
    console = Console(width=250, record=True, file=io.StringIO())
    report.show(console)
    text = console.export_text()
    report.write_json(tmp_path / "results" / "report.json")
    found = json.loads((tmp_path / "results" / "report.json").read_text())
    assert plots_of(found) == [replace(p, series={k: list(v) for k, v in p.series.items()}) for p in report.plots]
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


def run_quick(suite: str, tmp_path: Path, **options: Any) -> dict[str, list[dict[str, Any]]]:
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
def test_cpu(tmp_path: Path) -> None:
    rows = run_quick("cpu", tmp_path)
    assert [(row["writer"], row["threads"]) for row in rows["checkpoints"]] == [
        (writer, threads) for threads in (1, 2) for writer in ("dcp_nvcomp", "dcp", "dcp+zstd")
    ]
    assert rows["checkpoints"][0]["save_seconds"]["median"] > 0
    assert {row["state"] for row in rows["coders"]} == {"bf16", "fp32", "together"}


@pytest.mark.tools
def test_plans(tmp_path: Path) -> None:
    rows = run_quick("plans", tmp_path)
    assert [row["way"] for row in rows["ranks"]] == ["first save", "later saves", "dcp.save"]
    kept, anew = rows["simulated"][1], rows["simulated"][0]
    assert kept["to"] < anew["to"] and kept["back"] < anew["back"]


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
def test_overlap(tmp_path: Path) -> None:
    rows = run_quick("overlap", tmp_path)
    slowest = rows["sinks"][0]
    assert slowest["factor"] == 0.2
    # however busy the machine is, a sink's rate is not exceeded
    assert slowest["save_seconds"]["median"] > 0.9 * slowest["write_seconds"]["low"]
    assert [row["writer"] for row in rows["target"]] == ["dcp_nvcomp", "dcp", "dcp+zstd"]


@pytest.mark.tools
def test_reshard(tmp_path: Path) -> None:
    tables = run_quick("reshard", tmp_path)
    columns, whole = tables["reshard"]
    assert (whole["saved"], whole["loaded"]) == ("2 rows", "1 whole")
    assert 1.0 <= whole["factor"] < 1.01 and whole["stock_factor"] >= 1.0
    assert 1.0 <= columns["factor"] <= 2.01  # a rank wants half of each row: of narrow matrices, half of each block
    (square,) = tables["squares"]
    assert (square["saved"], square["loaded"], square["tensor_mib"]) == ("2 rows", "2 columns", 4)
    assert 1.0 <= square["factor"] < 1.05 and square["stock_factor"] >= 2.0


@pytest.mark.tools
@pytest.mark.parametrize("part", ["tensors", "size", "ranks", "planning"])
def test_scale(tmp_path: Path, part: str) -> None:
    rows = run_quick("scale", tmp_path, parts=(part,))
    if part == "tensors":
        assert rows["tensors"][-1]["metadata_nbytes"] <= rows["tensors"][-1]["stock_metadata_nbytes"]
    if part == "planning":
        assert all(row["metadata"] <= 1.0 for row in rows["added"])
        assert {row["writer"] for row in rows["planning"]} == {"dcp", "dcp_nvcomp"}


@pytest.mark.tools
def test_tensors(tmp_path: Path) -> None:
    tables = run_quick("tensors", tmp_path, nbytes=3 << 20)
    for name, writers in (("checkpoints", 5), ("link", 3)):
        rows = tables[name]
        assert len(rows) == 4 * writers
        assert all(row["ratio"] > 1.05 for row in rows if row["writer"].startswith("dcp_nvcomp"))
    assert len(tables["auto"]) == len(auto_states(1 << 16, 1 << 16))
    # a footer's description of the codecs is much of a file of zeros
    assert all(row["size"] <= 1.003 for row in tables["auto"] if row["ratio"] < 10)


@pytest.mark.tools
def test_limits(tmp_path: Path) -> None:
    tables = run_quick("limits", tmp_path, nbytes=24 << 20)
    assert [row["work"] for row in tables["work"]] == ["encode", "decode", "write", "read"] * 2
    for row in tables["bounds"]:
        assert row["possible"] == pytest.approx(row["stock"]["median"] / row["least"])
    assert [row["action"] for row in tables["planning"]] == ["save", "load"]
    assert all(row["planner"]["median"] > 0 and row["rest"]["median"] > 0 for row in tables["planning"])


@pytest.mark.tools
def test_codecs(tmp_path: Path) -> None:
    rows = {row["codec"]: row for row in run_quick("codecs", tmp_path)["codecs"]}
    assert list(rows) == ["auto", "planes-zstd", "planes-deflate", "zstd", "none"]
    assert rows["auto"]["ratio"] > 1.25 > rows["zstd"]["ratio"] > rows["none"]["ratio"]


@pytest.mark.tools
@pytest.mark.s3
def test_predictions(tmp_path: Path, moto_endpoint: str) -> None:
    rows = run_quick("predictions", tmp_path, s3=moto_endpoint)["predictions"]
    places = ["memory", "link of 200 MB/s", "S3"]
    assert [(row["storage"], row["codec"]) for row in rows] == [(p, c) for p in places for c in ("auto", "none")]
    assert all(row["predicted_save"] > 0 and row["save_seconds"]["median"] > 0 for row in rows)


@pytest.mark.tools
@pytest.mark.s3
def test_s3(tmp_path: Path, moto_endpoint: str) -> None:
    rows = run_quick("s3", tmp_path, s3=moto_endpoint)["s3"]
    names = ["dcp_nvcomp", "dcp", "dcp+zstd", "boto3, uncompressed bytes", "boto3, as many as encoded"]
    assert [row["writer"] for row in rows] == names
    assert rows[0]["stored"] == pytest.approx(rows[4]["stored"], rel=0.01)


@pytest.mark.tools
@pytest.mark.azure
@pytest.mark.usefixtures("azure_store")
@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # adlfs does
def test_stores(tmp_path: Path, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_NVCOMP_TEST_S3", moto_endpoint)
    rows = run_quick("stores", tmp_path)["stores"]
    writers: dict[str, list[str]] = {}
    for row in rows:
        writers.setdefault(row["store"].split(" ")[0], []).append(row["writer"])
    last = {name: of_store[-1] for name, of_store in writers.items()}
    assert last == {"Azure": "dcp", "Google": "dcp", "S3": "obstore"}
    assert {of_store[0] for of_store in writers.values()} == {"dcp_nvcomp"}
    for ours, theirs in itertools.pairwise(rows):
        if theirs["writer"] == "dcp":
            assert ours["stored"] < theirs["stored"]


@pytest.mark.tools
@pytest.mark.s3
def test_memory(tmp_path: Path, moto_endpoint: str) -> None:
    rows = run_quick("scale", tmp_path, parts=("memory",), s3=moto_endpoint)["memory"]
    assert [row["storage"] for row in rows] == ["files", "S3"]
    assert all(row["save_peak"] > 1 and row["load_peak"] > 1 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")
@pytest.mark.parametrize("part", ["codecs", "staging", "memory"])
def test_gpu(tmp_path: Path, part: str) -> None:
    assert run_quick("gpu", tmp_path, parts=(part,))


@pytest.mark.gpu
@pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")
def test_slices(tmp_path: Path) -> None:
    rows = run_quick("slices", tmp_path)["slices"]
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}


@pytest.mark.tools
def test_gpu_measurements_on_a_stand_in(tmp_path: Path) -> None:
    """All that does not need the GPU itself: blocks, batches, arenas, sums."""
    device = StandInDevice(ReferenceKernels(), literals=ReferenceLiterals())
    report = Report("gpu", Settings(quick=True, nbytes=3 << 20))
    gpu_codecs.codecs(report, device, names=("auto", "ans"))
    gpu_codecs.staging(report, device, names=("auto",))
    coders = {name: slices.EXPONENT_CODERS[name] for name in ("Zstd", "Deflate 0")}
    slices.measure(report, device, coders)
    rows = checked(report, tmp_path)
    auto = next(row for row in rows["codecs"] if row["codec"] == "auto" and row["state"] == "all")
    assert auto["ratio"] > 1.2 and auto["device_encode_rate"]["median"] > 0
    assert {row["coder"] for row in rows["slices"]} == {"Zstd", "Deflate 0", "ANS, 1 state", "ANS, 2 states"}


class ContainerCodec:
    """As much of nvCOMP with containers of its own as the simple baseline needs, in host memory."""

    def __init__(self, **options: str) -> None:
        assert options["algorithm"] == "ANS"

    def encode(self, data: HostArray) -> HostArray:
        return HostArray(np.frombuffer(zlib.compress(data.array.tobytes(), 1), np.uint8))

    def decode(self, data: HostArray) -> np.ndarray:
        return np.frombuffer(bytearray(zlib.decompress(data.array.tobytes())), np.uint8)


@dataclass
class HostArray:
    array: np.ndarray

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__

    def cpu(self) -> HostArray:
        return self

    cuda = cpu


@pytest.mark.tools
def test_gpu_checkpoints_on_a_stand_in(tmp_path: Path) -> None:
    device = StandInDevice(ReferenceKernels())
    device.nvcomp = SimpleNamespace(Codec=ContainerCodec, as_array=lambda data: HostArray(np.asarray(data)))
    report = Report("gpu", Settings(quick=True, nbytes=6 << 20))
    names = ("dcp_nvcomp", "dcp", "simple baseline")
    gpu_checkpoints.checkpoints(report, device, "memory", names)
    rows = checked(report, tmp_path)["checkpoints_memory"]
    assert [row["writer"] for row in rows] == list(names)


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
    found = gpu_host.measured(32 << 20, 1)
    assert set(found) == {"encode", "decode"} and all(milliseconds > 0 for milliseconds in found.values())

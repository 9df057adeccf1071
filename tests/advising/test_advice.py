"""advise: what follows from a bench, and the theory of the interval."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcp_nvcomp import CheckpointNotFoundError, ConfigurationError, save, tools
from dcp_nvcomp.advising.advice import (
    Workload,
    advise,
    daly_seconds,
    lost_part,
    mtbf_of,
    workload_of_checkpoint,
    young_seconds,
)
from dcp_nvcomp.cli.advising import _beside

from ..checkpoints import save_stock
from ..cli.checkpoints import run
from .test_bench import STORAGE, made, rates

HOUR = 3600.0


def test_the_interval_loses_less_than_its_neighbours() -> None:
    for stall, mtbf in ((10.0, 8 * HOUR), (300.0, 3 * HOUR)):
        best = young_seconds(stall, mtbf)
        assert best == pytest.approx(math.sqrt(2 * stall * mtbf))
        lost = [lost_part(interval - stall, stall, 60.0, mtbf) for interval in (0.8 * best, best, 1.25 * best)]
        assert lost[1] < lost[0] and lost[1] < lost[2]
        assert daly_seconds(stall, mtbf) == pytest.approx(best, rel=0.2)


def test_dalys_interval_where_a_save_takes_as_long_as_all_between_failures() -> None:
    assert daly_seconds(200.0, 100.0) == 100.0
    # by hand: sqrt(2 * 8 * 100) = 40, s / 2M = 0.04, so 40 * (1 + 0.2 / 3 + 0.04 / 9) - 8
    assert daly_seconds(8.0, 100.0) == pytest.approx(40 * (1 + 0.2 / 3 + 0.04 / 9) - 8)


def test_failures_of_llama_3() -> None:
    assert mtbf_of(16_384) == pytest.approx(54 * 24 * HOUR / 419)
    assert mtbf_of(8) == 2048 * mtbf_of(16_384)


def test_a_slow_storage_wants_the_smallest_bytes_and_few_threads() -> None:
    found = advise(Workload(10**9), made(), mtbf_seconds=8 * HOUR)
    assert found.codec == "auto"
    assert found.thread_count == 1  # half of 2 GB/s is more than 1.25 * 400 MB/s
    assert found.stall_seconds == found.prediction.save_seconds
    assert found.interval_seconds == daly_seconds(found.stall_seconds, 8 * HOUR)
    assert found.prediction.save_seconds < found.plain.save_seconds


def test_fewer_threads_may_write_fewer_streams() -> None:
    """A local disk is written by as many streams as threads, two at most: one thread alone takes twice as long here."""
    bench = made()
    found = replace(bench, threads=4, storage=replace(STORAGE, write_rates={1: 200e6, 2: 400e6}, streams=(1, 2, 2, 2)))
    assert advise(Workload(10**9), found, mtbf_seconds=8 * HOUR).thread_count == 2
    assert advise(Workload(10**8), found, mtbf_seconds=8 * HOUR).thread_count == 1  # worth one stream only
    remote = replace(found, storage=replace(found.storage, streams=(2, 2, 2, 2)))
    assert advise(Workload(10**9), remote, mtbf_seconds=8 * HOUR).thread_count == 1


def test_a_slow_machine_stores_as_it_is() -> None:
    found = advise(Workload(10**9), made(auto_encode=100e6), mtbf_seconds=8 * HOUR)
    assert found.codec == "none" and found.prediction == found.plain


def test_ranks_share_the_state_and_a_stall_that_is_known() -> None:
    found = advise(Workload(8 * 10**9, ranks=8, ratio=2.0), made(), stall_seconds=0.5)
    assert found.prediction.state_nbytes == 10**9 and found.prediction.stored_nbytes == 5 * 10**8
    assert found.mtbf_seconds == mtbf_of(8) and found.stall_seconds == 0.5
    with pytest.raises(ConfigurationError, match="stall_seconds"):
        advise(Workload(1), made(), stall_seconds=-1.0)


@pytest.mark.parametrize("ratio", [1.3, 1.1, 1.02, 1.0, 0.9])
def test_a_state_that_hardly_compresses_does_so_with_no_codec(ratio: float) -> None:
    """`zstd` is not believed to gain the sample's 14 % of a state of which `auto` gained 2."""
    bench = made()
    found = replace(bench, codecs={**bench.codecs, "zstd": rates("zstd", 1.14, 2e9, 4e9)})
    advice = advise(Workload(10**9, ratio=ratio), found, mtbf_seconds=8 * HOUR)
    assert advice.codec == ("none" if ratio < 1 else "auto")
    slow_zstd = replace(bench, codecs={**bench.codecs, "zstd": rates("zstd", 1.14, 100e6, 4e9)})
    assert advise(Workload(10**9, ratio=ratio), slow_zstd, mtbf_seconds=8 * HOUR).codec == advice.codec


def test_an_asynchronous_save_counts_once_it_is_durable() -> None:
    """A failure until then costs the work since the save before: what a save takes in the background is lost too."""
    workload, mtbf = Workload(100 * 10**9), 8 * HOUR
    found = advise(workload, made(), mtbf_seconds=mtbf, stall_seconds=2.0)
    save, load, interval = found.prediction.save_seconds, found.prediction.load_seconds, found.interval_seconds
    by_hand = 2.0 / (interval + 2.0) + ((interval + 2.0) / 2 + save - 2.0 + load) / mtbf
    assert found.lost_part == pytest.approx(by_hand)
    whole = advise(workload, made(), mtbf_seconds=mtbf)
    assert whole.lost_part == lost_part(whole.interval_seconds, save, load, mtbf)
    longer = advise(workload, made(), mtbf_seconds=mtbf, stall_seconds=save + 9)
    assert longer.lost_part == lost_part(longer.interval_seconds, save + 9, load, mtbf)


def test_saves_do_not_overlap() -> None:
    found = advise(Workload(100 * 10**9), made(), mtbf_seconds=60.0, stall_seconds=0.1)
    assert found.interval_seconds == pytest.approx(found.prediction.save_seconds - 0.1)


def test_the_workload_of_a_checkpoint(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20), "b": torch.ones(7, dtype=torch.int64)}
    save(state, tmp_path / "ours", no_dist=True)
    found = workload_of_checkpoint(tmp_path / "ours")
    assert found.state_nbytes == (4 << 20) + 56 and found.ranks == 1
    assert found.ratio is not None and 1.1 < found.ratio < 1.3
    save(state, tmp_path / "plain", no_dist=True, codec="none")
    assert workload_of_checkpoint(tmp_path / "plain").ratio is None
    save_stock(tmp_path / "stock", dict(state))
    assert workload_of_checkpoint(tmp_path / "stock").ratio is None
    state = {"w": torch.randint(0, 256, (1 << 20,), dtype=torch.uint8), "scale": torch.randn(3)}
    save(state, tmp_path / "quantized", no_dist=True)
    assert set(tools.inspect(tmp_path / "quantized").by_codec) == {"none"}
    assert workload_of_checkpoint(tmp_path / "quantized").ratio == pytest.approx(1.0, abs=0.01)
    with pytest.raises(CheckpointNotFoundError):
        workload_of_checkpoint(tmp_path / "nothing")


@pytest.mark.ci
def test_the_command(tmp_path: Path) -> None:
    save({"w": torch.randn(1 << 18)}, tmp_path / "step-1", no_dist=True)
    status, output, _ = run("advise", str(tmp_path / "step-1"), "--seconds", "0.01", "--mtbf", "8h")
    assert status == 0
    assert "codec=" in output and "thread_count=" in output and "Daly 2006" in output and "as you say" in output
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    options = ("--storage", str(tmp_path), "--ranks", "8", "--gpus", "1024", "--seconds", "0.01", "--json")
    status, output, _ = run("advise", "840GB", *options)
    document = json.loads(output)
    assert status == 0 and document["ranks"] == 8 and document["mtbf_seconds"] == pytest.approx(mtbf_of(1024))
    assert document["prediction"]["state_nbytes"] == 105 * 10**9


@pytest.mark.parametrize(
    ("checkpoint", "beside"),
    [
        ("first", "{here}"),
        ("runs/first/", "{here}/runs"),
        ("{here}/first", "{here}"),
        ("file://{here}/runs/first", "{here}/runs"),
        ("dcpz://{here}/first", "{here}"),
        ("dcpz+s3://bucket/run/first", "s3://bucket/run"),
        ("s3://bucket/first", "s3://bucket"),
        ("s3://bucket", "s3://bucket"),
        ("memory://first", "memory://"),
        ("memory://runs/first", "memory://runs"),
    ],
)
def test_it_measures_beside_the_checkpoint(
    checkpoint: str, beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _beside(checkpoint.format(here=tmp_path)) == beside.format(here=tmp_path)


def test_a_checkpoint_whose_name_could_be_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"w": torch.randn(1 << 18)}, "1000", no_dist=True)
    status, output, _ = run("advise", "1000", "--seconds", "0.01", "--json")
    assert status == 0 and json.loads(output)["state_nbytes"] == 1 << 20
    status, _, error = run("advise", "2000", "--seconds", "0.01")
    assert status == 2 and "--storage" in error


def test_what_the_command_needs(tmp_path: Path) -> None:
    status, _, error = run("advise", "70GB")
    assert status == 2 and "--storage" in error
    status, _, error = run("advise", str(tmp_path / "nothing"))
    assert status == 1 and "nothing" in error
    status, _, error = run("advise", "70GB", "--storage", str(tmp_path), "--mtbf", "often")
    assert status == 2 and "is not a time" in error

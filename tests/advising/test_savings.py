"""savings: the published rows come out, and our own rows rest on committed results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_nvcomp import ConfigurationError
from dcp_nvcomp.advising.savings import MEASURED, MODELS, PUBLISHED, Codec, Job, savings

from ..cli.checkpoints import run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ZSTD, GANS = PUBLISHED
SMALL, DENSE_8, DENSE_64, LARGE, MIXTRAL, DEEPSEEK = MODELS

# tables 4 and 5 of the post: stored GB and savings a month, rounded to two or three digits, up or down
PUBLISHED_ROWS = [
    (SMALL, ZSTD, 78, 180), (SMALL, GANS, 75, 220),
    (DENSE_8, ZSTD, 686, 1_500), (DENSE_8, GANS, 663, 1_900),
    (DENSE_64, ZSTD, 686, 3_400), (DENSE_64, GANS, 663, 4_200),
    (LARGE, ZSTD, 3_974, 33_000), (LARGE, GANS, 3_838, 40_000),
    (MIXTRAL, ZSTD, 1_370, 7_400), (MIXTRAL, GANS, 1_335, 8_600),
    (DEEPSEEK, ZSTD, 6_513, 101_000), (DEEPSEEK, GANS, 6_348, 118_000),
]  # fmt: skip


@pytest.mark.parametrize(("job", "codec", "stored_gb", "dollars"), PUBLISHED_ROWS)
def test_the_published_rows(job: Job, codec: Codec, stored_gb: float, dollars: float) -> None:
    found = savings(job, codec)
    assert found.compressed.stored_gb == pytest.approx(stored_gb, abs=1.5)
    assert found.total == pytest.approx(dollars, rel=0.042)


@pytest.mark.parametrize(("rate", "plain", "zstd", "gans"), [(5, 156, 137, 133), (15, 52, 49, 44), (25, 31, 49, 27)])
def test_the_published_waits(rate: float, plain: float, zstd: float, gans: float) -> None:
    job = replace(DENSE_8, storage_gb_per_second=rate)
    for codec, wait in ((ZSTD, zstd), (GANS, gans)):
        found = savings(job, codec)
        assert found.plain.wait_seconds == pytest.approx(plain, abs=0.5)
        assert found.compressed.wait_seconds == pytest.approx(wait, abs=0.5)


def test_what_the_post_says_of_waiting() -> None:
    one = savings(DENSE_8, GANS)
    assert DENSE_8.saves == 1440
    assert one.plain.wait_hours == pytest.approx(62.6, abs=0.05)
    assert one.plain.idle_cost == pytest.approx(2203, abs=1)
    assert savings(DENSE_64, GANS).plain.idle_cost > 17_500
    assert savings(LARGE, GANS).plain.idle_cost > 200_000
    assert one.plain.wait_hours - one.compressed.wait_hours == pytest.approx(9.5, abs=0.1)
    assert one.idle_savings == pytest.approx(335, abs=1) and one.storage_savings == pytest.approx(1599, abs=5)


def test_our_rows_are_of_measured_results() -> None:
    ratios = {
        row["coder"]: row["together"]
        for row in json.loads((RESULTS / "ratio.json").read_text())["tables"]["ratio"]["rows"]
    }
    tables = json.loads((RESULTS / "cpu.json").read_text())["tables"]
    saves = {(row["writer"], row["threads"]): row["save_rate"]["median"] for row in tables["checkpoints"]["rows"]}
    stock, ours = MEASURED
    assert ours.ratio == pytest.approx(ratios["dcp_nvcomp auto"], abs=0.001)
    assert stock.ratio == pytest.approx(ratios["dcp+zstd"], abs=0.001)
    # whole saves of both, to memory; of a GB that is 2^30 bytes
    assert ours.gb_per_second == pytest.approx(saves["dcp_nvcomp", 2] * 1e6 / 2**30, abs=0.01)
    assert stock.gb_per_second == pytest.approx(saves["dcp+zstd", 2] * 1e6 / 2**30, abs=0.01)


def test_a_codec_that_is_slower_than_the_storage_costs() -> None:
    found = savings(replace(DENSE_8, kept=0), Codec("slow", 1.3, 1.0))
    assert found.total == found.idle_savings < 0


def test_a_number_that_can_not_be() -> None:
    with pytest.raises(ConfigurationError, match="interval_minutes"):
        savings(replace(DENSE_8, interval_minutes=0), ZSTD)


def test_the_command(tmp_path: Path) -> None:
    status, output, _ = run("savings", "--plot", str(tmp_path / "savings.png"))
    assert status == 0 and "DeepSeek-V3 671B" in output and "1,440 saves a month" in output
    assert (tmp_path / "savings.png").read_bytes().startswith(b"\x89PNG")
    options = ("--parameters", "70e9", "--gpus", "64", "--ratio", "1.5", "--encode-rate", "100GiB", "--json")
    status, output, _ = run("savings", *options)
    document = json.loads(output)
    assert status == 0 and document["rows"][-1]["codec"] == "yours"
    assert document["rows"][0]["checkpoint_gb"] == pytest.approx(782, abs=1)
    assert document["rows"][1]["savings"] == pytest.approx(4_200, rel=0.03)
    assert document["rows"][-1]["stored_gb"] == pytest.approx(782 / 1.5, abs=1)


def test_options_that_belong_together(tmp_path: Path) -> None:
    status, _, error = run("savings", "--ratio", "1.5")
    assert status == 2 and "belong together" in error
    status, _, error = run("savings", "--plot", str(tmp_path / "savings.nothing"))
    assert status == 1 and "can't be written" in error


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--gpus", "64"), "--gpus"),
        (("--parameters", "inf"), "--parameters"),
        (("--gpu-hour", "inf"), "--gpu-hour"),
        (("--storage-price", "inf"), "--storage-price"),
        (("--ratio", "inf", "--encode-rate", "1GB"), "--ratio"),
        (("--parameters", "70e9", "--checkpoint", "840GB"), "--checkpoint"),
    ],
)
def test_options_that_would_mean_nothing(options: tuple[str, ...], named: str) -> None:
    status, _, error = run("savings", *options)
    assert status == 2 and named in error
    status, output, _ = run("savings", "--checkpoint", "840GB", "--json")
    assert status == 0 and json.loads(output)["rows"][0]["gpus"] == 8

"""Metrics of real saves and loads, read back with the packages that they are for; of wandb there is only a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import ConfigurationError, SaveStats, load, save
from dcp_nvcomp.integrations.metrics import OpenTelemetry, Prometheus, TensorBoard, WeightsAndBiases
from dcp_nvcomp.loading.job import LoadStats

STATE_NBYTES = 4 << 20


def save_and_load(path: Path, metrics: Any) -> tuple[SaveStats, LoadStats]:
    """Save and load once with these metrics, and return the statistics that they were given."""
    saved: list[SaveStats] = []
    loaded: list[LoadStats] = []

    def on_save(stats: SaveStats) -> None:
        saved.append(stats)
        metrics.on_save(stats)

    def on_load(stats: LoadStats) -> None:
        loaded.append(stats)
        metrics.on_load(stats)

    state = {"w": torch.randn(1 << 20)}
    save(state, path, no_dist=True, on_save=on_save)
    load(state, path, no_dist=True, on_load=on_load)
    return saved[0], loaded[0]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "events") as writer:  # type: ignore[no-untyped-call]
        counting = TensorBoard(writer)
        save_and_load(tmp_path / "a", counting)
        saved, loaded = save_and_load(tmp_path / "b", counting)
        TensorBoard(writer, step=lambda: 500).on_save(saved)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    ratios = events.Scalars("checkpoint/save/ratio")
    assert [event.step for event in ratios] == [0, 1, 500]
    assert ratios[1].value == pytest.approx(saved.ratio)
    assert [event.step for event in events.Scalars("checkpoint/load/seconds")] == [0, 1]
    assert events.Scalars("checkpoint/load/seconds")[1].value == pytest.approx(loaded.seconds)
    tags = set(events.Tags()["scalars"])
    assert {f"checkpoint/save/{stage}_seconds" for stage in ("plan", "encode", "write", "commit")} <= tags
    assert {"checkpoint/save/stored_bytes", "checkpoint/load/bytes_per_second"} <= tags


def test_prometheus(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    metrics = Prometheus(registry)
    first, before = save_and_load(tmp_path / "a", metrics)
    second, loaded = save_and_load(tmp_path / "b", metrics)
    value = registry.get_sample_value
    assert value("dcp_nvcomp_save_seconds_count") == 2
    assert value("dcp_nvcomp_save_seconds_sum") == pytest.approx(first.total_seconds + second.total_seconds)
    assert value("dcp_nvcomp_saved_uncompressed_bytes_total") == 2 * STATE_NBYTES
    assert value("dcp_nvcomp_saved_stored_bytes_total") == first.stored_nbytes + second.stored_nbytes
    assert value("dcp_nvcomp_last_save_ratio") == second.ratio
    stages = [value("dcp_nvcomp_save_stage_seconds_total", {"stage": stage}) for stage in second.seconds]
    assert stages == pytest.approx([first.seconds[stage] + second.seconds[stage] for stage in second.seconds])
    assert value("dcp_nvcomp_load_seconds_count") == 2
    assert value("dcp_nvcomp_loaded_bytes_total") == 2 * STATE_NBYTES
    assert value("dcp_nvcomp_fetched_bytes_total") == before.fetched_nbytes + loaded.fetched_nbytes
    assert b"# TYPE dcp_nvcomp_save_seconds histogram" in generate_latest(registry)


def test_opentelemetry(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics = OpenTelemetry(MeterProvider([reader]).get_meter("test"))
    first, before = save_and_load(tmp_path / "a", metrics)
    second, loaded = save_and_load(tmp_path / "b", metrics)
    found = reader.get_metrics_data()
    assert found is not None
    by_name = {metric.name: metric for metric in found.resource_metrics[0].scope_metrics[0].metrics}
    points = {name: metric.data.data_points for name, metric in by_name.items()}
    saves: Any = points["dcp_nvcomp.save.duration"][0]
    assert saves.count == 2 and saves.sum == pytest.approx(first.total_seconds + second.total_seconds)
    assert by_name["dcp_nvcomp.save.duration"].unit == "s"
    values = {name: getattr(of_name[0], "value", None) for name, of_name in points.items()}
    assert values["dcp_nvcomp.save.uncompressed"] == 2 * STATE_NBYTES
    assert values["dcp_nvcomp.save.stored"] == first.stored_nbytes + second.stored_nbytes
    assert values["dcp_nvcomp.load.fetched"] == before.fetched_nbytes + loaded.fetched_nbytes
    stages = {point.attributes["stage"] for point in points["dcp_nvcomp.save.stage.duration"] if point.attributes}
    assert stages == {"plan", "encode", "write", "commit"}


def test_opentelemetry_without_a_meter_or_a_provider(tmp_path: Path) -> None:
    save_and_load(tmp_path, OpenTelemetry())  # the API alone records nothing, and is no reason to fail


class _Run:
    """What a run of wandb does with `log`, as far as it matters here."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        self.logged.append((data, step))


def test_weights_and_biases(tmp_path: Path) -> None:
    run = _Run()
    saved, loaded = save_and_load(tmp_path / "a", WeightsAndBiases(run))
    save_and_load(tmp_path / "b", WeightsAndBiases(run, step=lambda: 7))
    (save_values, save_step), (load_values, _), (_, later_step), _ = run.logged
    assert save_values["checkpoint/save/ratio"] == saved.ratio and save_step is None and later_step == 7
    assert load_values["checkpoint/load/fetched_bytes"] == loaded.fetched_nbytes


@pytest.mark.parametrize(
    ("made", "package"),
    [("OpenTelemetry", "opentelemetry"), ("Prometheus", "prometheus_client"), ("WeightsAndBiases", "wandb")],
)
def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, made: str, package: str) -> None:
    from dcp_nvcomp.integrations import metrics

    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.metrics", None)
    with pytest.raises(ConfigurationError, match="pip install"):
        getattr(metrics, made)()

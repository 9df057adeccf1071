"""The suite `runs`, and the model behind its ETTR."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from benchmarks.ettr import Costs, best_interval, ettr
from benchmarks.run_contenders import IN_MEMORY, LOAD, RESTORES, SAVES
from benchmarks.runs import FAILURE_MINUTES

from .test_quick import run_quick


@pytest.mark.tools
def test_runs(tmp_path: Path) -> None:
    rows = run_quick("runs", tmp_path)
    assert [row["peer"] for row in rows["memory"]] == list(IN_MEMORY)
    assert [row["peer"] for row in rows["saves"]] == list(SAVES)
    for row in (*rows["memory"], *rows["saves"]):
        assert 0 < row["stall"]["median"] <= row["lost"]["median"]
    for row in rows["saves"]:
        assert row["stored"] <= row["sent"] < 1.01 * row["stored"], "each byte goes once"
        assert (row["fast"] is None) == ("fast tier" not in row["peer"])
        assert (row["copies"] is None) == ("copies" not in row["peer"])
        if row["fast"] is not None:
            assert row["fast"]["median"] < row["durable"]["median"]
    assert rows["asking"][0]["asking"]["median"] > 0
    received = {row["source"]: row["received"] for row in rows["restore"]}
    assert list(received) == list(RESTORES)
    own, peer, durable, stock = received.values()
    assert own < 0.1 and peer < 0.1 and durable > 10 and stock == received[LOAD] > 10
    for table in ("ettr", "ettr-large"):
        for row in rows[table]:
            ratios = [row[f"minutes-{minutes}"] for minutes in FAILURE_MINUTES]
            assert ratios[0] > 0 and ratios == sorted(ratios) and ratios[-1] < 1


@pytest.mark.parametrize("costs", [Costs(2.0, 2.0, 5.0), Costs(1.0, 12.0, 30.0), Costs(0.0, 0.0, 0.0)])
@pytest.mark.parametrize("failure_seconds", [100.0, 3600.0])
def test_ettr_is_what_a_simulation_finds(costs: Costs, failure_seconds: float) -> None:
    assert ettr(costs, 40.0, failure_seconds) == pytest.approx(_simulated(costs, 40.0, failure_seconds), rel=0.02)


def _simulated(costs: Costs, interval: float, failure_seconds: float) -> float:
    """Return the share of time that counts in a run with failures at random times."""
    dice = random.Random(1)
    kept = total = 0.0
    is_restoring = False
    for _ in range(40_000):
        until_failure = dice.expovariate(1 / failure_seconds)
        total += until_failure
        trained_until = until_failure - costs.restore_seconds * is_restoring
        saves, period = 0, interval + costs.lost_seconds
        while (saves + 1) * period - costs.lost_seconds + costs.safe_seconds <= trained_until:
            saves += 1
        kept += saves * interval
        is_restoring = True
    return kept / total


def test_ettr_where_failures_are_rare_is_the_sum_of_what_is_lost() -> None:
    costs, interval, failure_seconds = Costs(1.0, 4.0, 9.0), 50.0, 1e6
    wasted = 51.0 / 2 + 4.0 - 1.0 + 9.0
    expected = interval / 51.0 * (1 - wasted / failure_seconds)
    assert ettr(costs, interval, failure_seconds) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("failure_seconds", [600.0, 86400.0])
def test_the_best_interval_is_the_best(failure_seconds: float) -> None:
    costs = Costs(2.0, 3.0, 10.0)
    best = best_interval(costs, failure_seconds)
    assert best == pytest.approx(math.sqrt(2 * costs.lost_seconds * failure_seconds), rel=0.05)  # Young's
    found = ettr(costs, best, failure_seconds)
    assert all(ettr(costs, best * factor, failure_seconds) < found for factor in (0.8, 0.95, 1.05, 1.25))


def test_saves_do_not_overtake_each_other() -> None:
    assert best_interval(Costs(0.01, 100.0, 1.0), 600.0) == pytest.approx(99.99)

"""The model of staging on a GPU agrees with what can be said without one."""

from __future__ import annotations

import pytest

from benchmarks.gpu_model import RESULTS, Rates, modelled


@pytest.mark.parametrize("action", ["encode", "decode"])
def test_one_thread_waits_for_everything(action: str) -> None:
    rates = Rates.of(RESULTS, action)
    kernels = rates.until_sizes + rates.gather
    beside = max(rates.bus, rates.rest) if action == "encode" else rates.bus + rates.rest
    times, busy = modelled(RESULTS, action, threads=1)
    assert times == pytest.approx((rates.host + kernels + beside + rates.crc) / rates.plain)
    assert busy["bus"] == pytest.approx(rates.bus / (times * rates.plain))


@pytest.mark.parametrize("action", ["encode", "decode"])
def test_more_threads_are_no_slower_and_nothing_is_faster_than_its_busiest_place(action: str) -> None:
    rates = Rates.of(RESULTS, action)
    found = [modelled(RESULTS, action, threads=threads) for threads in (1, 2, 3, 4, 8)]
    times = [time for time, _ in found]
    assert times == sorted(times, reverse=True)
    slowest = max(rates.host, rates.until_sizes + rates.gather + rates.rest, rates.bus)
    assert times[-1] >= slowest / rates.plain
    assert all(share <= 1 + 1e-9 for _, busy in found for place, share in busy.items() if place != "cores")

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


@pytest.mark.parametrize("action", ["encode", "decode"])
def test_without_all_other_terms_the_bus_is_left(action: str) -> None:
    rates = Rates.of(RESULTS, action)
    terms = ("host", "until_sizes", "gather", "rest", "crc")
    as_it_is, _ = modelled(RESULTS, action, threads=4)
    without_one = [modelled(RESULTS, action, threads=4, without=[term])[0] for term in terms]
    assert all(rates.bus / rates.plain <= times <= as_it_is + 1e-9 for times in without_one)
    assert modelled(RESULTS, action, threads=4, without=terms)[0] == pytest.approx(rates.bus / rates.plain)

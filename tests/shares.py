"""A part of the large matrices, for CI: kills at each stage of each kind of save take an hour on two cores.

`-p tests.shares --share 1/3` keeps, of every test function with many slow cases, each third one, here the second, the
fifth and so on. All else is kept. CI counts commits, so three in a row run all.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

_MANY = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="of functions with many slow cases, run the K-th of each N, from 0")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    if not share:
        return
    kept, parts = map(int, share.split("/"))
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is not None or item.get_closest_marker("oracle") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {
        item
        for found in cases.values()
        if len(found) > _MANY
        for number, item in enumerate(found)
        if number % parts != kept % parts
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]

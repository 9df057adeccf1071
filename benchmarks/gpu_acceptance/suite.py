"""Step: the tests of the engines marked `gpu`, each a probe, but for those that give nvCOMP what no encoder wrote.

A test that ends the process or hangs costs no other test: the next process leaves out what was begun. On the stand-in
some tests of the engine on the stand-in show that the step works.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.gpu_acceptance.child import Report
from benchmarks.gpu_acceptance.host import ROOT, Host

# the quick ones first: whole checkpoints take a disk's time
_FILES = tuple(f"tests/engines/test_{name}.py" for name in ("cuda_gpu", "hashing", "checkpoints_gpu"))
_ON_A_GPU = (*_FILES, "-m", "gpu and not hostile", "--require-gpu")
_ON_THE_STAND_IN = ("tests/engines/test_cuda_stand_in.py", "-m", "", "-k", "reference")

_SETTINGS = ("-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "setup.cfg"))


def run(host: Host, report: Report) -> str | None:
    """Run the tests that are left; returns the reason if some still are."""
    tests = _Tests(report)
    with warnings.catch_warnings():
        pytest.main([*_SETTINGS, *host.pick(_ON_A_GPU, _ON_THE_STAND_IN)], plugins=[tests])
    return tests.stopped


class _Tests:
    """The plugin that reports each test as a probe.

    Args:
        report: to the runner.

    Attributes:
        stopped: why tests are left, or None.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.stopped: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._report.send(names=[item.nodeid for item in items])
        items[:] = [item for item in items if item.nodeid not in self._report.done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report.send(begin=report.nodeid)
            self._report.end(report.nodeid, {"status": "failed", "error": str(report.longrepr)}, 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._report.send(begin=item.nodeid)
        self._found: dict[str, Any] = {"status": "passed"}
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            trouble = self._report.end(item.nodeid, self._found, time.perf_counter() - start)
            if trouble is not None:
                self.stopped = f"the GPU can't be used any more: {trouble}"
                item.session.shouldstop = self.stopped

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = str(report.longrepr)
            last = next((line for line in reversed(text.splitlines()) if line.startswith("E ")), report.when)
            self._found = {"status": "failed", "error": last.removeprefix("E").strip(), "trace": text[-4000:]}
        elif report.skipped and self._found["status"] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._found = {"status": "skipped", "reason": reason}

"""Skipped tests as failures: one that nobody notices proves nothing.

`-p tests.skips --no-skips-but gpu` makes a run fail at its end if it skipped a test, for CI. Only tests with the given
marker, or in a folder of that name, may be skipped then. `--require-gpu` makes each test that is marked `gpu` and was
skipped fail, for a machine that should have one.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import PurePosixPath

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips-but", metavar="MARKER", help="fail if a test without this marker is skipped")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # keywords would not do: the folders above a test are among them, and one may have such a name
    report.markers = [marker.name for marker in item.iter_markers()]
    return report


def pytest_configure(config: pytest.Config) -> None:
    marker = config.getoption("--no-skips-but")
    if marker:
        config.pluginmanager.register(SkipCheck(marker))


class SkipCheck:
    """Collects the skips of a run that are not allowed, and fails it at the end."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and self.marker not in report.markers:
            self._forbid(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and self.marker not in PurePosixPath(report.nodeid).parts:
            self._forbid(report)

    def _forbid(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        self.forbidden.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the last words of the run, after pytest's own list of skips
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        yield
        if self.forbidden:
            terminalreporter.section(f"skipped, though not marked {self.marker}", red=True)
            for line in self.forbidden:
                terminalreporter.line(line)


class RequireGpu:
    """Makes the skip of a test marked `gpu` its failure: a driver that does not load must not look like success."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is not None:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.outcome = "failed"
            report.longrepr = f"--require-gpu was given, and this was skipped. {reason}"
        return report

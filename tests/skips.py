"""A pytest plugin that makes a run fail if it skipped a test, for CI: `-p tests.skips --no-skips-but gpu`.

A skipped test that nobody notices proves nothing. Only tests with the given marker, or in a folder of that name, may be
skipped then.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips-but", metavar="MARKER", help="fail if a test without this marker is skipped")


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
        if report.skipped and not hasattr(report, "wasxfail") and self.marker not in report.keywords:
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

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.forbidden:
            terminalreporter.section(f"skipped, though not marked {self.marker}", red=True)
            for line in self.forbidden:
                terminalreporter.line(line)

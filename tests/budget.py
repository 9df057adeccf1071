"""The time that a file of `make test` may take: a run is as quick as its slowest file allows.

`-p tests.budget --file-budget 20` fails a run at its end if the tests of one file took more seconds together than that,
with the names of its slowest tests. Those marked `ci`, which `make test` leaves out, do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

import pytest

_NAMED = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-budget", type=float, metavar="SECONDS", help="fail if the tests of a file take longer")


def pytest_configure(config: pytest.Config) -> None:
    budget = config.getoption("--file-budget")
    if budget and not hasattr(config, "workerinput"):  # the workers of pytest-xdist report to the one that was started
        config.pluginmanager.register(Budget(budget))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # keywords would not do: the folders above a test are among them, and one may have this name
    report.counts = item.get_closest_marker("ci") is None
    return report


class Budget:
    """Adds up what tests take, by file, and fails the run at its end if one takes too long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.by_file: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.counts:
            self.by_file[report.nodeid.partition("::")[0]][report.nodeid] += report.duration

    def over(self) -> dict[str, defaultdict[str, float]]:
        """Return the files that take too long."""
        return {file: tests for file, tests in self.by_file.items() if sum(tests.values()) > self.seconds}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the last words of the run, after pytest's own list of skips
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        yield
        if self.over():
            terminalreporter.section(f"files that take more than {self.seconds:g} s: see CONTRIBUTING.md", red=True)
        for file, tests in sorted(self.over().items()):
            terminalreporter.line(f"{sum(tests.values()):6.1f} s  {file}")
            for name in sorted(tests, key=tests.__getitem__, reverse=True)[:_NAMED]:
                terminalreporter.line(f"{tests[name]:15.1f} s  {name.partition('::')[2]}")

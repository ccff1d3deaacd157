"""Judge a test of the second stage only if the machine was on time while it ran.

Real time is part of these claims, so a machine that stands still for a second may turn a right program red, or hide the
delay of a wrong one. A process that does nothing but sleep shows by how much the machine was late. A test during which
it was late is not judged, whatever its result, and runs again. After TRIES such runs it is reported as not judged. The
stage ends with their number, and fails if they are more than MOST of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.runner import call_and_report

from tests.support import isolation
from tests.support.machine import Sleeper
from tests.support.stages import stage_of, turn_of

LATE = 0.25
"""Seconds. The claims of the second stage allow for less."""

TRIES = 3
MOST = 0.02

_REASON = "not judged: the machine was late by"


class Judge:
    """Runs the tests of the second stage in one process."""

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if stage_of(item) == "1":
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: Any, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        for _ in range(TRIES):
            with turn_of(item):
                reports, late = self._run_once(item, nextitem)
            if late <= LATE or all(report.outcome == "skipped" for report in reports if report.when != "teardown"):
                return reports
        for report in reports:
            if report.when == "call":
                report.outcome = "skipped"
                report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {_REASON} {late:.2f} s")
        return reports

    def _run_once(self, item: Any, nextitem: pytest.Item | None) -> tuple[list[pytest.TestReport], float]:
        """Run a test as pytest does, and return its reports, and by how much the machine was late.

        If the machine was late, the fixtures of every scope end with the test: it may have left a program or a server
        that other tests share in the middle of something.
        """
        self._sleeper.worst(again=True)
        if not item._request:
            item._initrequest()
        reports = [call_and_report(item, "setup", log=False)]
        if reports[0].passed:
            reports.append(call_and_report(item, "call", log=False))
        late = self._sleeper.worst()
        reports.append(call_and_report(item, "teardown", log=False, nextitem=None if late > LATE else nextitem))
        item._request = False
        item.funcargs = None
        return reports, max(late, self._sleeper.worst())


class Count:
    """Counts the tests of the whole run that were not judged."""

    def __init__(self) -> None:
        self._tests = 0
        self._not_judged: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._tests += 1
            if report.outcome == "skipped" and _REASON in str(report.longrepr):
                self._not_judged.append(report.nodeid)

    @property
    def too_many(self) -> bool:
        return len(self._not_judged) > MOST * self._tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("judged")
        terminalreporter.line(
            f"{len(self._not_judged)} of {self._tests} tests were not judged, because the machine was late"
            f" by more than {LATE} s in each of {TRIES} tries."
        )
        for nodeid in self._not_judged:
            terminalreporter.line(f"  {nodeid}")
        if self.too_many:
            terminalreporter.line(f"That is more than {MOST:.0%}: run the stage again on a machine with less to do.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stage") != "2" and not config.getoption("--nightly"):
        return
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Count())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        sleeper = Sleeper()
        with isolation.kept():
            sleeper.__enter__()
        config.add_cleanup(lambda: sleeper.__exit__())
        config.pluginmanager.register(Judge(sleeper))

"""Judge a test of the second stage only if the machine was on time while it ran.

Real time is part of these claims, so a machine that stands still for a second may turn a right program red, or hide the
delay of a wrong one. A process that hardly does anything but sleep shows by how much the machine was late. If it was
late during a test, this try does not count, whatever its result, and the test is tried again. If it was late in all of
TRIES, the test is reported as not judged. The stage ends with their number, and with every failure that did not count.
It fails if more than MOST of the tests were not judged. What no lateness excuses always counts: machine.UNSAFE.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
from _pytest.runner import call_and_report
from pytest_timeout import _get_item_settings  # type: ignore[import-untyped]

from tests.support import isolation, machine
from tests.support.machine import NOT_JUDGED, Sleeper
from tests.support.stages import stage_of, stage_of_run, turn_of

LATE = 0.25
"""Seconds. Every claim of the second stage holds on a machine that is late by less."""

_ADDRESS = pytest.StashKey[str]()

TRIES = 3
MOST = 0.02


class Judge:
    """Runs the tests of the second stage in one process."""

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper
        self._reports: list[pytest.TestReport] = []
        """Those of the current run of the current test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if stage_of(item) == "1":
            return None
        item.ihook.pytest_timeout_cancel_timer(item=item)  # each phase of each run has a time limit of its own
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._run(item, nextitem)
        finally:
            for report in self._reports:
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: Any, nextitem: pytest.Item | None) -> None:
        dropped: list[str] = []
        for number in range(1, TRIES + 1):
            with turn_of(item):
                late = self._run_once(item, nextitem)
            wrong = [_message(report) for report in self._reports if report.failed or _is_not_judged(report)]
            if late <= LATE and not any(map(_is_not_judged, self._reports)):
                break
            if any(report.skipped and not _is_not_judged(report) for report in self._reports):
                break
            if self._fails_for_safety():
                break
            dropped += wrong
            if number == TRIES:
                _excuse(item, self._reports, f"{NOT_JUDGED} late by {late:.2f} s")
        self._reports[-1].runs, self._reports[-1].dropped = number, dropped  # type: ignore[attr-defined]

    def _fails_for_safety(self) -> bool:
        """Return whether a report of the current run tells of what no lateness excuses, and let it fail then."""
        unsafe = [report for report in self._reports if machine.UNSAFE in str(report.longrepr)]
        for report in unsafe:
            report.outcome = "failed"
        return bool(unsafe)

    def _run_once(self, item: Any, nextitem: pytest.Item | None) -> float:
        """Run a test as pytest does, and return by how much the machine was late.

        If the machine was late, the fixtures of every scope end with the test: it may have left a program or a server
        that other tests share in the middle of something. What comes after a failed body does not excuse it.
        """
        self._reports = []
        self._sleeper.worst(reset=True)
        if not item._request:
            item._initrequest()
        self._run_phase(item, "setup")
        if self._reports[0].passed:
            self._run_phase(item, "call")
        late, failed = self._sleeper.worst(), self._reports[-1].failed
        self._run_phase(item, "teardown", nextitem=None if late > LATE else nextitem)
        item._request = False
        item.funcargs = None
        return late if failed else max(late, self._sleeper.worst())

    def _run_phase(self, item: pytest.Item, when: Literal["setup", "call", "teardown"], **options: Any) -> None:
        settings = _get_item_settings(item)
        if settings.timeout:
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
        try:
            self._reports.append(call_and_report(item, when, log=False, **options))
        finally:
            item.ihook.pytest_timeout_cancel_timer(item=item)


def _excuse(item: Any, reports: list[pytest.TestReport], reason: str) -> None:
    """Let one of the reports say that the test was not judged, and none that it failed."""
    says_so = next((one for one in reports if _is_not_judged(one)), None)
    for report in reports:
        if says_so is None and (report.failed or report.when == "call"):
            report.outcome, says_so = "skipped", report
            report.longrepr = (str(item.path), item.location[1] or 0, reason)
        elif report.failed:
            report.outcome, report.longrepr = "passed", None


def _is_not_judged(report: pytest.TestReport) -> bool:
    return report.skipped and NOT_JUDGED in str(report.longrepr)


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return f"{report.when}: {crash.message if crash else text}"


class Count:
    """Counts the tests of the second stage in the whole run, and those that were not judged."""

    def __init__(self) -> None:
        self._tests: set[str] = set()
        self._not_judged: set[str] = set()
        self._dropped: dict[str, list[str]] = {}
        self._repeated = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (dropped := getattr(report, "dropped", None)) is not None:
            self._tests.add(report.nodeid)
            self._dropped[report.nodeid] = dropped
            self._repeated += report.runs - 1
        if _is_not_judged(report):
            self._not_judged.add(report.nodeid)

    @property
    def too_many(self) -> bool:
        return len(self._not_judged) > MOST * len(self._tests)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.too_many and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._tests:
            return
        terminalreporter.section("judged")
        terminalreporter.line(
            f"{len(self._not_judged)} of {len(self._tests)} tests were not judged, because the machine was late"
            f" by more than {LATE} s in each of {TRIES} tries. {self._repeated} tries were repeated."
        )
        for nodeid in sorted(self._not_judged):
            terminalreporter.line(f"  {nodeid}")
        for nodeid, messages in self._dropped.items():
            for message in messages:
                terminalreporter.line(f"Dropped, because the machine was late: {nodeid}: {message}")
        if self.too_many:
            terminalreporter.line(f"That is more than {MOST:.0%}: run them again on a machine with less to do.")


def pytest_configure(config: pytest.Config) -> None:
    if stage_of_run(config) == "1":
        return
    ending = ExitStack()
    config.add_cleanup(ending.close)
    shared = getattr(config, "workerinput", {}).get("sleeper")
    if shared is None:
        config.pluginmanager.register(Count())
    if shared is None and config.getoption("numprocesses", None):
        config.stash[_ADDRESS] = f"{ending.enter_context(TemporaryDirectory(prefix='dblock-sleeper-'))}/address"
        ending.enter_context(machine.share(config.stash[_ADDRESS]))
    else:
        with isolation.kept():
            config.pluginmanager.register(Judge(ending.enter_context(Sleeper(shared))))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let every process ask the same sleeper."""
    node.workerinput["sleeper"] = node.config.stash.get(_ADDRESS, None)

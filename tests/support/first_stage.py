"""Keep the first stage independent of the machine: fail a test of it that kills, freezes, forks or races a deadline.

A test of the first stage shows its claim without the machine's clock. What needs real time, kills or faults belongs to
the second stage, which measures how late the machine is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dblock._core import timings
from dblock._core.effects import Call
from dblock._core.timings import Timings
from dblock._runtime import event_loop
from dblock._runtime.runner import AsyncRunner, Runner
from dblock.admin.probe import behaviours, session_pair
from tests.support import machine
from tests.support.facade import function_of
from tests.support.shell import Shell
from tests.support.stages import stage_of, uses_injected_clock

PATIENT = Timings(
    connect_timeout=60,
    least_patience=20,
    give_up_within=20,
    claim_within=5,
    away_for=60,
    reply_within=60,
    probe_within=20,
    reads_end_within=20,
    interrupted_within=5,
    listener_ends_within=5,
    calls_end_within=20,
)
"""The timings of clients in the first stage, unless a test gives others: no patience ends while the machine stalls."""

SHORTEST_TTL = 10.0
"""Seconds. A renewal is due after a third of it, so a machine that stands still for 6 s ends no lease."""

TTL_OF_SLOT = slice(10, 11)
"""Where claim_slot() has the ttl, among other intervals."""

_FAULTS = {signal.SIGKILL: "kills a process", signal.SIGSTOP: "freezes a process"}
_DURATION = re.compile(r'\{?"?(\d+\.\d{6}) s')


@pytest.fixture(autouse=True)
def _patient_clients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage_of(request.node) == "1" and not uses_injected_clock(request.node):
        monkeypatch.setattr(timings, "default", PATIENT)
        monkeypatch.setattr(event_loop, "BLOCKED_AFTER", 60.0)
        monkeypatch.setattr(session_pair, "SECOND_WITHIN", PATIENT.probe_within)
        monkeypatch.setattr(behaviours, "ARRIVES_WITHIN", PATIENT.probe_within)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the first stage whose body depends on the machine. Fixtures may kill what a test has started."""
    if stage_of(item) != "1":
        return (yield)
    faults = {"measures a duration"} if item.get_closest_marker("alone") else set()
    with pytest.MonkeyPatch.context() as patch:

        def observe(owner: Any, name: str, find: Callable[..., str | None]) -> None:
            original = getattr(owner, name)

            def observed(*args: Any, **named: Any) -> Any:
                if fault := find(*args, **named):
                    faults.add(fault)
                return original(*args, **named)

            patch.setattr(owner, name, observed)

        observe(os, "kill", lambda pid, number: _FAULTS.get(number))
        observe(os, "killpg", lambda group, number: _FAULTS.get(number))
        observe(os, "fork", lambda: "forks this process")
        observe(subprocess.Popen, "send_signal", lambda process, sig: _FAULTS.get(sig))
        if not uses_injected_clock(item):
            observe(machine, "measuring", lambda: "measures a duration")
        observe(Shell, "start", _short_ttl)
        for runner in (Runner, AsyncRunner):
            observe(runner, "_call", _short_lease)
        try:
            result = yield
        except BaseException:
            if faults:  # perhaps the test failed because of them
                print(_message(faults))
            raise
    if faults:
        pytest.fail(_message(faults), pytrace=False)
    return result


def _message(faults: set[str]) -> str:
    longer = f", give the lease at least {SHORTEST_TTL:g} s" if "lease" in str(faults) else ""
    return (
        f"A test of the first stage {' and '.join(sorted(faults))}. Mark it second_stage{longer}, or show the claim on"
        " an injected clock: docs/contributing/tests.md."
    )


def _short_ttl(shell: Shell, *arguments: str, **options: Any) -> str | None:
    text = " ".join(arguments)
    # dblock refuses less than a second.
    if (found := re.search(r"--ttl[ =](\d+(?:\.\d+)?)s?(?: |$)", text)) and 1 <= float(found[1]) < SHORTEST_TTL:
        return f"starts a program with a lease of {found[1]} s"
    return None


def _short_lease(runner: Any, call: Call, *rest: Any, **options: Any) -> str | None:
    function = function_of(call)
    if not re.search("acquire|renew|claim_slot", function):
        return None
    for arg in call.args[TTL_OF_SLOT] if function == "claim_slot" else call.args:
        found = _DURATION.match(arg) if isinstance(arg, str) else None
        if found and float(found[1]) < SHORTEST_TTL:
            return f"has a lease of {float(found[1]):g} s"
    return None

"""The parts of `dblock migrate` that need no database: renewals, the check, and the supervisor's order of ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import click
import pytest

from dblock._core import clock
from dblock._core.lease_state import Reason
from dblock.cli.migrate.check import Check, CheckNotStarted, until
from dblock.cli.migrate.error_output import masked
from dblock.cli.migrate.renewals import Renewals
from dblock.cli.run import process_tree
from dblock.errors import LeaseLost, Unavailable
from tests.support.eventually import eventually


class FakeLease:
    """A lease without a database."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.trusted_until = clock.now() + ttl
        self.renewed = 0
        self.raises: list[Exception] = []
        self.reason: Reason | None = None

    @property
    def lost(self) -> FakeLease:
        return self

    def remaining(self) -> float:
        return max(self.trusted_until - clock.now(), 0.0)

    def renew(self) -> None:
        if self.raises:
            raise self.raises.pop()
        self.renewed += 1
        self.trusted_until = clock.now() + self.ttl


def asked(renewals: Renewals) -> bool:
    """Let the renewals ask the database now."""
    renewals.check()
    return True


def test_lease_is_not_renewed_while_the_command_is_stopped() -> None:
    stopped = threading.Event()
    stopped.set()
    lease: Any = FakeLease(60.0)
    with Renewals(lease, stopped.is_set) as renewals:
        renewals.check()
        eventually(lambda: renewals.was_stopped, "the look at the command")
        renewals.check()
        assert lease.renewed == 0
        stopped.clear()
        eventually(lambda: asked(renewals) and lease.renewed, "a renewal")
    assert renewals.was_stopped, "it was stopped a moment ago"


def test_renewal_that_fails_is_tried_again_until_the_lease_is_lost() -> None:
    lease: Any = FakeLease(60.0)
    lease.raises = [Unavailable("away")]
    with Renewals(lease, lambda: False) as renewals:
        eventually(lambda: asked(renewals) and lease.renewed, "the second try")
        lease.raises = [LeaseLost.__new__(LeaseLost)]
        eventually(lambda: asked(renewals) and not renewals._thread.is_alive(), "the end of the renewals")


@pytest.mark.second_stage
def test_check_runs_without_a_shell_and_no_longer_than_it_may() -> None:
    assert Check("true").passes({}, until(None))
    assert not Check("false").passes({}, until(None))
    assert Check("sh -c 'test \"$A\" = b'").passes({"A": "b"}, until(None))
    assert not Check("sleep 600").passes({}, until(0.1))
    with pytest.raises(CheckNotStarted) as missing:
        Check("no-such-program; true").passes({}, until(None))
    assert missing.value.program == "no-such-program;"
    with pytest.raises(click.UsageError, match="empty"):
        Check(" ")


@pytest.mark.second_stage
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc as Linux has it")
def test_stopped_process_is_found_below_its_ancestor() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"]) as shell:
        eventually(lambda: process_tree.children(shell.pid), "the child")
        (child,) = process_tree.children(shell.pid)
        assert not process_tree.has_stopped_child(shell.pid)
        os.kill(child, signal.SIGSTOP)
        eventually(lambda: process_tree.has_stopped_child(shell.pid), "the stop")
        for pid in (child, shell.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.second_stage
def test_preparation_of_the_end_is_done_when_the_command_ends() -> None:
    """In a process of its own, because the supervisor forks and handles signals."""
    program = """
import os, time
from dblock._core import clock
from dblock._core.lease_state import Reason
from dblock.cli.run.supervisor import Supervisor
from tests.dblock.cli.test_migrate_parts import FakeLease
lease = FakeLease(60.0)
lease.reason = Reason.SUPERSEDED
supervisor = Supervisor()
order = []
def before_end():
    time.sleep(0.5)
    order.append(supervisor._finished)
code = supervisor.run(lease, ["sleep", "600"], dict(os.environ), 1.0, 0.5, before_end)
print(order, code, supervisor.lease_ended)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[False] 137 True", done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "postgresql://ann:secret@db/app",
        "connection failed: password=secret",
        "connection failed: password = 'secret'",
        "+ PGPASSWORD=secret psql",
        "LINE 1: ALTER ROLE app PASSWORD 'secret';",
    ],
)
def test_passwords_are_masked(line: str) -> None:
    assert "secret" not in masked(line)
    assert "***" in masked(line)

"""One call of `dblock once`: claim a slot, run the command under its lease, record the outcome.

Guarantee: the outcome is recorded and the lock released only when every process of the command has ended. If the lease
is lost, the command is ended before another host may run the slot, and nothing is recorded: the next host records that
the run died.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from datetime import datetime
from typing import Any

import click

from dblock._core.slots import Claim
from dblock.cli import exit_codes
from dblock.cli.context import CommandContext
from dblock.cli.durations import written
from dblock.cli.output import duration, printable, to_json
from dblock.cli.run import options
from dblock.cli.run.passwords import VARIABLES, has_password
from dblock.cli.run.supervisor import StartFailed, Supervisor
from dblock.cli.signals import ignore_signals
from dblock.client import Client
from dblock.errors import DblockError
from dblock.recipes.schedules.run import Run
from dblock.recipes.schedules.schedule import Slots, slots_of

POLL = 0.5
"""Seconds between two questions about the run of another host."""

EARLIER_CODE = "_DBLOCK_ONCE_CODE"
"""The environment variable that carries the first exit code other than 0 of the slots that this process has run."""


class OnceRun:
    """Claims a slot and runs the command. Create this object before the process has threads."""

    def __init__(
        self,
        context: CommandContext,
        name: str,
        definition: dict[str, Any],
        command: list[str],
        *,
        grace: float,
        holder: str | None,
        listen_dsn: str | None,
    ) -> None:
        self._context = context
        self._name = name
        self._definition = definition
        self._command = command
        self._grace = grace
        self._listen_dsn = listen_dsn
        self._supervisor = Supervisor()
        # started may still run.
        self._client = Client(
            context.installed_target().conninfo(),
            schema=context.schema,
            holder=options.described_run(options.program_name(command)) if holder is None else holder,
            listen_dsn=listen_dsn,
            presence=None,
        )
        self.has_more = False
        """Whether more slots may be due, which a new process has to run."""
        self.earlier_code = int(os.environ.pop(EARLIER_CODE, "0"))

    def execute(self, *, wait: bool) -> int:
        """Run the slot that is due, if there is one for this host, and return the exit code."""
        supervisor = self._supervisor
        try:
            with self._client:
                slots = slots_of(self._client, self._name, **self._definition)
                claim, run = slots.claim()
                if run is None and wait and claim.slot is not None:
                    run, code = self._wait_for(slots, claim.slot)
                    if run is None:
                        return code
                if run is None:
                    self._say_why_not(claim)
                    self._report("skipped", claim.slot, None, exit_codes.OK, 0.0, claim.decision)
                    return exit_codes.OK
                try:
                    return self._run(slots, run)
                finally:
                    supervisor.end()
                    if supervisor.stuck or not supervisor.finished:
                        # Processes that cannot be ended may still be working, so the lock is not released: it expires.
                        sys.stderr.flush()
                        os._exit(exit_codes.LEASE_LOST)
        finally:
            supervisor.end()

    def start_again(self, code: int) -> None:
        """Replace this process by one that runs the next slot. A process with threads cannot start a second keeper."""
        environment = os.environ | {EARLIER_CODE: str(self.earlier_code or code)}
        # A DSN with a password is no longer among the arguments.
        for option, dsn in (("--dsn", self._context.dsn), ("--listen-dsn", self._listen_dsn)):
            if dsn is not None and has_password(dsn):
                environment[VARIABLES[option]] = dsn
        if sys.executable:
            os.execve(sys.executable, list(sys.orig_argv), environment)  # noqa: S606  (this very program)

    def _run(self, slots: Slots, run: Run) -> int:
        lease, supervisor = run.lease, self._supervisor
        environment = os.environ | {
            "DBLOCK_SCHEDULE": run.name,
            "DBLOCK_SLOT": run.slot.isoformat(),
            "DBLOCK_LOCK": lease.name,
            "DBLOCK_TOKEN": str(lease.token),
            "DBLOCK_DEADLINE": lease.expires_at.isoformat(),
        }
        began = time.monotonic()
        try:
            code = supervisor.run(lease, self._command, environment, self._grace, options.margin(lease.ttl))
        except StartFailed as error:
            code = options.report_not_started(self._context, error, self._command[0])
        with ignore_signals():  # a signal must not keep the outcome out of the ledger
            options.report_supervision(self._context, supervisor)
            if supervisor.stuck:
                return exit_codes.LEASE_LOST
            recorded = None if supervisor.lease_ended else self._record(slots, run, code)
            if recorded is None:
                return self._report_loss(run)
        self.has_more = self._definition["catch_up"] == "all" and not supervisor.forwarded
        self._report("ran", run.slot, lease.token, code, time.monotonic() - began)
        return code

    def _record(self, slots: Slots, run: Run, code: int) -> str | None:
        error = None if code == 0 else f"the command ended with exit code {code}"
        try:
            return slots.end(run, "succeeded" if code == 0 else "failed", code, error)
        except DblockError as problem:
            self._context.notice(f"the outcome of the run could not be recorded: {problem}")
            return None

    def _wait_for(self, slots: Slots, slot: datetime) -> tuple[Run | None, int]:
        """Wait until another host has run the slot, and return the exit code; or return the run that this host gets."""
        is_paused = False
        while True:
            found = slots.outcome(slot)
            if found is not None and found.outcome in ("succeeded", "failed", "skipped", "missed"):
                code = found.exit_code if found.exit_code is not None else int(found.outcome == "failed")
                self._report(found.outcome, slot, None, code, 0.0, "another host has run it")
                return None, code
            # While a schedule is paused, no host records that a run died, and no host runs its slot again.
            is_held_back = found is not None and found.outcome is None and not found.alive and is_paused
            if is_held_back or (found is not None and found.outcome == "died" and not slots.definition.stands_by):
                then = "the schedule is paused" if is_held_back else "its slot is not rerun"
                message = f"the run of schedule {printable(self._name)!r} died on another host; {then}."
                self._context.failure(message, "LeaseLost", exit_codes.LEASE_LOST)
                return None, exit_codes.LEASE_LOST
            if found is None:
                return None, exit_codes.OK
            time.sleep(POLL)
            claim, run = slots.claim(queue=False)
            if run is not None:
                return run, exit_codes.OK
            is_paused = claim.decision == "paused"

    def _say_why_not(self, claim: Claim) -> None:
        """Say at a terminal why the command was not run. Cron would mail it from every host."""
        if self._context.quiet or self._context.as_json or sys.stderr is None or not sys.stderr.isatty():
            return
        schedule = f"schedule {printable(self._name)!r}"
        why = {
            "running": f"a run of {schedule} is active",
            "skipped": f"a run of {schedule} is active, and the slot was skipped",
            "paused": f"{schedule} is paused. To resume it: dblock schedules resume {shlex.quote(self._name)}",
        }.get(claim.decision, f"{schedule} is not due")
        if claim.decision == "none" and math.isfinite(claim.wait):
            why = f"{schedule} is next due in {duration(claim.wait)}"
        self._context.notice(f"the command was not run: {why}{'' if claim.decision == 'paused' else '.'}")

    def _report_loss(self, run: Run) -> int:
        supervisor = self._supervisor
        reason = run.lost.reason or supervisor.loss_reason
        ended = "the command was ended" if supervisor.lease_ended else "the command had already ended"
        at_most = self._definition["at_most"]
        what = f"the lease of schedule {printable(self._name)!r} was lost ({reason})"
        if at_most is not None and reason not in ("forced", "superseded"):
            what = f"--at-most {written(at_most)} of schedule {printable(self._name)!r} has passed"
        message = f"{what}; {ended}."
        # {printable(self._name)!r} was lost ({reason}); {ended}."
        self._context.failure(message, "LeaseLost", exit_codes.LEASE_LOST)
        return exit_codes.LEASE_LOST

    def _report(
        self, result: str, slot: datetime | None, token: int | None, code: int, seconds: float, why: str | None = None
    ) -> None:
        """Print the result as one line of JSON if --json was given, after the command's own output."""
        if self._context.as_json:
            data = {
                "name": self._name,
                "result": result,
                "why": why,
                "slot": slot.isoformat() if slot else None,
                "token": token,
                "seconds": round(seconds, 3),
                "exit_code": code,
            }
            click.echo(to_json(data))

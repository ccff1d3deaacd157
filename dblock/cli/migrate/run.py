"""One run of `dblock migrate`: take the turn, run the command under the lease, record how it ended, release.

Guarantee: the lock is released only when every process of the command has ended and no session of the run is left. If
the lease is lost, the sessions of the run are ended first, and then the command: a command that was killed does not
stop its statement.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psycopg
from psycopg.conninfo import make_conninfo

from dblock._runtime.isolation import is_option_refused
from dblock._runtime.target import Target
from dblock.admin.migration_ledger import MigrationLedger
from dblock.cli import exit_codes
from dblock.cli.context import CommandContext
from dblock.cli.migrate.check import Check, until
from dblock.cli.migrate.error_output import ErrorOutput
from dblock.cli.migrate.renewals import Renewals
from dblock.cli.migrate.scripts import text_of
from dblock.cli.output import printable, to_json
from dblock.cli.run import options
from dblock.cli.run.supervisor import StartFailed, Supervisor
from dblock.cli.signals import ignore_signals
from dblock.errors import DblockError, SessionsRemain, Unavailable
from dblock.recipes.migrations import contract
from dblock.recipes.migrations.invalid_indexes import drop_named, marked_session
from dblock.recipes.migrations.turn import Plan, Turn

ENDED_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""A command that one of these has ended has not failed: another replica may run it."""

RETRY_INTERVAL = 0.5
"""Seconds between two tries to record the end of a run."""


class MigrationRun:
    """One replica's run. Create it before the process has threads."""

    def __init__(
        self,
        context: CommandContext,
        plan: Plan,
        command: list[str],
        *,
        grace: float,
        holder: str | None,
        check: Check | None = None,
        scripts: Sequence[Path] = (),
        listen_dsn: str | None = None,
        hand_down_options: bool = True,
    ) -> None:
        self._context = context
        self._plan = plan
        self._command = command
        self._grace = grace
        self._check = check
        self._scripts = scripts
        self._hand_down_options = hand_down_options
        self._renewals: Renewals | None = None
        self._errors = ErrorOutput()
        self._supervisor = Supervisor(self._errors.writer)
        self._target = context.target()
        # No presence: if this process died, the next waiter would get the lock at once, while processes that it had
        # started may still open sessions.
        self._turn = Turn(
            self._target.conninfo(),
            plan,
            schema=context.schema,
            holder=options.described_run(plan.migrator) if holder is None else holder,
            listen_dsn=listen_dsn,
            keep_alive=False,
            presence=None,
            is_done=self._is_done,
            report_wait=lambda text: None if context.quiet else context.notice(text),
            on_sessions_ended=self._check_lease,
        )

    def execute(self) -> int:
        """Run the command if it is this replica's turn, and return the exit code."""
        supervisor = self._supervisor
        try:
            with self._turn:
                if not self._turn.take():
                    self._report_nothing_to_do()
                    return exit_codes.OK
                try:
                    return self._run()
                finally:
                    supervisor.end()
                    if supervisor.stuck or not supervisor.finished:
                        # Processes that cannot be ended may still be working, so the lock is not released: it expires.
                        sys.stderr.flush()
                        os._exit(exit_codes.LEASE_LOST)
        finally:
            supervisor.end()

    def _is_done(self) -> bool:
        if self._check is None:
            return False
        if not self._turn.has_begun:
            return self._check.passes({}, until(self._plan.timeout))
        with Renewals(self._turn.lease, lambda: False) as self._renewals:
            return self._check.passes(self._contract(), lambda: self._turn.lease.remaining() > 0)

    def _check_lease(self) -> None:
        if self._renewals is not None:
            self._renewals.check()

    def _contract(self) -> dict[str, str]:
        """Return the variables that hand the session contract down to the command."""
        given, turn = os.environ.get("PGOPTIONS"), self._turn
        arguments = (turn.mark, self._plan.ttl, self._plan.name, turn.lease.token, given)
        variables = contract.environment(*arguments, options=True)
        if not self._hand_down_options:
            return contract.environment(*arguments, options=False)
        if not takes_options(self._target, variables["PGOPTIONS"], turn.lease.token):
            self._hand_down_options = False
            self._context.notice(
                "the database, or a pooler in front of it, refuses or drops session options, so the command gets no "
                "PGOPTIONS: a statement_timeout of its role applies, and the server does not notice a killed command."
            )
            return contract.environment(*arguments, options=False)
        return variables

    def _run(self) -> int:
        lease, supervisor = self._turn.lease, self._supervisor
        if self._scripts:
            self._drop_invalid_indexes()
        self._report_invalid_indexes()
        environment = os.environ | self._contract() | {"DBLOCK_DEADLINE": lease.expires_at.isoformat()}
        began = time.monotonic()
        self._errors.start()
        with Renewals(lease, supervisor.has_stopped) as self._renewals:
            lease.renew()
            try:
                code = supervisor.run(
                    lease, self._command, environment, self._grace, options.margin(lease.ttl), self._end_sessions
                )
                outcome = None
            except StartFailed as error:
                code = options.report_not_started(self._context, error, self._command[0])
                outcome = "killed"
            with ignore_signals():  # a signal must not keep the end of the run out of the ledger
                return self._finish(code, outcome, time.monotonic() - began)

    def _finish(self, code: int, outcome: str | None, seconds: float) -> int:
        """Record how the command ended, release the lock, and return the exit code."""
        lease, supervisor = self._turn.lease, self._supervisor
        options.report_supervision(self._context, supervisor)
        if supervisor.stuck:
            return exit_codes.LEASE_LOST
        self._end_sessions()
        outcome = outcome or self._outcome(code)
        recorded = self._record(outcome, None if outcome == "succeeded" else self._described_failure(code))
        released = self._released()
        if supervisor.lease_ended or recorded == "lost" or (outcome == "succeeded" and recorded != outcome):
            return self._report_loss()
        if not released and outcome == "succeeded":
            self._context.notice(f"the lock {printable(lease.name)!r} was lost after the run was recorded.")
        if recorded == "failed" and not self._context.quiet:
            self._report_failure()
        self._report_result({"succeeded": "migrated"}.get(outcome, outcome), code, seconds)
        return code

    def _report_failure(self) -> None:
        plan = self._plan
        and_then = ", and" if plan.attempts == 1 else f". After {plan.attempts} failures"
        self._context.notice(
            f"the failure is recorded{and_then} no replica tries again until you run: "
            f"dblock migrate --name {shlex.quote(plan.name)} --retry"
        )

    def _outcome(self, code: int) -> str:
        supervisor = self._supervisor
        if supervisor.lease_ended:
            return "lost"
        if code == 0:
            return "succeeded"
        if self._turn.lease.lost.is_set():
            return "lost"  # its sessions were ended, and that is no failure of the version
        by_signal = code > 128 and code - 128 in ENDED_FROM_OUTSIDE
        return "killed" if by_signal or supervisor.forwarded & ENDED_FROM_OUTSIDE else "failed"

    def _released(self) -> bool:
        try:
            return self._turn.lease.release()
        except DblockError as error:
            self._context.notice(f"the lock could not be released; it is free when its lease expires: {error}")
            return True

    def _described_failure(self, code: int) -> str:
        said = self._errors.last_lines()
        if said:
            return said
        where = "" if self._errors.is_kept else ", and its error output went to a terminal and was not kept"
        return f"the command ended with exit code {code}{where}"

    def _end_sessions(self) -> None:
        """End the sessions of the run. A session that stays is reported, and the next holder refuses to start."""
        try:
            self._turn.end_own_sessions()
        except SessionsRemain as error:
            pids = ", ".join(map(str, error.pids))
            self._context.notice(f"sessions of this run could not be ended: pid {pids}.")
        except DblockError as error:
            self._context.notice(f"the sessions of this run could not be ended: {error}")

    def _record(self, outcome: str, error: str | None) -> str:
        """Record how the run ended, and return what the ledger has. Try for as long as the lease lasts."""
        while True:
            try:
                return self._turn.finish(outcome, error)
            except Unavailable as problem:
                if not self._turn.lease.remaining():
                    self._context.notice(f"the end of the run could not be recorded: {problem}")
                    return "lost"
                time.sleep(RETRY_INTERVAL)

    def _report_loss(self) -> int:
        lease, supervisor = self._turn.lease, self._supervisor
        reason: Any = lease.lost.reason or supervisor.loss_reason
        if self._renewals is not None and self._renewals.was_stopped:
            reason = "the command was stopped by a signal, so the lease was not renewed"
        ended = "the command was ended" if supervisor.lease_ended else "the command had already ended"
        message = f"the lease of migration {printable(lease.name)!r} was lost ({reason}); {ended}."
        self._context.failure(message, "LeaseLost", exit_codes.LEASE_LOST)
        return exit_codes.LEASE_LOST

    def _report_nothing_to_do(self) -> None:
        plan = self._plan
        to = "" if plan.version is None else f" to version {printable(plan.version)!r}"
        if not self._context.quiet:
            self._context.notice(f"migration {printable(plan.name)!r}{to} is done already; nothing was run.")
        self._report_result("nothing to do", exit_codes.OK, 0.0)

    def _report_result(self, result: str, code: int, seconds: float) -> None:
        """Print the result as one line of JSON if --json was given, after the command's own output."""
        if self._context.as_json:
            ran = self._turn.has_lease
            data = {
                "name": self._plan.name,
                "version": self._plan.version,
                "result": result,
                "token": self._turn.lease.token if ran else None,
                "seconds": round(seconds, 3),
                "exit_code": code,
            }
            click.echo(to_json(data))

    def _drop_invalid_indexes(self) -> None:
        """Drop the invalid indexes that the scripts name. Each is logged, and those that are left are reported."""
        lease, text = self._turn.lease, text_of(self._scripts)
        with (
            Renewals(lease, lambda: False) as self._renewals,
            marked_session(self._target.conninfo(), self._turn.mark, self._plan.ttl) as session,
        ):
            drop_named(session, text, lock=lease.name, token=lease.token, schema=self._context.schema)

    def _report_invalid_indexes(self) -> None:
        try:
            with MigrationLedger(self._target, self._context.schema) as ledger:
                found = ledger.invalid_indexes()
        except DblockError:
            return
        if found:
            listed = ", ".join(f"{printable(index)} on {printable(table)}" for index, table in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            self._context.notice(
                f"a failed CONCURRENTLY has left invalid indexes: {listed}{more}. Drop or reindex them."
            )


def takes_options(target: Target, given: str, token: int) -> bool:
    """Return whether a session can be opened with these options, and has them."""
    try:
        with psycopg.connect(make_conninfo(target.conninfo(), options=given), autocommit=True) as connection:
            row = connection.execute("SELECT current_setting('dblock.migration', true)").fetchone()
            return row is not None and row[0] == str(token)
    except psycopg.OperationalError as error:
        return not (is_option_refused(error) or "parameter" in str(error))

"""`dblock migrate --wait-only`: wait until another container has migrated the database, without a lock."""

from __future__ import annotations

import math
import time

from dblock._core import clock
from dblock.admin.migration_ledger import MigrationLedger
from dblock.cli import exit_codes
from dblock.cli.context import CommandContext
from dblock.cli.output import printable
from dblock.errors import DatabaseAhead, MigrationFailed, SchemaMissing, Unavailable
from dblock.recipes.migrations.turn import Plan

POLL_INTERVAL = 1.0
"""Seconds between two looks at the ledger."""


def wait_until_done(context: CommandContext, plan: Plan) -> int:
    """Poll the ledger until a run to the plan's version has succeeded, has failed too often, or the time is up.

    The database may still be starting, and the first migration may still have to install dblock. Both end the wait only
    with its timeout.
    """
    deadline = math.inf if plan.timeout is None else clock.now() + plan.timeout
    reported, problem = False, ""
    with MigrationLedger(context.target(), context.schema) as ledger:
        while True:
            problem = ""
            try:
                state = ledger.state(plan.name, plan.version)
            except (SchemaMissing, Unavailable) as error:
                problem = f" ({error})"
            else:
                if state.done and state.newer is not None and plan.when_ahead == "fail":
                    raise DatabaseAhead(plan.name, str(plan.version), state.newer)
                if state.done:
                    return exit_codes.OK
                if state.failures >= plan.attempts:
                    raise MigrationFailed(plan.name, plan.version, state.failures, state.error)
            what = f"migration {printable(plan.name)!r} to version {printable(plan.version)!r}"
            if clock.now() >= deadline:
                if not context.quiet:
                    message = f"{what} was not done within {plan.timeout:g} s{problem}."
                    context.failure(message, "LockTimeout", exit_codes.NOT_ACQUIRED)
                return exit_codes.NOT_ACQUIRED
            if not reported and not context.quiet:
                context.notice(f"waiting for {what}{problem}")
                reported = True
            time.sleep(max(min(POLL_INTERVAL, deadline - clock.now()), 0.0))

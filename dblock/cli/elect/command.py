"""`dblock elect`: run a command only while leading an election."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.durations import seconds, written
from dblock.cli.output import printable
from dblock.cli.run import options
from dblock.cli.run.passwords import hide_passwords
from dblock.cli.signals import exit_on_signal, ignore_signals
from dblock.errors import DatabaseError, DblockError, LeaseLost, NotWritable, Unavailable

if TYPE_CHECKING:
    from dblock._core.lease_state import Reason
    from dblock.cli.run.supervisor import Supervisor
    from dblock.recipes.elections import Election, Term

MIN_TTL, MAX_TTL = 1.0, 86_400.0
DEFAULT_TTL = 10.0

LONGEST_PAUSE = 5.0
"""Seconds before the next campaign while the database is away. The pause doubles from a twentieth of a second."""

THREADS_END_WITHIN = 5.0
"""Seconds that the threads of a closed client have to end, before the next command can be started."""

ENDED_BY = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""A command that got one of these signals from outside is not started again."""

EPILOG = f"""\b
Exit codes: the command's own, or 128 + N if signal N ended it; and
{options.CODES}
The command finds DBLOCK_ELECTION, DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment. Pass the token to
every resource that it writes to."""


class _SupervisedTerm:
    """A term as the supervisor sees a lease: a term that must end looks like a lease that must be released."""

    def __init__(self, term: Term) -> None:
        self._term = term
        self.lost = self

    @property
    def trusted_until(self) -> float:
        return self._term.trusted_until

    @property
    def reason(self) -> Reason | None:
        from dblock._core.lease_state import Reason

        return self._term.lost.reason or (Reason.FORCED if self._term.ending_reason else None)


@command("elect", epilog=EPILOG)
@click.argument("name")
@click.option(
    "--ttl",
    type=seconds,
    default=DEFAULT_TTL,
    show_default=written(DEFAULT_TTL),
    metavar="TIME",
    help="Term duration unless renewed.",
)
@click.option(
    "--priority",
    type=int,
    default=0,
    show_default=True,
    help="Of the candidates that wait, one with the highest priority leads next.",
)
@click.option(
    "--version",
    metavar="N.N.N",
    help="Of the candidates with the same priority, one with the highest version leads next.",
)
@click.option(
    "--value", metavar="JSON", help="What `dblock leader` and observers see of this leader, such as its address."
)
@options.supervised_options
def elect(
    context: CommandContext,
    name: str,
    ttl: float,
    priority: int,
    version: str | None,
    value: str | None,
    timeout: float | None,
    grace: float | None,
    holder: str | None,
    listen_dsn: str | None,
    quiet: bool,
    command_line: tuple[str, ...],
) -> int:
    """Run a command only while leading an election. The command is ended before another candidate can lead.

    If the command ends by itself, dblock elect ends with the exit code of the command. After a loss, a transfer or a
    hand-over to a higher priority, dblock elect campaigns again, and starts the command again when it leads.
    """
    argv = options.checked_command(command_line, "dblock elect NAME -- ./scheduler")
    grace = options.checked_grace(ttl, grace, MIN_TTL, MAX_TTL)
    try:
        published = None if value is None else json.loads(value)
    except ValueError as error:
        raise click.UsageError(f'--value is JSON, such as \'"host:80"\' or \'{{"url": "…"}}\': {error}') from None
    context.quiet = quiet
    listen_dsn = hide_passwords(context, listen_dsn)
    program = options.program_name(argv)
    candidate = _Candidate(
        context,
        name,
        {"ttl": ttl, "value": published, "priority": priority, "version": version},
        holder=options.described_run(program) if holder is None else holder,
        listen_dsn=listen_dsn,
        timeout=timeout,
    )
    with exit_on_signal():
        while (code := candidate.lead_once(argv, grace)) is None:
            pass
    return code


class _Candidate:
    """Campaigns and runs the command, one term after another."""

    def __init__(
        self,
        context: CommandContext,
        name: str,
        election: dict[str, Any],
        *,
        holder: str,
        listen_dsn: str | None,
        timeout: float | None,
    ) -> None:
        self._context = context
        self._name = name
        self._options = election
        self._holder = holder
        self._listen_dsn = listen_dsn
        self._timeout = timeout
        self._pause = 0.05
        self._has_connected = False

    def lead_once(self, argv: list[str], grace: float) -> int | None:
        """Campaign, and run the command for one term. Return the exit code, or None to campaign again."""
        from dblock.cli.run.supervisor import Supervisor
        from dblock.client import Client

        _wait_for_threads()
        supervisor = Supervisor()  # before this process has threads
        try:
            # No presence: if this process died, the next candidate would lead at once, while processes that it had
            # started may still run.
            with Client(
                self._context.installed_target().conninfo(),
                schema=self._context.schema,
                holder=self._holder,
                listen_dsn=self._listen_dsn,
                presence=None,
            ) as client:
                election = client.election(self._name, **self._options)
                term = self._campaign(election)
                if term is None:
                    return None
                return self._run_under(term, supervisor, argv, grace)
        finally:
            supervisor.end()

    def _campaign(self, election: Election) -> Term | None:
        """Wait for a term. Return None, to campaign again, if a database that was reached once is away."""
        try:
            if not self._context.quiet and (leader := election.leader()) is not None:
                self._context.notice(f"waiting to lead {printable(self._name)!r}, led by {printable(leader.holder)}")
            self._has_connected = True
            term = election.campaign(self._timeout)
        except (Unavailable, NotWritable) as error:
            if not self._has_connected:
                raise
            self._context.notice(f"the campaign failed and is repeated: {error}")
            time.sleep(self._pause)
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            return None
        self._pause = 0.05
        return term

    def _run_under(self, term: Term, supervisor: Supervisor, argv: list[str], grace: float) -> int | None:
        from dblock.cli.run.supervisor import StartFailed

        context = self._context
        environment = os.environ | {
            "DBLOCK_ELECTION": self._name,
            "DBLOCK_LOCK": f"election:{self._name}",
            "DBLOCK_TOKEN": str(term.token),
            "DBLOCK_DEADLINE": term.expires_at.isoformat(),
        }
        started = True
        try:
            with term:
                try:
                    lease: Any = _SupervisedTerm(term)
                    code = supervisor.run(lease, argv, environment, grace, options.margin(self._options["ttl"]))
                except StartFailed as error:
                    started, code = False, options.report_not_started(context, error, argv[0])
                finally:
                    supervisor.end()
                    if not supervisor.finished or supervisor.stuck:
                        # Processes that cannot be ended may still be working, so the term is not released: it expires.
                        options.report_supervision(context, supervisor)
                        sys.stderr.flush()
                        os._exit(exit_codes.LEASE_LOST)
                must_end = term.ending_reason or term.lost.reason or ("lost" if supervisor.lease_ended else None)
                with ignore_signals():
                    options.report_supervision(context, supervisor)
        except LeaseLost as error:
            must_end = must_end or error.reason
        except DatabaseError as error:
            context.notice(f"the term could not be released; it ends when its lease expires: {error}")
        if not started or must_end is None or supervisor.forwarded & ENDED_BY or supervisor.keeper_died:
            return code
        if not context.quiet:
            context.notice(
                f"the term of election {printable(self._name)!r} ended ({must_end}) and the command was ended; "
                "campaigning again"
            )
        return None


def _wait_for_threads() -> None:
    """Wait until the threads of the last client have ended: a process with threads must not fork."""
    give_up_at = time.monotonic() + THREADS_END_WITHIN
    while threading.active_count() > 1 and time.monotonic() < give_up_at:
        time.sleep(0.005)
    if threading.active_count() > 1 and threading.current_thread() is threading.main_thread():
        raise DblockError("The threads of the last term have not ended, so no command can be started.")

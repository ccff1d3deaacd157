"""`dblock run`: run a command while holding a lock."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command, lock_name
from dblock.cli.output import printable
from dblock.cli.run.passwords import hide_passwords
from dblock.cli.signals import exit_on_signal
from dblock.errors import DatabaseError, LockTimeout

if TYPE_CHECKING:
    from dblock.cli.run.supervisor import Supervisor
    from dblock.lease import Lease
    from dblock.lock import Lock

MAX_GRACE = 0.4
"""Part of the ttl. A lease is renewed after a third of its ttl, and a late renewal must not end the command."""

MIN_TTL, MAX_TTL = 1.0, 86_400.0
MAX_MARGIN = 0.5
"""Seconds before the end of the lease at which the command is killed; a twentieth of the ttl if that is less."""

EPILOG = f"""\b
Exit codes: the command's own, or 128 + N if signal N ended it; and
  {exit_codes.RUN_USAGE_ERROR}   the command line is invalid
  {exit_codes.UNREACHABLE}   the database could not be reached
  {exit_codes.REFUSED}   the database replied with an error
  {exit_codes.NOT_ACQUIRED}   the lock was not acquired
  {exit_codes.LEASE_LOST}   the lease was lost, and the command was ended
  {exit_codes.ACCESS_DENIED}   the role lacks a privilege
  {exit_codes.NOT_CONFIGURED}   no database is named, or dblock is not installed in it
  {exit_codes.CANNOT_EXECUTE}  the command cannot be executed
  {exit_codes.NOT_FOUND}  the command was not found

The command finds DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment. Pass the token to every resource
that it writes to."""


@command("run", epilog=EPILOG)
@lock_name
@click.option("--ttl", type=float, default=30.0, show_default=True, metavar="S", help="Lease duration unless renewed.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="How long to wait for the lock (default: no limit).",
)
@click.option(
    "--skip-if-held", is_flag=True, help=f"Do not wait: exit with code {exit_codes.NOT_ACQUIRED} if the lock is held."
)
@click.option("--grace", type=float, metavar="S", help="Time from SIGTERM to SIGKILL (default: a quarter of the ttl).")
@click.option("--holder", metavar="TEXT", help="Name of this run that others see (default: machine, process, program).")
@click.option(
    "--meta", multiple=True, metavar="KEY=VALUE", help="Text to show beside the holder; repeat for several keys."
)
@click.option(
    "--listen-dsn",
    metavar="DSN",
    help="The same database past a pooler, for the connection over which a waiting run is woken.",
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Report neither that the command waits for the lock nor that it was not run."
)
@click.argument("command_line", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def run(
    context: CommandContext,
    name: str,
    ttl: float,
    timeout: float | None,
    skip_if_held: bool,
    grace: float | None,
    holder: str | None,
    meta: tuple[str, ...],
    listen_dsn: str | None,
    quiet: bool,
    command_line: tuple[str, ...],
) -> int:
    """Run a command while holding a lock; it is ended before another client can get the lock."""
    from dblock.cli.run.supervisor import Supervisor
    from dblock.client import Client

    command_line = command_line[1:] if command_line[:1] == ("--",) else command_line
    if not command_line:
        raise click.UsageError("The command is missing. Put it after --, as in: dblock run NAME -- make report")
    if skip_if_held and timeout is not None:
        raise click.UsageError("--skip-if-held does not wait, and --timeout does. Use only one of them.")
    if not MIN_TTL <= ttl <= MAX_TTL:
        raise click.UsageError(
            f"--ttl must be from {MIN_TTL:g} s, so that there is time to end the command, to a day; got {ttl:g}."
        )
    grace = ttl / 4 if grace is None else grace
    if not 0 <= grace <= ttl * MAX_GRACE:
        raise click.UsageError(
            f"--grace must be from 0 to {MAX_GRACE:g} of the ttl, here {ttl * MAX_GRACE:g} s; got {grace:g}."
        )
    if holder is not None and not holder.strip():
        raise click.UsageError("--holder is empty. Name this run, or leave the option out.")
    # Only the program's name: its arguments may be secret.
    program = _program_name(command_line[0])
    shown = {"command": program} | _parsed(meta)
    context.quiet = quiet
    listen_dsn = hide_passwords(context, listen_dsn)
    supervisor = Supervisor()  # before this process has threads
    try:
        # No presence: if this process died, the next waiter would get the lock at once, while processes that it had
        # started may still run.
        with (
            exit_on_signal(),
            Client(
                context.installed_target().conninfo(),
                schema=context.schema,
                holder=f"{socket.gethostname()} pid {os.getpid()} ({program})" if holder is None else holder,
                listen_dsn=listen_dsn,
                presence=None,
            ) as client,
        ):
            lock = client.lock(name, ttl=ttl, timeout=timeout, meta=shown)
            try:
                lease = _acquired(context, lock, waits=not skip_if_held and timeout != 0)
            except LockTimeout:
                if not quiet:
                    context.held_by = _described_holder(lock)
                raise
            try:
                return _run_under(context, lease, supervisor, grace, list(command_line))
            finally:
                if not supervisor.finished or supervisor.stuck:
                    # Processes that cannot be ended may still be working, so the lock is not released: it expires.
                    sys.stderr.flush()
                    os._exit(exit_codes.LEASE_LOST)
    finally:
        supervisor.end()


def _program_name(program: str) -> str:
    return os.fsencode(os.path.basename(program)).decode(errors="replace")


def _parsed(meta: tuple[str, ...]) -> dict[str, str]:
    for one in meta:
        if not one.partition("=")[0].strip() or "=" not in one:
            raise click.UsageError(f"--meta takes KEY=VALUE, with a key that is not empty; got {one!r}.")
    return dict(one.split("=", 1) for one in meta)


def _acquired(context: CommandContext, lock: Lock[Lease], waits: bool) -> Lease:
    lease = lock.try_acquire()
    if lease is not None:
        return lease
    if not waits:
        raise LockTimeout(lock.name, 0.0)
    if not context.quiet:
        context.notice(_describe_wait(lock))
    return lock.acquire()


def _described_holder(lock: Lock[Lease]) -> str:
    """Return what is known of the lock's holder. Any role that may lock may ask for it."""
    try:
        holder = lock.holder()
    except DatabaseError:
        return ""
    return f"; it is held by {printable(holder.holder)}" if holder else ""


def _describe_wait(lock: Lock[Lease]) -> str:
    holder = lock.holder()
    held_by = f", held by {printable(holder.holder)}" if holder else ""
    ahead = len(lock.queue())
    queue = f"; {ahead} waiter{'' if ahead == 1 else 's'} ahead" if ahead else ""
    return f"waiting for lock {printable(lock.name)!r}{held_by}{queue}"


def _run_under(
    context: CommandContext, lease: Lease, supervisor: Supervisor, grace: float, command_line: list[str]
) -> int:
    from dblock.cli.run.supervisor import StartFailed

    environment = os.environ | {
        "DBLOCK_LOCK": lease.name,
        "DBLOCK_TOKEN": str(lease.token),
        "DBLOCK_DEADLINE": lease.expires_at.isoformat(),
    }
    try:
        code = supervisor.run(lease, command_line, environment, grace, margin=min(lease.ttl / 20, MAX_MARGIN))
    except StartFailed as error:
        program = printable(command_line[0])
        if error.number == errno.ENOENT:
            code = exit_codes.NOT_FOUND
            context.failure(f"{program!r} was not found. Is it installed, and in PATH?", "NotFound", code)
        else:
            why = os.strerror(error.number) if error.number else str(error)
            code = exit_codes.CANNOT_EXECUTE
            context.failure(f"{program!r} cannot be executed: {why}.", "CannotExecute", code)
    if supervisor.keeper_died:
        context.notice("the process that supervises the command was killed, and the command with it.")
    if supervisor.stuck:
        # They run as another user, or hang in the kernel.
        pids = ", ".join(map(str, supervisor.stuck))
        context.notice(f"these processes could not be ended: {pids}. The lock is free when its lease expires.")
        return exit_codes.LEASE_LOST
    try:
        released = lease.release()
    except DatabaseError as error:
        context.notice(f"the lock could not be released; it is free when its lease expires: {error}")
        released = True
    if supervisor.lease_ended or not released:
        ended = "the command was ended" if supervisor.lease_ended else "the command had already ended"
        reason = lease.lost.reason or supervisor.loss_reason  # a release that finds no lease learns the reason
        message = f"the lease of lock {printable(lease.name)!r} was lost ({reason}); {ended}."
        context.failure(message, "LeaseLost", exit_codes.LEASE_LOST)
        return exit_codes.LEASE_LOST
    return code

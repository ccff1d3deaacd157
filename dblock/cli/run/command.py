"""`dblock run`: run a command while holding a lock."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import Asked, command, lock_name
from dblock.cli.output import shown
from dblock.cli.signals import ended_in_order
from dblock.errors import DatabaseError, LockTimeout

if TYPE_CHECKING:
    from dblock.cli.run.supervisor import Supervisor
    from dblock.lease import Lease
    from dblock.lock import Lock

MOST_GRACE = 0.4
"""Of the ttl. A lease is renewed when a third of it has gone, and a renewal may be late without ending the command."""

LEAST_TTL, MOST_TTL = 1.0, 86_400.0
MOST_MARGIN = 0.5
"""Seconds before the end of its lease at which a command is killed, or a twentieth of the ttl if that is less."""

EPILOG = f"""\b
Exit codes: the command's own, or 128 + N where signal N ended it; and
  {exit_codes.NOT_ACQUIRED}   the lock was not acquired
  {exit_codes.LOST}   the lease was lost, and the command ended
  {exit_codes.UNREACHABLE}   the database could not be reached
  {exit_codes.CANNOT_EXECUTE}  the command cannot be executed
  {exit_codes.NOT_FOUND}  the command was not found

The command has DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment: show the token to every resource
that it
writes to."""


@command("run", epilog=EPILOG)
@lock_name
@click.option(
    "--ttl", type=float, default=30.0, show_default=True, metavar="S", help="How long a lease lasts unrenewed."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="How long to wait for the lock (default: without end).",
)
@click.option("--skip-if-held", is_flag=True, help=f"Do not wait; exit code {exit_codes.NOT_ACQUIRED} if it is held.")
@click.option("--grace", type=float, metavar="S", help="Between SIGTERM and SIGKILL (default: a quarter of the ttl).")
@click.option("-q", "--quiet", is_flag=True, help="Do not say that the lock is waited for.")
@click.argument("line", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def run(
    asked: Asked,
    name: str,
    ttl: float,
    timeout: float | None,
    skip_if_held: bool,
    grace: float | None,
    quiet: bool,
    line: tuple[str, ...],
) -> int:
    """Run a command while holding a lock; it is ended before another can have the lock."""
    from dblock.cli.run.supervisor import Supervisor
    from dblock.client import Client

    line = line[1:] if line[:1] == ("--",) else line
    if not line:
        raise click.UsageError("What is to be run? Give it after --, as in: dblock run NAME -- make report")
    if skip_if_held and timeout is not None:
        raise click.UsageError("--skip-if-held does not wait, and --timeout does. Leave one of them out.")
    if not LEAST_TTL <= ttl <= MOST_TTL:
        raise click.UsageError(
            f"--ttl is from {LEAST_TTL:g} s, for a command must be ended before its lease is, to a day; got {ttl:g}."
        )
    grace = ttl / 4 if grace is None else grace
    if not 0 <= grace <= ttl * MOST_GRACE:
        raise click.UsageError(
            f"--grace is from 0 to {MOST_GRACE:g} of the ttl, here {ttl * MOST_GRACE:g} s; got {grace:g}."
        )
    supervisor = Supervisor()  # before there are threads
    try:
        # No presence: the lock of a process that died would go to the next at once, while what it had started may
        # still run.
        with ended_in_order(), Client(asked.installed().conninfo(), schema=asked.schema, presence=None) as client:
            # Of the command only its name: what it is given may be nobody else's to see.
            lock = client.lock(name, ttl=ttl, timeout=timeout, meta={"command": _name(line[0])})
            lease = lock.try_acquire()
            if lease is None and skip_if_held:
                raise LockTimeout(name, 0.0)
            if lease is None:
                if not quiet:
                    asked.remark(_who_has_it(lock))
                lease = lock.acquire()
            try:
                return _run_under(asked, lease, supervisor, grace, list(line))
            finally:
                if not supervisor.is_over or supervisor.stuck:
                    # What cannot be ended may be at work still. The lock is not released then; its lease runs out.
                    sys.stderr.flush()
                    os._exit(exit_codes.LOST)
    finally:
        supervisor.end()


def _name(program: str) -> str:
    return os.fsencode(os.path.basename(program)).decode(errors="replace")


def _who_has_it(lock: Lock[Lease]) -> str:
    holder = lock.holder()
    who = f", held by {shown(holder.holder)}" if holder else ""
    ahead = len(lock.queue())
    line = f"; {ahead} {'waits' if ahead == 1 else 'wait'} before us" if ahead else ""
    return f"waiting for lock {shown(lock.name)!r}{who}{line}"


def _run_under(asked: Asked, lease: Lease, supervisor: Supervisor, grace: float, line: list[str]) -> int:
    from dblock.cli.run.supervisor import CannotStart

    environment = os.environ | {
        "DBLOCK_LOCK": lease.name,
        "DBLOCK_TOKEN": str(lease.token),
        "DBLOCK_DEADLINE": lease.expires_at.isoformat(),
    }
    try:
        code = supervisor.run(lease, line, environment, grace, margin=min(lease.ttl / 20, MOST_MARGIN))
    except CannotStart as error:
        if error.number == errno.ENOENT:
            asked.remark(f"{shown(line[0])!r} was not found. Is it installed, and in PATH?")
            code = exit_codes.NOT_FOUND
        else:
            why = os.strerror(error.number) if error.number else str(error)
            asked.remark(f"{shown(line[0])!r} cannot be executed: {why}.")
            code = exit_codes.CANNOT_EXECUTE
    if supervisor.keeper_is_lost:
        asked.remark("the process that watches over the command was killed, and the command with it.")
    if supervisor.stuck:
        # Another user's, or hanging in the kernel.
        pids = ", ".join(map(str, supervisor.stuck))
        asked.remark(f"these processes could not be ended: {pids}. The lock is free when its lease has run out.")
        return exit_codes.LOST
    try:
        released = lease.release()
    except DatabaseError as error:
        asked.remark(f"the lock could not be released, and is free when its lease has run out: {error}")
        released = True
    if supervisor.is_lost or not released:
        ended = "the command was ended" if supervisor.is_lost else "the command had ended by then"
        said = f"the lease of lock {shown(lease.name)!r} was lost ({supervisor.why}); {ended}."
        asked.remark(said)
        return exit_codes.LOST
    return code

"""`dblock run`: run a command while holding a lock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from dblock.cli import exits
from dblock.cli.asked import Asked, command, lock_name
from dblock.cli.ending import ended_in_order
from dblock.cli.output import shown
from dblock.errors import DatabaseError, DblockError, LockTimeout

if TYPE_CHECKING:
    from dblock.cli.running.tree import Guard
    from dblock.lease import Lease
    from dblock.lock import Lock

MOST_GRACE = 0.4
"""Of the ttl. A lease is renewed when a third of it has gone, and a renewal may be late without ending the command."""

EPILOG = f"""\b
Exit codes: the command's own, or 128 + N where signal N ended it; and
  {exits.NOT_ACQUIRED}   the lock was not acquired
  {exits.LOST}   the lease was lost, and the command ended
  {exits.UNREACHABLE}   the database could not be reached
  {exits.CANNOT_EXECUTE}  the command cannot be executed
  {exits.NOT_FOUND}  the command was not found

The command has DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment: show the token to every resource
that it
writes to."""


@command("run", epilog=EPILOG)
@lock_name
@click.option(
    "--ttl", type=float, default=30.0, show_default=True, metavar="S", help="How long a lease lasts unrenewed."
)
@click.option("--timeout", type=float, metavar="S", help="How long to wait for the lock (default: without end).")
@click.option("--skip-if-held", is_flag=True, help=f"Do not wait; exit code {exits.NOT_ACQUIRED} if it is held.")
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
    from dblock.cli.running.tree import Guard
    from dblock.client import Client

    if not line:
        raise DblockError("What is to be run? Give it after --, as in: dblock run NAME -- make report")
    if skip_if_held and timeout is not None:
        raise DblockError("--skip-if-held does not wait, so --timeout has no meaning with it. Leave one of them out.")
    grace = ttl / 4 if grace is None else grace
    if not 0 <= grace <= ttl * MOST_GRACE:
        raise DblockError(
            f"--grace is from 0 to {MOST_GRACE:g} of the ttl, here {ttl * MOST_GRACE:g} s; got {grace:g}."
        )
    guard = Guard()  # before there are threads
    try:
        # No presence: the lock of a process that died would go to the next at once, while what it had started may
        # still run.
        with ended_in_order(), Client(asked.target().conninfo(), schema=asked.schema, presence=None) as client:
            # Of the command only its name: what it is given may be nobody else's to see.
            lock = client.lock(name, ttl=ttl, timeout=timeout, meta={"command": os.path.basename(line[0])})
            lease = lock.try_acquire()
            if lease is None and skip_if_held:
                raise LockTimeout(name, 0.0)
            if lease is None:
                if not quiet:
                    _say_who_has_it(lock)
                lease = lock.acquire()
            return _run_under(lease, guard, grace, list(line))
    finally:
        guard.dismiss()


def _say_who_has_it(lock: Lock[Lease]) -> None:
    holder = lock.holder()
    who = f", held by {shown(holder.holder)}" if holder else ""
    ahead = len(lock.queue())
    line = f"; {ahead} {'waits' if ahead == 1 else 'wait'} before us" if ahead else ""
    click.echo(f"dblock: waiting for lock {shown(lock.name)!r}{who}{line}", err=True)


def _run_under(lease: Lease, guard: Guard, grace: float, line: list[str]) -> int:
    from dblock.cli.running.supervisor import Supervisor

    supervisor = Supervisor(lease, guard, grace, margin=min(max(lease._hold.ttl / 20, 0.05), 0.5))
    environment = os.environ | {
        "DBLOCK_LOCK": lease.name,
        "DBLOCK_TOKEN": str(lease.token),
        "DBLOCK_DEADLINE": lease.expires_at.isoformat(),
    }
    try:
        code = supervisor.run(line, environment)
    except FileNotFoundError:
        click.echo(f"dblock: {shown(line[0])!r} was not found. Is it installed, and in PATH?", err=True)
        code = exits.NOT_FOUND
    except OSError as error:
        click.echo(f"dblock: {shown(line[0])!r} cannot be executed: {error.strerror}.", err=True)
        code = exits.CANNOT_EXECUTE
    try:
        released = lease.release()
    except DatabaseError as error:
        click.echo(f"dblock: the lock could not be released, and is free when its lease has run out: {error}", err=True)
        released = True
    if supervisor.is_lost or not released:
        ended = "the command was ended" if supervisor.is_lost else "the command had ended by then"
        said = f"dblock: the lease of lock {shown(lease.name)!r} was lost ({supervisor.why}); {ended}."
        click.echo(said, err=True)
        return exits.LOST
    return code

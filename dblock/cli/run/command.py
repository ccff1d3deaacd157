"""`dblock run`: run a command while holding a lock."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command, lock_name
from dblock.cli.durations import seconds
from dblock.cli.output import printable
from dblock.cli.run import options
from dblock.cli.run.passwords import hide_passwords
from dblock.cli.signals import exit_on_signal
from dblock.errors import DatabaseError, LockTimeout

if TYPE_CHECKING:
    from dblock.cli.run.supervisor import Supervisor
    from dblock.lease import Lease
    from dblock.lock import Lock

MIN_TTL, MAX_TTL = 1.0, 86_400.0

EPILOG = f"""\b
Exit codes: the command's own, or 128 + N if signal N ended it; and
{options.CODES}
The command finds DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment. Pass the token to every resource
that it writes to."""


@command("run", epilog=EPILOG)
@lock_name
@click.option(
    "--ttl", type=seconds, default=30.0, show_default="30s", metavar="TIME", help="Lease duration unless renewed."
)
@click.option(
    "--skip-if-held", is_flag=True, help=f"Do not wait: exit with code {exit_codes.NOT_ACQUIRED} if the lock is held."
)
@click.option(
    "--meta", multiple=True, metavar="KEY=VALUE", help="Text to show beside the holder; repeat for several keys."
)
@options.supervised_options
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

    argv = options.checked_command(command_line, "dblock run NAME -- make report")
    if skip_if_held and timeout is not None:
        raise click.UsageError("--skip-if-held does not wait, and --timeout does. Use only one of them.")
    grace = options.checked_grace(ttl, grace, MIN_TTL, MAX_TTL)
    if holder is not None and not holder.strip():
        raise click.UsageError("--holder is empty. Name this run, or leave the option out.")
    program = options.program_name(argv)
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
                holder=options.described_run(program) if holder is None else holder,
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
                return _run_under(context, lease, supervisor, grace, argv)
            finally:
                if not supervisor.finished or supervisor.stuck:
                    # Processes that cannot be ended may still be working, so the lock is not released: it expires.
                    sys.stderr.flush()
                    os._exit(exit_codes.LEASE_LOST)
    finally:
        supervisor.end()


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


def _run_under(context: CommandContext, lease: Lease, supervisor: Supervisor, grace: float, argv: list[str]) -> int:
    from dblock.cli.run.supervisor import StartFailed

    environment = os.environ | {
        "DBLOCK_LOCK": lease.name,
        "DBLOCK_TOKEN": str(lease.token),
        "DBLOCK_DEADLINE": lease.expires_at.isoformat(),
    }
    try:
        code = supervisor.run(lease, argv, environment, grace, options.margin(lease.ttl))
    except StartFailed as error:
        code = options.report_not_started(context, error, argv[0])
    options.report_supervision(context, supervisor)
    if supervisor.stuck:
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

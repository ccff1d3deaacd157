"""What `dblock run`, `migrate`, `once` and `elect` share: options, their limits, and the reports on a command."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, Function
from dblock.cli.durations import seconds, waiting_time
from dblock.cli.output import printable

if TYPE_CHECKING:
    from dblock.cli.run.supervisor import StartFailed, Supervisor

MAX_GRACE = 0.4
"""Part of the ttl. A lease is renewed after a third of its ttl, and a late renewal must not end the command."""

MAX_MARGIN = 0.5
"""Seconds before the end of the lease at which the command is killed; a twentieth of the ttl if that is less."""

CODES = f"""\
  {exit_codes.RUN_USAGE_ERROR}   the command line is invalid
  {exit_codes.UNREACHABLE}   the database could not be reached
  {exit_codes.REFUSED}   the database replied with an error
  {exit_codes.NOT_ACQUIRED}   the lock was not acquired
  {exit_codes.LEASE_LOST}   the lease was lost, and the command was ended
  {exit_codes.ACCESS_DENIED}   the role lacks a privilege
  {exit_codes.NOT_CONFIGURED}   no database is named, or dblock is not installed in it
  {exit_codes.CANNOT_EXECUTE}  the command cannot be executed
  {exit_codes.NOT_FOUND}  the command was not found
"""
"""The exit codes of these commands, for their help."""


def supervised_options(function: Function) -> Function:
    """Add the options of a command that waits for a lock and runs another command under its lease."""
    timeout = click.option(
        "--timeout",
        type=waiting_time,
        metavar="TIME",
        help="How long to wait for the lock (default: no limit).",
    )
    return timeout(command_options(function))


def command_options(function: Function) -> Function:
    """Add the options of a command that runs another one under a lease."""
    options = [
        click.option(
            "--grace",
            type=seconds,
            metavar="TIME",
            help="Time from SIGTERM to SIGKILL (default: a quarter of the ttl).",
        ),
        click.option(
            "--holder", metavar="TEXT", help="Name of this run that others see (default: machine, process, program)."
        ),
        click.option(
            "--listen-dsn",
            metavar="DSN",
            help="The same database past a pooler, for the connection over which a waiting run is woken.",
        ),
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            help="Report neither that the command waits for the lock nor that it was not run.",
        ),
        click.argument("command_line", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def checked_command(command_line: tuple[str, ...], example: str) -> list[str]:
    """Return the command without a leading `--`; raise UsageError, with an example, if there is none."""
    command = command_line[1:] if command_line[:1] == ("--",) else command_line
    if not command:
        raise click.UsageError(f"The command is missing. Put it after --, as in: {example}")
    return list(command)


def checked_grace(ttl: float, grace: float | None, least: float, most: float, option: str = "--ttl") -> float:
    """Return the grace, by default a quarter of the ttl; raise UsageError if it or the ttl is out of bounds.

    `option` is what gives the ttl.
    """
    if not least <= ttl <= most:
        raise click.UsageError(
            f"{option} must be from {least:g} s, so that there is time to end the command, to a day; got {ttl:g}."
        )
    grace = ttl / 4 if grace is None else grace
    if not 0 <= grace <= ttl * MAX_GRACE:
        raise click.UsageError(
            f"--grace must be from 0 to {MAX_GRACE:g} of the ttl, here {ttl * MAX_GRACE:g} s; got {grace:g}."
        )
    return grace


def margin(ttl: float) -> float:
    """Return how many seconds before the end of the lease the command is killed."""
    return min(ttl / 20, MAX_MARGIN)


def program_name(command: list[str]) -> str:
    """Return the program's name without its arguments, which may be secret."""
    return os.fsencode(os.path.basename(command[0])).decode(errors="replace")


def described_run(program: str) -> str:
    """Return the name of this run that others see."""
    return f"{socket.gethostname()} pid {os.getpid()} ({program})"


def missing_program(program: str) -> StartFailed | None:
    """Return why a program cannot be started on this host, as far as that is known before its start."""
    from dblock.cli.run.supervisor import StartFailed

    if shutil.which(program) is not None:
        return None
    number = errno.EACCES if os.path.dirname(program) and os.path.exists(program) else errno.ENOENT
    return StartFailed(number, os.strerror(number))


def report_not_started(context: CommandContext, error: StartFailed, program: str) -> int:
    """Report that the command could not be started, and return the exit code."""
    program = printable(program)
    if error.number == errno.ENOENT:
        context.failure(f"{program!r} was not found. Is it installed, and in PATH?", "NotFound", exit_codes.NOT_FOUND)
        return exit_codes.NOT_FOUND
    why = os.strerror(error.number) if error.number else str(error)
    context.failure(f"{program!r} cannot be executed: {why}.", "CannotExecute", exit_codes.CANNOT_EXECUTE)
    return exit_codes.CANNOT_EXECUTE


def report_supervision(context: CommandContext, supervisor: Supervisor) -> None:
    """Report a keeper that was killed, and processes that could not be ended."""
    if supervisor.keeper_died:
        context.notice("the process that supervises the command was killed, and the command with it.")
    if supervisor.stuck:
        # They run as another user, or hang in the kernel.
        pids = ", ".join(map(str, supervisor.stuck))
        context.notice(f"these processes could not be ended: {pids}. The lock is free when its lease expires.")

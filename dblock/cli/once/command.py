"""`dblock once`: run a command once per slot of a schedule, on whichever host comes first."""

from __future__ import annotations

from typing import Any

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.durations import seconds
from dblock.cli.run import options
from dblock.cli.run.passwords import hide_passwords
from dblock.cli.signals import exit_on_signal

MIN_TTL, MAX_TTL = 1.0, 86_400.0

EXAMPLE = 'dblock once nightly --cron "30 2 * * *" --tz Europe/Berlin -- make report'

EPILOG = f"""\b
Exit codes: 0 also if no slot was due for this host; the command's own, or
128 + N if signal N ended it; and
{options.CODES}
The command finds DBLOCK_SCHEDULE, DBLOCK_SLOT, DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment. Pass
the token to every resource that it writes to."""


@command("once", epilog=EPILOG)
@click.argument("name", metavar="NAME")
@click.option("--every", type=seconds, metavar="TIME", help="Interval between two slots, such as 1h.")
@click.option("--cron", metavar="EXPR", help='Cron expression with five fields, such as "30 2 * * *".')
@click.option("--tz", metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin (default: UTC).")
@click.option(
    "--delay", type=seconds, metavar="TIME", help="Time from the end of a run to the next start, such as 10m."
)
@click.option(
    "--catch-up",
    type=click.Choice(["none", "latest", "all"]),
    default="none",
    show_default=True,
    help="What to do with slots at which no host called.",
)
@click.option(
    "--overlap",
    type=click.Choice(["skip", "queue", "allow"]),
    default="skip",
    show_default=True,
    help="What to do with a slot that is due while a run is active.",
)
@click.option("--at-least-once", is_flag=True, help="Run a slot again if its runner died.")
@click.option(
    "--late",
    type=seconds,
    metavar="TIME",
    help="How late a slot may start (default: half the time to the next slot, at most 10m).",
)
@click.option("--at-least", type=seconds, metavar="TIME", help="Start no other run for this long after a start.")
@click.option(
    "--at-most",
    type=seconds,
    metavar="TIME",
    help="End the command this long after its start. The lease is not renewed.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="If another host runs the slot, wait for the end of that run and exit with its exit code.",
)
@click.option(
    "--ttl", type=seconds, metavar="TIME", default=30.0, show_default="30s", help="Lease duration unless renewed."
)
@options.command_options
def once(
    context: CommandContext,
    name: str,
    every: float | None,
    cron: str | None,
    tz: str | None,
    delay: float | None,
    catch_up: str,
    overlap: str,
    at_least_once: bool,
    late: float | None,
    at_least: float | None,
    at_most: float | None,
    wait: bool,
    ttl: float,
    grace: float | None,
    holder: str | None,
    listen_dsn: str | None,
    quiet: bool,
    command_line: tuple[str, ...],
) -> int:
    """Run a command once per slot of a schedule. Let cron start this on every host.

    The first host that asks for a slot runs the command. If no slot is due for this host, nothing is run.
    """
    from dblock.cli.once.run import OnceRun

    argv = options.checked_command(command_line, EXAMPLE)
    if sum(option is not None for option in (every, cron, delay)) != 1:
        raise click.UsageError("Give the schedule with exactly one of --every, --cron and --delay.")
    lease = ttl if at_most is None else at_most
    grace = options.checked_grace(lease, grace, MIN_TTL, MAX_TTL, "--ttl" if at_most is None else "--at-most")
    context.quiet = quiet
    listen_dsn = hide_passwords(context, listen_dsn)
    definition: dict[str, Any] = {
        "every": every,
        "cron": cron,
        "tz": tz,
        "delay": delay,
        "catch_up": catch_up,
        "overlap": overlap,
        "delivery": "at-least-once" if at_least_once else "at-most-once",
        "grace": late,
        "at_least": at_least,
        "at_most": at_most,
        "ttl": ttl,
    }
    missing = options.missing_program(argv[0])
    if missing is not None:
        code = options.report_not_started(context, missing, argv[0])
        context.notice("No slot was claimed. Another host may run it.")
        return code
    with exit_on_signal():
        run = OnceRun(context, name, definition, argv, grace=grace, holder=holder, listen_dsn=listen_dsn)
        code = run.execute(wait=wait)
    if run.has_more and context.own_process:
        run.start_again(code)
    return code or run.earlier_code or exit_codes.OK

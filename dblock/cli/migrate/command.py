"""`dblock migrate`: run a migrator from every replica, once for all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.durations import seconds, written
from dblock.cli.run import options
from dblock.cli.run.passwords import hide_passwords
from dblock.cli.signals import exit_on_signal
from dblock.recipes.migrations.contract import DEFAULT_TTL, MAX_TTL, MIN_TTL

if TYPE_CHECKING:
    from dblock.recipes.migrations.turn import Plan

DEFAULT_NAME = "migrate"

EXAMPLE = 'dblock migrate --version 42 -- psql "$DBLOCK_DSN" -X -1 -v ON_ERROR_STOP=1 -f 42.sql'

CODES = f"""{options.CODES}\
  {exit_codes.MIGRATION_FAILED}   this version has failed, here or on another replica
  {exit_codes.DATABASE_AHEAD}   the database is at a newer version
  {exit_codes.SESSIONS_REMAIN}   sessions of an earlier run could not be ended
"""
IN_ORDER = "\n".join(sorted(CODES.splitlines(), key=lambda line: int(line.split()[0])))

EPILOG = f"""\b
Exit codes: 0 also if there was nothing to do; the command's own, or 128 + N
if signal N ended it; and
{IN_ORDER}

The command finds PGAPPNAME, PGOPTIONS, DBLOCK_LOCK, DBLOCK_TOKEN and DBLOCK_DEADLINE in its environment. Its sessions
must keep the application_name, by which they are found and ended."""


@command("migrate", epilog=EPILOG)
@click.option(
    "--name",
    default=DEFAULT_NAME,
    show_default=True,
    metavar="N",
    help="One name for all replicas that share what is migrated. Another service takes another name.",
)
@click.option("--version", metavar="V", help="What the command migrates to. A version that is done is not run again.")
@click.option("--check", metavar="CMD", help="Command whose exit code 0 means that there is nothing to do.")
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="K",
    help="How often a version may fail, over all replicas.",
)
@click.option(
    "--when-ahead",
    type=click.Choice(["fail", "ok"]),
    default="fail",
    show_default=True,
    help="What to do if a later run has brought the database to another version.",
)
@click.option(
    "--drop-invalid",
    "scripts",
    type=click.Path(exists=True, readable=True, path_type=Path),
    multiple=True,
    metavar="PATH",
    help="File or folder with scripts of this run: first drop the invalid indexes that they name. Repeat it for more.",
)
@click.option("--wait-only", is_flag=True, help="Run nothing: wait until the version is done, without a lock.")
@click.option("--retry", is_flag=True, help="Clear the failures first, so that a version that has failed runs again.")
@click.option("--why", metavar="TEXT", help="The reason for --retry, which is recorded.")
@click.option(
    "--ttl",
    type=seconds,
    default=DEFAULT_TTL,
    show_default=written(DEFAULT_TTL),
    metavar="TIME",
    help="Lease duration unless renewed.",
)
@click.option(
    "--no-options",
    is_flag=True,
    help="Hand down no PGOPTIONS, for a command that connects through a pooler which refuses options.",
)
@options.supervised_options
def migrate(
    context: CommandContext,
    name: str,
    version: str | None,
    check: str | None,
    attempts: int,
    when_ahead: str,
    scripts: tuple[Path, ...],
    wait_only: bool,
    retry: bool,
    why: str | None,
    ttl: float,
    no_options: bool,
    timeout: float | None,
    grace: float | None,
    holder: str | None,
    listen_dsn: str | None,
    quiet: bool,
    command_line: tuple[str, ...],
) -> int:
    """Run a migrator once for all replicas; end its statements before another replica may begin."""
    from dblock.cli.migrate.check import Check, CheckNotStarted
    from dblock.cli.migrate.run import MigrationRun
    from dblock.cli.migrate.waiting import wait_until_done
    from dblock.recipes.migrations.turn import Plan

    grace = options.checked_grace(ttl, grace, MIN_TTL, MAX_TTL)
    if why is not None and not retry:
        raise click.UsageError("--why is the reason for --retry. Add --retry, or leave --why out.")
    if wait_only and (command_line or retry or check or scripts):
        raise click.UsageError(
            "--wait-only only reads the ledger. Leave out --check, --retry, --drop-invalid and the command."
        )
    if wait_only and version is None:
        raise click.UsageError("--wait-only waits for a version. Name it with --version.")
    checked = None if check is None else Check(check)
    only_clears = retry and not command_line
    argv = ["dblock"] if wait_only or only_clears else options.checked_command(command_line, EXAMPLE)
    context.quiet = quiet
    listen_dsn = hide_passwords(context, listen_dsn)
    plan = Plan(
        name,
        version,
        migrator=options.program_name(argv),
        attempts=attempts,
        ttl=ttl,
        timeout=timeout,
        when_ahead=when_ahead,
    )
    with exit_on_signal():
        if wait_only:
            return wait_until_done(context, plan)
        if retry:
            _clear_failures(context, plan, holder, why, only_clears)
            if only_clears:
                return exit_codes.OK
        run = MigrationRun(
            context,
            plan,
            argv,
            grace=grace,
            check=checked,
            scripts=scripts,
            holder=holder,
            listen_dsn=listen_dsn,
            hand_down_options=not no_options,
        )
        try:
            return run.execute()
        except CheckNotStarted as error:
            return options.report_not_started(context, error, error.program)


def _clear_failures(context: CommandContext, plan: Plan, holder: str | None, why: str | None, shown: bool) -> None:
    """Let a version that has failed run again. `shown` says whether that is the command's only result."""
    from dblock.admin.migration_ledger import MigrationLedger
    from dblock.errors import SchemaMissing

    actor = options.described_run(plan.migrator) if holder is None else holder
    try:
        with MigrationLedger(context.target(), context.schema) as ledger:
            cleared = ledger.retry(plan.name, actor, why)
    except SchemaMissing:
        if shown:
            raise
        return  # the run installs dblock
    message = f"Cleared {cleared} failure{'' if cleared == 1 else 's'} of migration {plan.name!r}."
    if shown:
        context.output({"name": plan.name, "cleared": cleared}, lambda: click.echo(message))
    elif not context.quiet:
        context.notice(message)

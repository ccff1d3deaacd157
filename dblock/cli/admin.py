"""The commands for dblock itself: install, uninstall, status, grant, revoke, reaper, token, embedded."""

from __future__ import annotations

import logging
import shlex
import sys
from typing import TYPE_CHECKING

import click

from dblock._core.schema_version import DEFAULT_SCHEMA, REVISION
from dblock.cli.context import CommandContext, command, common_options, start_embedded
from dblock.errors import DblockError, SchemaMissing

if TYPE_CHECKING:
    from dblock._runtime.target import Target

PRIVILEGES = {
    "lock": "acquire and release locks",
    "see": "list locks, waiters and history",
    "force-release": "force-release locks",
}
"""What `--may` of `dblock grant` and `revoke` accepts, and what each privilege allows."""


@command("install")
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.option("--repair", is_flag=True, help="Create the functions again even if they are current. Locks stay.")
def install(context: CommandContext, sql: bool, repair: bool) -> None:
    """Create or upgrade dblock's schema."""
    from dblock.admin import schema

    if sql and repair:
        raise click.UsageError("--sql prints a complete install, and --repair runs a part of one. Use only one.")
    if sql:
        statements = schema.ddl(context.schema)
        context.output({"sql": statements}, lambda: click.echo(statements))
        return
    target, name = context.target(), context.schema
    before = schema.install(target, name, repair=repair)
    if before == REVISION and repair:
        message = f"Repaired the functions in schema {name!r} of {target}, revision {before}. Locks and grants stayed."
    elif before == REVISION:
        message = f"Schema {name!r} in {target} is already at revision {before}; nothing to do."
    elif before is None:
        message = f"Installed dblock in schema {name!r} of {target}, revision {REVISION}."
    else:
        message = f"Upgraded schema {name!r} in {target} from revision {before} to {REVISION}."
    data = {"database": str(target), "schema": name, "before": before, "revision": REVISION}
    context.output(data, lambda: click.echo(message))


@command("uninstall")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def uninstall(context: CommandContext, yes: bool) -> None:
    """Remove dblock's schema and every lock in it."""
    from dblock.admin import schema

    target, name = context.target(), context.schema
    nothing = DblockError(f"There is no dblock in schema {name!r} of {target}; there is nothing to uninstall.")
    if not yes:
        if schema.status(target, name).revision is None:
            raise nothing
        click.echo(f"This removes schema {name!r} from {target}, including every lock that is held now.", err=True)
        if context.as_json or not sys.stdin.isatty():
            raise DblockError("There is no terminal to confirm at. Add --yes to go ahead.")
        if click.prompt("Type the schema's name to go ahead", err=True).strip() != name:
            raise DblockError("Not confirmed; nothing was removed.")
    try:
        last = schema.uninstall(target, name)
    except SchemaMissing:
        raise nothing from None

    def render() -> None:
        click.echo(f"Removed schema {name!r} from {target}. The highest token it issued was {last}.")
        if last:
            option = "" if name == DEFAULT_SCHEMA else f" --schema {shlex.quote(name)}"
            commands = f"dblock install{option} && dblock token raise --above {last}{option}"
            click.echo(
                "Fenced resources may remember that token. A later install continues above it if the server's clock is "
                f"right. If you cannot trust the clock: {commands}"
            )

    context.output({"database": str(target), "schema": name, "highest_token": last}, render)


@command("status")
def status(context: CommandContext) -> None:
    """Show what is installed; exit code 78 unless it fits this version."""
    from dblock.admin import schema

    target = context.target()
    found = schema.status(target, context.schema)

    def render() -> None:
        standby = ", a standby" if found.standby else ""
        click.echo(f"database  {found.database} at {target}, Postgres {found.server}{standby}")
        revision = f", revision {found.revision} (this version needs {REVISION})" if found.revision else ""
        click.echo(f"schema    {found.schema}: {found.state}{revision}")
        click.echo(f"named by  {context.source}")

    context.output(
        {
            "database": found.database,
            "at": str(target),
            "server": found.server,
            "standby": found.standby,
            "schema": found.schema,
            "state": found.state,
            "revision": found.revision,
            "needed": REVISION,
            "named_by": context.source,
        },
        render,
    )
    found.check()


_privilege = click.Choice(list(PRIVILEGES))


@command("grant")
@click.argument("role", metavar="ROLE")
@click.option(
    "--may",
    type=_privilege,
    multiple=True,
    default=["lock"],
    show_default=True,
    help="Privilege to grant; repeat for several. `see` allows listing locks, waiters and history.",
)
def grant(context: CommandContext, role: str, may: tuple[str, ...]) -> None:
    """Grant privileges to a role: to lock, see or force-release. Adds to those that it has."""
    from dblock.admin import schema

    target = context.installed_target()
    has = schema.grant(target, role, context.schema, may)
    data = {"role": role, "schema": context.schema, "granted": sorted(set(may)), "may": has}
    context.output(data, lambda: click.echo(_privileges_text(context, target, role, has)))


@command("revoke")
@click.argument("role", metavar="ROLE")
@click.option("--may", type=_privilege, multiple=True, help="Privilege to revoke; repeat for several (default: all).")
def revoke(context: CommandContext, role: str, may: tuple[str, ...]) -> None:
    """Revoke privileges from a role: all, or those that --may names."""
    from dblock.admin import schema

    target, revoked = context.installed_target(), [one for one in PRIVILEGES if one in (may or PRIVILEGES)]
    has = schema.revoke(target, role, context.schema, revoked)

    def render() -> None:
        click.echo(_privileges_text(context, target, role, has))
        if kept := [PRIVILEGES[one] for one in has if one in revoked]:
            click.echo(
                f"It may still {'; '.join(kept)} by membership in another role, or by PUBLIC. Revoke that in SQL."
            )

    context.output({"role": role, "schema": context.schema, "revoked": revoked, "may": has}, render)


def _privileges_text(context: CommandContext, target: Target, role: str, has: list[str]) -> str:
    """Return a sentence that says what a role may do now."""
    may = f"may now {'; '.join(PRIVILEGES[one] for one in has)}" if has else "has no privileges"
    return f"Role {role!r} {may} in schema {context.schema!r} of {target}."


@command("reaper")
@click.option("--once", is_flag=True, help="Run once and print how many rows were deleted.")
@click.option("--idle", type=float, default=86_400, metavar="S", help="Minimum idle time of a lock (default: a day).")
@click.option("--interval", type=float, default=3_600, metavar="S", help="Time between runs (default: an hour).")
def reaper(context: CommandContext, once: bool, idle: float, interval: float) -> None:
    """Delete the rows of locks that have been idle for a long time."""
    from dblock.admin.reaper import Reaper

    job = Reaper(context.installed_target(), idle=idle, interval=interval, schema=context.schema)
    if once:
        deleted = job.once()
        context.output({"deleted": deleted}, lambda: click.echo(f"Deleted the rows of {deleted} idle locks."))
        return
    # This runs for days, so it logs each run.
    logging.getLogger("dblock").setLevel(logging.INFO)
    for handler in logging.getLogger("dblock").handlers:
        handler.setLevel(logging.INFO)
    job.run()


@click.group("token", context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def token() -> None:
    """Show the token sequence, or raise it."""


@command("show")
def _token_show(context: CommandContext) -> None:
    """Show the highest token issued so far."""
    from dblock.admin import tokens

    found = tokens.show(context.installed_target(), context.schema)

    def render() -> None:
        click.echo(f"highest  {found.highest or 'none issued yet'}")
        if found.highest:
            side = "behind" if found.behind > 0 else "ahead of"
            click.echo(f"         {abs(found.behind):.1f} s {side} the database's clock")

    context.output(found, render)


@command("raise")
@click.option("--above", type=int, required=True, metavar="N", help="The highest token that any resource has seen.")
def _token_raise(context: CommandContext, above: int) -> None:
    """Make every future token higher than a number, for example after a restore; never lowers tokens."""
    from dblock.admin import tokens

    least = tokens.raise_above(context.installed_target(), above, context.schema)
    context.output({"next": least}, lambda: click.echo(f"The next token will be {least} or higher."))


token.add_command(_token_show)
token.add_command(_token_raise)


@click.group("embedded", context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def embedded() -> None:
    """Start, stop or find your embedded Postgres."""


@command("start")
def _start(context: CommandContext) -> None:
    """Start the embedded Postgres, unless it is running."""
    server = start_embedded(context.notice)
    message = f"The embedded Postgres is running, process {server.pid}: {server.url}"
    context.output({"running": True, "pid": server.pid, "url": server.url}, lambda: click.echo(message))


@command("stop")
def _stop(context: CommandContext) -> None:
    """Stop the embedded Postgres, and end all its sessions."""
    from dblock import embedded as servers

    stopped = servers.stop()
    message = "Stopped the embedded Postgres." if stopped else "The embedded Postgres was not running."
    context.output({"stopped": stopped}, lambda: click.echo(message))


@command("status")
def _embedded_status(context: CommandContext) -> int:
    """Show whether the embedded Postgres is running; exit code 1 if not."""
    from dblock import embedded as servers

    server, folder = servers.status(), servers.default_folder()
    if server is None:
        message = f"The embedded Postgres is not running. Its folder is {folder}."
        context.output({"running": False, "folder": str(folder)}, lambda: click.echo(message))
        return 1
    message = f"The embedded Postgres is running, process {server.pid}, in {server.folder}: {server.url}"
    data = {"running": True, "pid": server.pid, "folder": str(server.folder), "url": server.url}
    context.output(data, lambda: click.echo(message))
    return 0


@command("url")
def _url(context: CommandContext) -> None:
    """Print the DSN of the embedded Postgres, after starting it if needed."""
    url = start_embedded(context.notice).url
    context.output({"url": url}, lambda: click.echo(url))


for _subcommand in (_start, _stop, _embedded_status, _url):
    embedded.add_command(_subcommand)

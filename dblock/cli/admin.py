"""The commands that look after dblock itself: install, uninstall, status, grant, reaper, token, embedded."""

from __future__ import annotations

import logging
import shlex
import sys

import click

from dblock._core.schema_version import DEFAULT_SCHEMA, REVISION
from dblock.cli.context import Asked, command, start_embedded
from dblock.errors import DblockError


@command("install")
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.option("--repair", is_flag=True, help="Make the functions anew although they are up to date; locks stay.")
def install(asked: Asked, sql: bool, repair: bool) -> None:
    """Create dblock's schema, or bring it up to date."""
    from dblock.admin import schema

    if sql and repair:
        raise click.UsageError("--sql prints a whole install, and --repair runs a part of one: give one of them.")
    if sql:
        statements = schema.ddl(asked.schema)
        asked.answer({"sql": statements}, lambda: click.echo(statements))
        return
    target, name = asked.target(), asked.schema
    before = schema.install(target, name, repair=repair)
    if before == REVISION and repair:
        said = f"Made the functions in schema {name!r} of {target} anew, revision {before}. Locks and grants stayed."
    elif before == REVISION:
        said = f"Schema {name!r} in {target} is at revision {before}; nothing to do."
    elif before is None:
        said = f"Installed dblock in schema {name!r} of {target}, revision {REVISION}."
    else:
        said = f"Brought schema {name!r} in {target} from revision {before} to {REVISION}."
    facts = {"database": str(target), "schema": name, "before": before, "revision": REVISION}
    asked.answer(facts, lambda: click.echo(said))


@command("uninstall")
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall(asked: Asked, yes: bool) -> None:
    """Remove dblock's schema and all locks in it."""
    from dblock.admin import schema

    target, name = asked.target(), asked.schema
    if not yes:
        click.echo(f"This removes schema {name!r} from {target}, with every lock that is held now.", err=True)
        if asked.as_json or not sys.stdin.isatty():
            raise DblockError("Nobody is there to confirm. Add --yes to go ahead.")
        if click.prompt("Type the schema's name to go ahead", err=True).strip() != name:
            raise DblockError("Not confirmed; nothing was removed.")
    last = schema.uninstall(target, name)

    def said() -> None:
        click.echo(f"Removed schema {name!r} from {target}. The highest token it had handed out was {last}.")
        if last:
            option = "" if name == DEFAULT_SCHEMA else f" --schema {shlex.quote(name)}"
            again = f"dblock install{option} && dblock token raise --above {last}{option}"
            click.echo(f"Resources may remember it. To go on above it after a new install in {target}: {again}")

    asked.answer({"database": str(target), "schema": name, "highest_token": last}, said)


@command("status")
def status(asked: Asked) -> None:
    """Tell what is installed; exit code 1 unless it fits this version."""
    from dblock.admin import schema

    target = asked.target()
    found = schema.status(target, asked.schema)

    def said() -> None:
        standby = ", a standby" if found.standby else ""
        click.echo(f"database  {found.database} at {target}, Postgres {found.server}{standby}")
        revision = f", revision {found.revision} (this version needs {REVISION})" if found.revision else ""
        click.echo(f"schema    {found.schema}: {found.state}{revision}")
        click.echo(f"named by  {asked.source}")

    asked.answer(
        {
            "database": found.database,
            "at": str(target),
            "server": found.server,
            "standby": found.standby,
            "schema": found.schema,
            "state": found.state,
            "revision": found.revision,
            "needed": REVISION,
            "named_by": asked.source,
        },
        said,
    )
    found.check()


@command("grant")
@click.argument("role", metavar="ROLE")
@click.option(
    "--may",
    type=click.Choice(["lock", "see", "force-release"]),
    multiple=True,
    default=["lock"],
    show_default=True,
    help="What it may do; again for more. To see is to list locks, waiters and history.",
)
def grant(asked: Asked, role: str, may: tuple[str, ...]) -> None:
    """Let a role lock and unlock, or see, or break, and nothing else."""
    from dblock.admin import schema

    target = asked.installed()
    schema.grant(target, role, asked.schema, may)
    words = {"lock": "lock and unlock", "see": "see what goes on", "force-release": "force-release locks"}
    allowed = ", ".join(words[one] for one in words if one in may)
    said = f"Role {role!r} may now {allowed} in schema {asked.schema!r} of {target}."
    asked.answer({"role": role, "schema": asked.schema, "may": sorted(set(may))}, lambda: click.echo(said))


@command("reaper")
@click.option("--once", is_flag=True, help="Do it once, and tell how many went.")
@click.option("--idle", type=float, default=86_400, metavar="S", help="How long unused (default: a day).")
@click.option("--interval", type=float, default=3_600, metavar="S", help="Between runs (default: an hour).")
def reaper(asked: Asked, once: bool, idle: float, interval: float) -> None:
    """Delete the rows of locks that nobody has used for long."""
    from dblock.admin.reaper import Reaper

    made = Reaper(asked.installed(), idle=idle, interval=interval, schema=asked.schema)
    if once:
        gone = made.once()
        asked.answer({"deleted": gone}, lambda: click.echo(f"Deleted the rows of {gone} idle locks."))
        return
    # A job that runs for days says what it does.
    logging.getLogger("dblock").setLevel(logging.INFO)
    for handler in logging.getLogger("dblock").handlers:
        handler.setLevel(logging.INFO)
    made.run()


@click.group("token", context_settings={"help_option_names": ["-h", "--help"]})
def token() -> None:
    """Look at the token sequence, or raise it."""


@command("show")
def _token_show(asked: Asked) -> None:
    """Tell the highest token that was handed out."""
    from dblock.admin import tokens

    found = tokens.show(asked.installed(), asked.schema)

    def said() -> None:
        click.echo(f"highest   {found.highest or 'none was handed out yet'}")
        click.echo(f"timeline  {found.timeline}")

    asked.answer(found, said)


@command("raise")
@click.option("--above", type=int, required=True, metavar="N", help="The highest token any resource has seen.")
def _token_raise(asked: Asked, above: int) -> None:
    """Make every token from now on higher than a number, as after a restore; never lowers them."""
    from dblock.admin import tokens

    least = tokens.raise_above(asked.installed(), above, asked.schema)
    asked.answer({"next": least}, lambda: click.echo(f"The next token will be {least} or higher."))


token.add_command(_token_show)
token.add_command(_token_raise)


@click.group("embedded", context_settings={"help_option_names": ["-h", "--help"]})
def embedded() -> None:
    """Start, stop or find the embedded Postgres of this user."""


@command("start")
def _start(asked: Asked) -> None:
    """Start it, or find it running."""
    server = start_embedded()
    said = f"The embedded Postgres runs, process {server.pid}: {server.url}"
    asked.answer({"running": True, "pid": server.pid, "url": server.url}, lambda: click.echo(said))


@command("stop")
def _stop(asked: Asked) -> None:
    """Stop it, ending the sessions of all who use it."""
    from dblock import embedded as servers

    stopped = servers.stop()
    said = "Stopped the embedded Postgres." if stopped else "The embedded Postgres was not running."
    asked.answer({"stopped": stopped}, lambda: click.echo(said))


@command("status")
def _embedded_status(asked: Asked) -> int:
    """Tell whether it runs; exit code 1 if not."""
    from dblock import embedded as servers

    server, folder = servers.status(), servers.default_folder()
    if server is None:
        said = f"The embedded Postgres does not run. Its folder is {folder}."
        asked.answer({"running": False, "folder": str(folder)}, lambda: click.echo(said))
        return 1
    said = f"The embedded Postgres runs, process {server.pid}, in {server.folder}: {server.url}"
    facts = {"running": True, "pid": server.pid, "folder": str(server.folder), "url": server.url}
    asked.answer(facts, lambda: click.echo(said))
    return 0


@command("url")
def _url(asked: Asked) -> None:
    """Print the DSN to connect with, starting it if need be."""
    url = start_embedded().url
    asked.answer({"url": url}, lambda: click.echo(url))


for _action in (_start, _stop, _embedded_status, _url):
    embedded.add_command(_action)

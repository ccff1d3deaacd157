"""`dblock migrations`: show what migrations do and did, or say whether a version is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.migrate.command import DEFAULT_NAME
from dblock.cli.output import duration, jsonable, printable, table
from dblock.errors import SchemaMissing

if TYPE_CHECKING:
    from dblock.admin.inspect import Migration

MAX_STATEMENT = 80
"""Characters of a statement in the table of sessions. --json has the first thousand."""

MAX_ERROR = 200
"""Characters of an error in the table of runs. --json has the whole text."""


@command("migrations")
@click.argument("name", required=False)
@click.option(
    "--ready",
    metavar="VERSION",
    help=f"Only say whether this version is done: exit code 0 if it is, else {exit_codes.FAILED}.",
)
@click.option("--runs", type=click.IntRange(1, 500), default=5, show_default=True, metavar="N", help="Runs to show.")
def migrations(context: CommandContext, name: str | None, ready: str | None, runs: int) -> int:
    """Show migrations: their phase, holder, running statements, waiters and last runs.

    For a readiness probe, --ready VERSION asks for one version of NAME, by default `migrate`.
    """
    from dblock.admin.inspect import overview

    if ready is not None:
        return _ready(context, name or DEFAULT_NAME, ready)
    with overview(context.installed_target(), context.schema) as database:
        found = database.migrations(name, runs=runs)
        waiters = {one.name: database.waiters(one.name) for one in found if one.waiting}
        invalid = database.invalid_indexes()
        guards = database.guards()

    def render() -> None:
        if not found:
            which = "" if name is None else f" named {name!r}"
            click.echo(f"No migration{which} is recorded yet.", err=True)
        for number, migration in enumerate(found):
            if number:
                click.echo()
            _print_migration(
                migration, [[w.position, w.holder, duration(w.seconds)] for w in waiters.get(migration.name, [])]
            )
        if guards:
            click.echo("\nguarded schemas (DDL needs a migration that holds the lock)")
            rows = [[on, ", ".join(by), "yes" if active else "NO"] for on, by, active in guards]
            table(["SCHEMA", "MIGRATIONS", "ACTIVE"], rows)
        if invalid:
            click.echo("\ninvalid indexes (left by a failed CONCURRENTLY; drop or reindex them)")
            table(["INDEX", "TABLE"], invalid)

    data: list[dict[str, Any]] = [
        jsonable(migration) | {"waiters": jsonable(waiters.get(migration.name, []))} for migration in found
    ]
    listed = [{"index": index, "table": on} for index, on in invalid]
    guarded = [{"schema": on, "names": by, "active": active} for on, by, active in guards]
    context.output({"migrations": data, "invalid_indexes": listed, "guards": guarded}, render)
    return exit_codes.OK


def _ready(context: CommandContext, name: str, version: str) -> int:
    from dblock.admin.inspect import overview

    try:
        with overview(context.installed_target(), context.schema) as database:
            done = database.migration_is_done(name, version)
    except SchemaMissing:
        done = False  # the first migration has yet to install dblock
    data = {"name": name, "version": version, "ready": done}
    text = f"migration {printable(name)!r} to version {printable(version)!r} is {'done' if done else 'not done'}"
    context.output(data, lambda: click.echo(text, err=not done))
    return exit_codes.OK if done else exit_codes.FAILED


def _print_migration(migration: Migration, waiters: list[list[Any]]) -> None:
    click.echo(f"migration  {printable(migration.name)}")
    click.echo(f"phase      {migration.phase}, since {printable(migration.since)}")
    if migration.token is not None:
        click.echo(f"holder     {printable(migration.holder)}")
        click.echo(f"token      {migration.token}")
    click.echo(f"version    {printable(migration.version)}")
    if migration.revision is not None:
        click.echo(f"revision   {printable(migration.revision)}")
    if migration.error:
        click.echo(f"error      {_one_line(migration.error, 1000)}")
    if migration.sessions:
        click.echo("\nsessions")
        table(["PID", "STATE", "FOR", "PROGRESS", "STATEMENT"], [_session_row(one) for one in migration.sessions])
    blockers = [one for session in migration.sessions for one in session["blockers"]]
    if blockers:
        click.echo("\nblocked by")
        rows = [_blocker_row(one) for one in blockers]
        table(["PID", "APPLICATION", "STATE", "FOR", "STATEMENT"], rows)
    if waiters:
        click.echo("\nqueue")
        table(["#", "WAITER", "FOR"], waiters)
    click.echo("\nruns")
    table(["RUN", "VERSION", "OUTCOME", "TOOK", "HOLDER", "ERROR"], [_run_row(run) for run in migration.runs])


def _session_row(session: dict[str, Any]) -> list[object]:
    state = f"{session['state']}, stale" if session["stale"] else session["state"]
    waits = f", waits: {session['wait']}" if session["state"] == "active" and session["wait"] else ""
    statement = None if session["statement"] is None else _one_line(session["statement"], MAX_STATEMENT)
    return [session["pid"], f"{state}{waits}", duration(session["seconds"]), _progress(session["progress"]), statement]


def _blocker_row(blocker: dict[str, Any]) -> list[object]:
    shown = [blocker[key] for key in ("pid", "application", "state")]
    return [*shown, duration(blocker["seconds"]), blocker["statement"]]


def _progress(progress: dict[str, Any] | None) -> str | None:
    if progress is None:
        return None
    part = f", {100 * progress['done'] // progress['total']} %" if progress["total"] else ""
    return f"{progress['phase']} on {progress['relation']}{part}"


def _run_row(run: dict[str, Any]) -> list[object]:
    outcome = run["outcome"] or "not ended"
    if run["cleared_at"] is not None:
        outcome += ", cleared"
    error = None if run["error"] is None else _one_line(run["error"], MAX_ERROR)
    return [run["run"], run["version"], outcome, duration(run["seconds"]), run["holder"], error]


def _one_line(text: str, longest: int) -> str:
    line = " ".join(text.split())
    return printable(line if len(line) <= longest else f"{line[: longest - 1]}…")

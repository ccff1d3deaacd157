"""`dblock fence`: install fences on tables, list them, remove them, show refused writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dblock.cli.context import CommandContext, command, common_options
from dblock.cli.output import printable, table
from dblock.errors import AccessDenied, DblockError, InvalidArgument, SchemaError, Unavailable

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Engine


@click.group("fence", context_settings={"help_option_names": ["-h", "--help"]})
@common_options
def fence() -> None:
    """Make tables refuse stale tokens (fenced_store)."""


def _fence_command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    def make(function: Callable[..., Any]) -> click.Command:
        option = click.option(
            "--fences",
            default="fenced_store",
            metavar="SCHEMA",
            show_default=True,
            help="Name of fenced_store's schema.",
        )
        made = command(name)(option(function))
        fence.add_command(made)
        return made

    return make


@contextmanager
def _engine(context: CommandContext) -> Iterator[Engine]:
    from sqlalchemy import NullPool, create_engine

    from dblock._runtime.error_mapping import translated

    target = context.target()

    def connect() -> psycopg.Connection[Any]:
        # Translated here, because fenced_store does not tell a refused login from a server that cannot be reached.
        with translated("fenced_store"):
            return target.connect()

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    with _as_dblock_errors(), translated("fenced_store"):
        yield engine


@contextmanager
def _as_dblock_errors() -> Iterator[None]:
    """Raise dblock's counterpart of an error of fenced_store, which decides the exit code."""
    import fenced_store

    counterparts = {
        fenced_store.Unavailable: Unavailable,
        fenced_store.AccessDenied: AccessDenied,
        fenced_store.NotInstalled: SchemaError,
        fenced_store.InvalidArgument: InvalidArgument,
    }
    try:
        yield
    except fenced_store.FencedStoreError as error:
        raise counterparts.get(type(error), DblockError)(str(error)) from error


@_fence_command("setup")
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
def _setup(context: CommandContext, fences: str, sql: bool) -> None:
    """Create or upgrade fenced_store's schema."""
    import fenced_store

    if sql:
        with _as_dblock_errors():
            statements = fenced_store.ddl(fences)
        context.output({"sql": statements}, lambda: click.echo(statements))
        return
    with _engine(context) as engine:
        changed = bool(fenced_store.install(engine, fences))
    message = f"fenced_store is in schema {fences!r}{'.' if changed else '; nothing to do.'}"
    context.output({"schema": fences, "changed": changed}, lambda: click.echo(message))


@_fence_command("uninstall")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def _uninstall(context: CommandContext, fences: str, yes: bool) -> None:
    """Remove fenced_store's schema, with every fence and every stored value."""
    import fenced_store

    if not yes:
        raise DblockError(
            f"This removes schema {fences!r}, with every fence, stored value and audit record. Add --yes to go ahead."
        )
    with _engine(context) as engine:
        fenced_store.uninstall(engine, fences)
    context.output({"schema": fences}, lambda: click.echo(f"Removed fenced_store from schema {fences!r}."))


@_fence_command("grant")
@click.argument("role", metavar="ROLE")
def _grant(context: CommandContext, fences: str, role: str) -> None:
    """Let a role write through fences, and fence its own tables."""
    import fenced_store

    with _engine(context) as engine:
        fenced_store.grant(engine, role, fences)
    message = f"Role {role!r} may now write through the fences in schema {fences!r}."
    context.output({"role": role, "schema": fences}, lambda: click.echo(message))


@_fence_command("install")
@click.argument("table_name", metavar="TABLE")
@click.option(
    "--key",
    multiple=True,
    metavar="COLUMN",
    help="Column that identifies a row; repeat for several (default: the primary key).",
)
@click.option("--per-table", is_flag=True, help="Use one fence for the whole table instead of one per row.")
@click.option("--strict", is_flag=True, help="Also refuse transactions that carry no token.")
@click.option("--warn-only", is_flag=True, help="Refuse nothing; warn, and record what would be refused.")
def _install(
    context: CommandContext,
    fences: str,
    table_name: str,
    key: tuple[str, ...],
    per_table: bool,
    strict: bool,
    warn_only: bool,
) -> None:
    """Install a fence on a table, or change its fence (also runs `setup` if needed).

    TABLE is the table's name, plain or quoted as in SQL.
    """
    import fenced_store

    with _engine(context) as engine:
        if not _is_installed(engine, fences) and fenced_store.install(engine, fences):
            click.echo(f"Set up fenced_store in schema {fences!r}.", err=context.as_json)
        before = {protection.resource: _describe(protection) for protection in fenced_store.protected(engine, fences)}
        made = fenced_store.protect(
            engine,
            table_name,
            key=list(key) or None,
            per="table" if per_table else "row",
            strict=strict,
            warn_only=warn_only,
            schema=fences,
        )
    was, now = before.get(made.resource), _describe(made)
    message = f"Table {made.resource} is protected {now}{f'; it was {was}' if was and was != now else ''}."
    context.output(asdict(made), lambda: click.echo(message))


def _is_installed(engine: Engine, schema: str) -> bool:
    import fenced_store

    try:
        fenced_store.protected(engine, schema)
    except fenced_store.NotInstalled:
        return False
    return True


@_fence_command("list")
def _list(context: CommandContext, fences: str) -> None:
    """List the protected tables and their fences."""
    import fenced_store

    with _engine(context) as engine:
        found = fenced_store.protected(engine, fences)

    def render() -> None:
        if found:
            table(["TABLE", "FENCE"], [[protection.resource, _describe(protection)] for protection in found])
        else:
            click.echo("No table is protected. To protect one: dblock fence install TABLE")

    context.output([asdict(protection) for protection in found], render)


def _describe(protection: Any) -> str:
    text = f"per row, by {', '.join(protection.key)}" if protection.per == "row" else "per table"
    text += ", strictly" if protection.strict else ""
    text += ", only warning" if protection.warn_only else ""
    return text + ("" if protection.enabled else ", but its triggers are DISABLED")


@_fence_command("remove")
@click.argument("table_name", metavar="TABLE")
def _remove(context: CommandContext, fences: str, table_name: str) -> None:
    """Remove the fence from a table."""
    import fenced_store

    with _engine(context) as engine:
        fenced_store.unprotect(engine, table_name, schema=fences)
    context.output({"table": table_name}, lambda: click.echo(f"Table {table_name!r} is no longer protected."))


@_fence_command("log")
@click.option("--resource", metavar="NAME", help="Show only writes that this resource refused.")
@click.option("--limit", type=int, default=20, metavar="N", show_default=True, help="Maximum number of entries.")
def _log(context: CommandContext, fences: str, resource: str | None, limit: int) -> None:
    """Show refused writes, the newest first: the writer, the resource, and the token that was in the way."""
    import fenced_store

    with _engine(context) as engine:
        found = fenced_store.rejections(engine, resource, limit=limit, schema=fences)

    def render() -> None:
        for rejection in found:
            offered = "no token" if rejection.offered is None else f"token {rejection.offered}"
            stored = f" against token {rejection.stored}" if rejection.stored is not None else ""
            by = f" by {rejection.stored_by}" if rejection.stored_by else ""
            held = f"held by {rejection.holder}" if rejection.holder else "released since"
            lock = f" (lock {rejection.lock!r}, {held})" if rejection.lock else ""
            verdict = "refused" if rejection.refused else "would refuse"
            line = f"{rejection.resource} {verdict} {offered} of {rejection.rejected}{stored}{by}{lock}"
            click.echo(f"{rejection.rejected_at:%Y-%m-%d %H:%M:%S}  {printable(line)}")
        if not found:
            click.echo("No write was refused.")

    context.output([asdict(rejection) for rejection in found], render)


@_fence_command("high-water")
def _high_water(context: CommandContext, fences: str) -> None:
    """Print the highest token that any fence has seen, for `dblock token raise --above`."""
    import fenced_store

    with _engine(context) as engine:
        highest = fenced_store.high_water(engine, fences)
    context.output({"highest": highest}, lambda: click.echo(highest))

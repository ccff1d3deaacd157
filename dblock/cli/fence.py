"""`dblock fence`: put fences on tables, list them, take them off, see who was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dblock._runtime.error_mapping import translated
from dblock.cli.context import Asked, command
from dblock.cli.output import shown, table
from dblock.errors import DblockError

if TYPE_CHECKING:
    from sqlalchemy import Engine


@click.group("fence", context_settings={"help_option_names": ["-h", "--help"]})
def fence() -> None:
    """Make tables refuse a stale token (fenced_store)."""


def _action(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    def make(function: Callable[..., Any]) -> click.Command:
        option = click.option(
            "--fences",
            default="fenced_store",
            metavar="SCHEMA",
            show_default=True,
            help="The schema that fenced_store lives in.",
        )
        made = command(name)(option(function))
        fence.add_command(made)
        return made

    return make


@contextmanager
def _engine(asked: Asked) -> Iterator[Engine]:
    from sqlalchemy import NullPool, create_engine

    target = asked.target()
    engine = create_engine("postgresql+psycopg://", creator=target.connect, poolclass=NullPool)
    with _said_as_ours(), translated("fenced_store"):
        yield engine


@contextmanager
def _said_as_ours() -> Iterator[None]:
    from fenced_store import FencedStoreError

    try:
        yield
    except FencedStoreError as error:
        raise DblockError(str(error)) from error


@_action("setup")
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
def _setup(asked: Asked, fences: str, sql: bool) -> None:
    """Create fenced_store's schema, or bring it up to date."""
    import fenced_store

    if sql:
        with _said_as_ours():
            statements = fenced_store.ddl(fences)
        asked.answer({"sql": statements}, lambda: click.echo(statements))
        return
    with _engine(asked) as engine:
        made = fenced_store.install(engine, fences)
    said = f"fenced_store is in schema {fences!r}{'.' if made else '; nothing to do.'}"
    asked.answer({"schema": fences, "changed": bool(made)}, lambda: click.echo(said))


@_action("uninstall")
@click.option("--yes", is_flag=True, help="Do not ask.")
def _uninstall(asked: Asked, fences: str, yes: bool) -> None:
    """Remove fenced_store's schema, every fence and every stored value with it."""
    import fenced_store

    if not yes:
        raise DblockError(
            f"This removes schema {fences!r}, with every fence, stored value and note in it. Add --yes to go on."
        )
    with _engine(asked) as engine:
        fenced_store.uninstall(engine, fences)
    asked.answer({"schema": fences}, lambda: click.echo(f"Removed fenced_store from schema {fences!r}."))


@_action("grant")
@click.argument("role", metavar="ROLE")
def _grant(asked: Asked, fences: str, role: str) -> None:
    """Let a role write through fences, and fence tables of its own."""
    import fenced_store

    with _engine(asked) as engine:
        fenced_store.grant(engine, role, fences)
    said = f"Role {role!r} may now write through the fences in schema {fences!r}."
    asked.answer({"role": role, "schema": fences}, lambda: click.echo(said))


@_action("install")
@click.argument("table_name", metavar="TABLE")
@click.option(
    "--key", multiple=True, metavar="COLUMN", help="What tells rows apart; again for more (default: the primary key)."
)
@click.option("--per-table", is_flag=True, help="One fence for the whole table instead of one per row.")
@click.option("--strict", is_flag=True, help="Also refuse a transaction that carries no token.")
@click.option("--warn-only", is_flag=True, help="Refuse nothing; warn, and note what would be refused.")
def _install(
    asked: Asked, fences: str, table_name: str, key: tuple[str, ...], per_table: bool, strict: bool, warn_only: bool
) -> None:
    """Put a fence on a table, or change the one that it has (sets up what is missing).

    TABLE is its name, as it is or as SQL would write it.
    """
    import fenced_store

    with _engine(asked) as engine:
        if not _is_there(engine, fences) and fenced_store.install(engine, fences):
            click.echo(f"Set up fenced_store in schema {fences!r}.", err=asked.as_json)
        before = {one.resource: _how(one) for one in fenced_store.protected(engine, fences)}
        made = fenced_store.protect(
            engine,
            table_name,
            key=list(key) or None,
            per="table" if per_table else "row",
            strict=strict,
            warn_only=warn_only,
            schema=fences,
        )
    was = before.get(made.resource)
    said = f"Table {made.resource} is protected {_how(made)}{f'; it was {was}' if was and was != _how(made) else ''}."
    asked.answer(asdict(made), lambda: click.echo(said))


def _is_there(engine: Engine, schema: str) -> bool:
    import fenced_store

    try:
        fenced_store.protected(engine, schema)
    except fenced_store.NotInstalled:
        return False
    return True


@_action("list")
def _list(asked: Asked, fences: str) -> None:
    """Tell which tables are protected, and how."""
    import fenced_store

    with _engine(asked) as engine:
        found = fenced_store.protected(engine, fences)

    def said() -> None:
        if found:
            table(["TABLE", "FENCE"], [[one.resource, _how(one)] for one in found])
        else:
            click.echo("No table is protected. Begin with: dblock fence install TABLE")

    asked.answer([asdict(one) for one in found], said)


def _how(protection: Any) -> str:
    how = f"per row, by {', '.join(protection.key)}" if protection.per == "row" else "per table"
    how += ", strictly" if protection.strict else ""
    how += ", only warning" if protection.warn_only else ""
    return how + ("" if protection.enabled else ", but its triggers are DISABLED")


@_action("remove")
@click.argument("table_name", metavar="TABLE")
def _remove(asked: Asked, fences: str, table_name: str) -> None:
    """Take the fence off a table."""
    import fenced_store

    with _engine(asked) as engine:
        fenced_store.unprotect(engine, table_name, schema=fences)
    asked.answer({"table": table_name}, lambda: click.echo(f"Table {table_name!r} is not protected any more."))


@_action("log")
@click.option("--resource", metavar="NAME", help="Only by this one.")
@click.option("--limit", type=int, default=20, metavar="N", show_default=True, help="How many.")
def _log(asked: Asked, fences: str, resource: str | None, limit: int) -> None:
    """Tell who was refused, by what, and who was in the way; the newest first."""
    import fenced_store

    with _engine(asked) as engine:
        found = fenced_store.rejections(engine, resource, limit=limit, schema=fences)

    def said() -> None:
        for one in found:
            offered = "no token" if one.offered is None else f"token {one.offered}"
            way = f" against token {one.stored}" if one.stored is not None else ""
            by = f" by {one.stored_by}" if one.stored_by else ""
            lock = f" (lock {one.lock!r}, held by {one.holder})" if one.lock else ""
            verdict = "refused" if one.refused else "would refuse"
            told = f"{one.resource} {verdict} {offered} of {one.rejected}{way}{by}{lock}"
            click.echo(f"{one.rejected_at:%Y-%m-%d %H:%M:%S}  {shown(told)}")
        if not found:
            click.echo("Nobody was refused.")

    asked.answer([asdict(one) for one in found], said)


@_action("high-water")
def _high_water(asked: Asked, fences: str) -> None:
    """Print the highest token that any fence has seen, for dblock token raise --above."""
    import fenced_store

    with _engine(asked) as engine:
        highest = fenced_store.high_water(engine, fences)
    asked.answer({"highest": highest}, lambda: click.echo(highest))

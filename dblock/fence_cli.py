"""`dblock fence`: put fences on tables, list them, take them off, see who was refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dblock.errors import DblockError
from dblock.faults import translated
from dblock.target import Target

if TYPE_CHECKING:
    from sqlalchemy import Engine

Command = Callable[[argparse.Namespace], int]


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], target_of: Callable[[argparse.Namespace], Target]
) -> None:
    """Add the command and its actions; `target_of` finds the database that the options name."""
    fence = commands.add_parser("fence", help="fenced_store: tables that refuse a stale token")
    actions = fence.add_subparsers(metavar="ACTION", required=True)
    database = argparse.ArgumentParser(add_help=False)
    database.add_argument("--dsn", help="the database: a URL or libpq keywords (default: $DBLOCK_DSN, else embedded)")
    database.add_argument(
        "--fences", default="fenced_store", metavar="SCHEMA", help="where fenced_store lives (default: fenced_store)"
    )

    def add(name: str, run: Callable[[argparse.Namespace, Engine], None], summary: str) -> argparse.ArgumentParser:
        def command(options: argparse.Namespace) -> int:
            with _engine(target_of(options)) as engine:
                run(options, engine)
            return 0

        parser = actions.add_parser(name, parents=[database], help=summary, description=summary)
        parser.set_defaults(command=command)
        return parser

    setup = add("setup", _setup, "create fenced_store's schema, or bring it up to date")
    setup.add_argument("--sql", action="store_true", help="print the statements instead of running them")
    setup.set_defaults(command=_print_or(setup.get_default("command")))
    add("grant", _grant, "let a role write through fences, and fence tables of its own").add_argument(
        "role", metavar="ROLE"
    )
    install = add(
        "install", _install, "put a fence on a table, or change the one that it has (sets up what is missing)"
    )
    install.add_argument("table", metavar="TABLE", help="its name, as it is or as SQL would write it")
    install.add_argument(
        "--key",
        action="append",
        metavar="COLUMN",
        help="what tells rows apart; again for more (default: the primary key)",
    )
    install.add_argument(
        "--per-table", action="store_true", help="one fence for the whole table instead of one per row"
    )
    install.add_argument("--strict", action="store_true", help="also refuse a transaction that carries no token")
    install.add_argument(
        "--warn-only", action="store_true", help="refuse nothing; warn, and note what would be refused"
    )
    add(
        "uninstall", _uninstall, "remove fenced_store's schema, every fence and every stored value with it"
    ).add_argument("--yes", action="store_true", help="do not ask")
    add("list", _list, "tell which tables are protected, and how")
    add("remove", _remove, "take the fence off a table").add_argument("table", metavar="TABLE")
    log = add("log", _log, "tell who was refused, by what, and who was in the way; the newest first")
    log.add_argument("--resource", metavar="NAME", help="only by this one")
    log.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    add("high-water", _high_water, "print the highest token that any fence has seen, for dblock token raise --above")


def _print_or(command: Command) -> Command:
    def run(options: argparse.Namespace) -> int:
        if not options.sql:
            return command(options)
        import fenced_store

        with _said_as_ours():
            print(fenced_store.ddl(options.fences))
        return 0

    return run


@contextmanager
def _engine(target: Target) -> Iterator[Engine]:
    from sqlalchemy import NullPool, create_engine

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


def _setup(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    made = fenced_store.install(engine, options.fences)
    print(f"fenced_store is in schema {options.fences!r}{'.' if made else '; nothing to do.'}")


def _uninstall(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    if not options.yes:
        raise DblockError(
            f"This removes schema {options.fences!r}, with every fence, stored value and note in it. Add --yes to go "
            f"on."
        )
    fenced_store.uninstall(engine, options.fences)
    print(f"Removed fenced_store from schema {options.fences!r}.")


def _grant(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    fenced_store.grant(engine, options.role, options.fences)
    print(f"Role {options.role!r} may now write through the fences in schema {options.fences!r}.")


def _install(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    if not _is_there(engine, options.fences) and fenced_store.install(engine, options.fences):
        print(f"Set up fenced_store in schema {options.fences!r}.")
    before = {one.resource: _how(one) for one in fenced_store.protected(engine, options.fences)}
    made = fenced_store.protect(
        engine,
        options.table,
        key=options.key,
        per="table" if options.per_table else "row",
        strict=options.strict,
        warn_only=options.warn_only,
        schema=options.fences,
    )
    was = before.get(made.resource)
    print(f"Table {made.resource} is protected {_how(made)}{f'; it was {was}' if was and was != _how(made) else ''}.")


def _is_there(engine: Engine, schema: str) -> bool:
    import fenced_store

    try:
        fenced_store.protected(engine, schema)
    except fenced_store.NotInstalled:
        return False
    return True


def _list(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    found = fenced_store.protected(engine, options.fences)
    width = max((len(one.resource) for one in found), default=0)
    for one in found:
        print(f"{one.resource:{width}}  {_how(one)}")
    if not found:
        print("No table is protected. Begin with: dblock fence install TABLE")


def _how(protection: Any) -> str:
    how = f"per row, by {', '.join(protection.key)}" if protection.per == "row" else "per table"
    how += ", strictly" if protection.strict else ""
    how += ", only warning" if protection.warn_only else ""
    return how + ("" if protection.enabled else ", but its triggers are DISABLED")


def _remove(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    fenced_store.unprotect(engine, options.table, schema=options.fences)
    print(f"Table {options.table!r} is not protected any more.")


def _log(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    found = fenced_store.rejections(engine, options.resource, limit=options.limit, schema=options.fences)
    for one in found:
        offered = "no token" if one.offered is None else f"token {one.offered}"
        way = f" against token {one.stored}" if one.stored is not None else ""
        by = f" by {one.stored_by}" if one.stored_by else ""
        lock = f" (lock {one.lock!r}, held by {one.holder})" if one.lock else ""
        verdict = "refused" if one.refused else "would refuse"
        print(
            f"{one.rejected_at:%Y-%m-%d %H:%M:%S}  {one.resource} {verdict} {offered} of {one.rejected}{way}{by}{lock}"
        )
    if not found:
        print("Nobody was refused.")


def _high_water(options: argparse.Namespace, engine: Engine) -> None:
    import fenced_store

    print(fenced_store.high_water(engine, options.fences))

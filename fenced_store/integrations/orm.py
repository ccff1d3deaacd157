"""Integrate with SQLAlchemy's ORM: a mixin for declarative classes, and an engine that raises fenced_store's errors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Connection, DateTime, Engine, FetchedValue, Table, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_key, quoted
from fenced_store._postgres.rejection_log import record_rejection
from fenced_store.errors import InvalidArgument, StaleTokenError, translated
from fenced_store.schema import check_installed, quoted_for_text
from fenced_store.tokens import describe_writer

INFO_KEY = "fenced_store"
"""The key in a table's `info` with the options of its fence."""


class FencedMixin:
    """Protect the table of a declarative class per row: `class Order(FencedMixin, Base): …`

    The mixin adds the two columns of the fence. SQLAlchemy puts the fence on the table when it creates the table. If
    migrations create the table, use `op.fence_table`. `__fence__` may hold the options of `protect`: key, per, strict,
    warn_only, schema.
    """

    __fence__: ClassVar[Mapping[str, Any]] = {}

    fence_token: Mapped[int] = mapped_column(
        BigInteger, server_default=text("0"), server_onupdate=FetchedValue(), sort_order=1000
    )
    fence_at: Mapped[datetime | None] = mapped_column(
        DateTime(timezone=True), server_default=FetchedValue(), server_onupdate=FetchedValue(), sort_order=1001
    )


@event.listens_for(FencedMixin, "instrument_class", propagate=True)
def _fence_when_created(mapper: Mapper[Any], kind: type[FencedMixin]) -> None:
    table = mapper.local_table
    if not isinstance(table, Table) or "fence_token" not in table.c:
        return
    options = _fence_options(kind)
    table.info[INFO_KEY] = options
    schema = options.get("schema", DEFAULT_SCHEMA)

    def protect(target: Table, connection: Connection, **_: Any) -> None:
        check_installed(connection, schema)
        name = f"{quoted(target.schema)}.{quoted(target.name)}" if target.schema else quoted(target.name)
        connection.execute(
            text(
                f"SELECT {quoted_for_text(schema)}.protect_table(CAST(:target AS regclass), CAST(:key AS text[]),"
                " CAST(:per AS text), :strict, :warn_only)"
            ),
            {
                "target": name,
                "key": check_key(options.get("key")),
                "per": options.get("per", "row"),
                "strict": options.get("strict", False),
                "warn_only": options.get("warn_only", False),
            },
        )

    event.listen(table, "after_create", protect)


def _fence_options(kind: type[FencedMixin]) -> dict[str, Any]:
    options = dict(kind.__fence__)
    if unknown := set(options) - {"key", "per", "strict", "warn_only", "schema"}:
        raise InvalidArgument(f"__fence__ of {kind.__name__} has no option {', '.join(map(repr, sorted(unknown)))}.")
    for option in ("strict", "warn_only"):
        if not isinstance(options.get(option, False), bool):
            raise InvalidArgument(
                f"__fence__ of {kind.__name__}: {option} is True or False; got {options[option]!r:.80}."
            )
    check_key(options.get("key"))
    return options


def translate_errors(engine: Engine | AsyncEngine, schema: str = DEFAULT_SCHEMA) -> None:
    """Make an engine raise StaleTokenError and MissingToken everywhere, not only inside `fence`.

    A flush at commit, after the body of `fence`, is an example of a refusal outside.
    """
    if not isinstance(engine, (Engine, AsyncEngine)):
        raise InvalidArgument(f"translate_errors takes an Engine or an AsyncEngine; got {type(engine).__name__}.")

    def translate(context: ExceptionContext) -> None:
        counterpart = translated(context.original_exception)
        if counterpart is None:
            return
        if isinstance(counterpart, StaleTokenError) and context.connection is not None:
            rejection = (context.connection.connection.driver_connection, schema, counterpart, describe_writer())
            if isinstance(engine, AsyncEngine):
                # In a thread, because recording would block the event loop.
                threading.Thread(target=record_rejection, args=rejection, daemon=True).start()
            else:
                record_rejection(*rejection)
        raise counterpart from context.original_exception

    event.listen(engine.sync_engine if isinstance(engine, AsyncEngine) else engine, "handle_error", translate)

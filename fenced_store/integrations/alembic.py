"""Integrate with Alembic: `op.fence_table`, `op.unfence_table`, and an autogenerate that ignores the fence's columns.

Import this module in env.py, and pass `include_object` to `context.configure`:

    from fenced_store.integrations.alembic import include_object
    context.configure(…, include_object=include_object)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import alembic.util
from alembic.autogenerate import comparators, renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import UpgradeOps
from sqlalchemy import text

from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_key, check_schema, check_table, literal, quoted
from fenced_store.integrations.orm import INFO_KEY
from fenced_store.schema import quoted_for_text

# Since Alembic 1.18 a comparator runs before those that find new tables, unless it asks to be the last.
_LAST: dict[str, Any] = (
    {"priority": alembic.util.DispatchPriority.LAST} if hasattr(alembic.util, "DispatchPriority") else {}
)
# Before Alembic 1.15 the default of fence_at is rendered without the prefix of SQLAlchemy's module.
_RENDERS_BARE_NAME = tuple(map(int, re.findall(r"\d+", alembic.__version__)[:2])) < (1, 15)

FENCE_COLUMNS = ("fence_token", "fence_at")
OWN_SCHEMAS = ("fenced_store", "dblock")


def include_object(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """Exclude the columns that a fence has added, and the schemas of dblock and fenced_store, from autogenerate."""
    if kind == "column" and reflected and compare_to is None and name in FENCE_COLUMNS:
        # If the table has both columns and the model has neither, a fence has added them.
        return not all(column in item.table.c for column in FENCE_COLUMNS)
    return not (kind == "table" and reflected and compare_to is None and item.schema in OWN_SCHEMAS)


@Operations.register_operation("fence_table")
class FenceTableOp(MigrateOperation):
    """Protect a table."""

    def __init__(
        self,
        table: str,
        key: str | Sequence[str] | None = None,
        per: str = "row",
        strict: bool = False,
        warn_only: bool = False,
        schema: str | None = None,
        fences: str = DEFAULT_SCHEMA,
    ) -> None:
        self.table, self.schema = check_table(table), schema
        self.key = check_key(key)
        self.per, self.strict, self.warn_only = per, strict, warn_only
        self.fences = check_schema(fences)

    @classmethod
    def fence_table(
        cls,
        operations: Operations,
        table: str,
        *,
        key: str | Sequence[str] | None = None,
        per: str = "row",
        strict: bool = False,
        warn_only: bool = False,
        schema: str | None = None,
        fences: str = DEFAULT_SCHEMA,
    ) -> Any:
        """Put a fence on a table; `schema` is the table's schema, `fences` that of fenced_store."""
        return operations.invoke(cls(table, key, per, strict, warn_only, schema, fences))

    def to_diff_tuple(self) -> tuple[str, str, str | None]:
        """Describe the operation, for `alembic check`."""
        return "fence_table", self.table, self.schema

    def reverse(self) -> UnfenceTableOp:
        """Return the operation that removes the fence."""
        return UnfenceTableOp(self.table, self.schema, self.fences)


@Operations.register_operation("unfence_table")
class UnfenceTableOp(MigrateOperation):
    """Remove the fence of a table."""

    def __init__(self, table: str, schema: str | None = None, fences: str = DEFAULT_SCHEMA) -> None:
        self.table, self.schema, self.fences = check_table(table), schema, check_schema(fences)

    @classmethod
    def unfence_table(
        cls, operations: Operations, table: str, *, schema: str | None = None, fences: str = DEFAULT_SCHEMA
    ) -> Any:
        """Remove the fence of a table and its columns."""
        return operations.invoke(cls(table, schema, fences))


@Operations.implementation_for(FenceTableOp)
def _fence(operations: Operations, operation: FenceTableOp) -> None:
    key = "NULL"
    if operation.key is not None:
        key = f"ARRAY[{', '.join(map(literal, operation.key))}]"
    _execute(
        operations,
        f"SELECT {quoted(operation.fences)}.protect_table({_table_sql(operation)}, {key},"
        f" {literal(operation.per)}, {operation.strict}, {operation.warn_only})",
    )


@Operations.implementation_for(UnfenceTableOp)
def _unfence(operations: Operations, operation: UnfenceTableOp) -> None:
    _execute(operations, f"SELECT {quoted(operation.fences)}.unprotect_table({_table_sql(operation)})")


@comparators.dispatch_for("schema", **_LAST)
def _find_unfenced(context: AutogenContext, upgrade: UpgradeOps, schemas: Any) -> None:
    """Add `op.fence_table` to the migration for each table of a FencedMixin class that has no fence yet."""
    for table in context.sorted_tables:
        options = table.info.get(INFO_KEY)
        if options is not None and not _is_fenced(context, table.schema, table.name, options):
            upgrade.ops.append(FenceTableOp(table.name, schema=table.schema, **_operation_options(options)))


def _is_fenced(context: AutogenContext, schema: str | None, name: str, options: dict[str, Any]) -> bool:
    connection = context.connection
    fences = options.get("schema", DEFAULT_SCHEMA)
    if (
        connection is None
        or not connection.execute(
            text("SELECT to_regprocedure(:name)"), {"name": f"{quoted(fences)}.protected_tables()"}
        ).scalar()
    ):
        return False
    table = f"{quoted(schema)}.{quoted(name)}" if schema else quoted(name)
    found = text(
        f"SELECT 1 FROM {quoted_for_text(fences)}.protected_tables() AS p WHERE p.target = to_regclass(:table)"
    )
    return connection.execute(found, {"table": table}).scalar() is not None


def _operation_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"fences" if name == "schema" else name: value for name, value in options.items()}


@renderers.dispatch_for(FenceTableOp)
def _render_fence(context: AutogenContext, operation: FenceTableOp) -> str:
    context.imports.add("import fenced_store.integrations.alembic")
    if _RENDERS_BARE_NAME:
        context.imports.add("from sqlalchemy import FetchedValue")
    return (
        f"op.fence_table({operation.table!r}, key={operation.key!r}, per={operation.per!r},"
        f" strict={operation.strict!r}, warn_only={operation.warn_only!r}, schema={operation.schema!r},"
        f" fences={operation.fences!r})"
    )


@renderers.dispatch_for(UnfenceTableOp)
def _render_unfence(context: AutogenContext, operation: UnfenceTableOp) -> str:
    context.imports.add("import fenced_store.integrations.alembic")
    return f"op.unfence_table({operation.table!r}, schema={operation.schema!r}, fences={operation.fences!r})"


def _table_sql(operation: FenceTableOp | UnfenceTableOp) -> str:
    name = quoted(operation.table)
    return f"{literal(f'{quoted(operation.schema)}.{name}' if operation.schema else name)}::regclass"


def _execute(operations: Operations, statement: str) -> None:
    # SQLAlchemy would read a colon in a name as a parameter.
    operations.execute(statement.replace(":", r"\:").replace(r"\:\:regclass", "::regclass"))

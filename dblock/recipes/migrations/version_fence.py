"""The fence on the table in which a migrator records what it has applied: strict, and for the table as a whole.

A migrator without a gate carries no token, and one of a stale holder carries a lower one. Both then fail at their
record, and the DDL of their transaction is rolled back with it. The statements here run on the migrator's connection,
under its lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dblock._core.options import literal
from dblock.errors import InvalidArgument

logger = logging.getLogger("dblock")

FENCES = "fenced_store"
FUNCTION = f"{FENCES}.protect_table(regclass, text[], text, boolean, boolean)"


def protect(ask: Callable[[str], Any], table: str, wanted: bool | None) -> bool:
    """Protect a table, if it exists and is not protected yet. Return False if the table is missing.

    `ask` executes a statement and returns its row. `table` is quoted. `wanted` is True for a fence or an error, False
    for none, and None for a fence if fenced_store is in the database and this role may protect the table.
    """
    if wanted is False:
        return True
    target = f"to_regclass({literal(table)})"
    function = f"to_regprocedure('{FUNCTION}')"
    is_installed, may_call, exists, owns = ask(
        f"SELECT {function} IS NOT NULL, coalesce(has_function_privilege({function}, 'EXECUTE'), false),"
        " c.oid IS NOT NULL, coalesce(pg_has_role(c.relowner, 'USAGE'), false)"
        f" FROM (SELECT {target} AS target) AS t LEFT JOIN pg_class AS c ON c.oid = t.target"
    )
    if is_installed and may_call and (owns or not exists):
        if exists and not _is_protected(ask, target):
            ask(f"SELECT {FENCES}.protect_table({target}, NULL, 'table', true, false)")
        return bool(exists)
    if wanted:
        raise InvalidArgument(
            f"The table {table} cannot be fenced: "
            + (
                "this role may not protect it. Own it, and run: dblock fence grant ROLE."
                if is_installed
                else "fenced_store is not installed in this database. Run: dblock fence setup."
            )
        )
    if is_installed:
        logger.warning("migration: the table %s has no fence, because this role may not protect it", table)
    return True


def _is_protected(ask: Callable[[str], Any], target: str) -> bool:
    (found,) = ask(
        f"SELECT count(*) FROM {FENCES}.protected_tables() AS p"
        f" WHERE p.target = {target} AND p.per = 'table' AND p.strict AND NOT p.warn_only AND p.enabled"
    )
    return bool(found)

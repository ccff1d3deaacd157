"""Translate errors of the database into errors of fenced_store."""

from __future__ import annotations

from fenced_store.errors import AccessDenied, FencedStoreError, NotInstalled, diagnostics_of, sqlstate


def not_usable(error: BaseException, schema: str) -> FencedStoreError | None:
    """Return NotInstalled or AccessDenied if the error means that the schema or a privilege is missing; else None."""
    state, (message, _, hint) = sqlstate(error), diagnostics_of(error)
    if state in ("3F000", "42883") and schema in message:
        return NotInstalled(
            f"There is no fenced_store in schema {schema!r} of this database. As its owner run: dblock fence setup "
            "(or fenced_store.install(...) from Python)."
        )
    if state == "42501":
        return AccessDenied(
            f"The database refused: {message.rstrip('.')}. {hint + ' ' if hint else ''}To write through fences, a role "
            "needs: dblock fence grant ROLE. To protect a table, the role must also own the table and be allowed to "
            "create functions in the table's schema. Only the role that ran dblock fence setup can read the log and "
            "the high-water mark."
        )
    return None

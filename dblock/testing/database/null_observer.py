"""The observer of a store that is under no checks, as that of the memory clients."""

from __future__ import annotations

from dblock.testing.database import tables


class NullObserver:
    """Ignores every change."""

    def granted(self, row: tables.Row, ticket: int | None, fair: bool) -> None: ...

    def extended(self, row: tables.Row, token: int, before: float) -> None: ...

    def freed(self, row: tables.Row, why: str, by: int | str | None) -> None: ...

    def removed(self, ticket: tables.Ticket, why: str) -> None: ...

    def heard(self, client: str) -> None: ...

    def reaped(self, row: tables.Row) -> None: ...

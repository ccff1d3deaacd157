"""An observer of the store who thinks nothing of what it sees, for where nobody checks anything."""

from __future__ import annotations

from tests.robustness.simulation import tables


class Unseen:
    """Looks on, and thinks nothing of it."""

    def granted(self, row: tables.Row, ticket: int | None, fair: bool) -> None: ...

    def extended(self, row: tables.Row, token: int, before: float) -> None: ...

    def freed(self, row: tables.Row, why: str, by: int | str | None) -> None: ...

    def removed(self, ticket: tables.Ticket, why: str) -> None: ...

    def heard(self, client: str) -> None: ...

    def reaped(self, row: tables.Row) -> None: ...

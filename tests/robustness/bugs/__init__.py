"""Bugs to be put in, one at a time, to prove that the checkers can find them. None of them is in what we ship.

Each is a class with a name: a change of the SQL functions, or of the client in the processes of the traffic.
"""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """One bug: where it is put in, and what should find it."""

    name: str
    what: str
    scenario: str
    found_by: str


def install(name: str | None, dsn: str) -> None:
    """Put a bug of the SQL functions into a database."""


def put_in(name: str | None) -> None:
    """Put a bug of the client into this process."""

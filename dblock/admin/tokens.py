"""Show the token sequence, and raise it.

Tokens follow the clock of the database server, in microseconds. So after a failover, a restore or a switchover you
need not do anything, as long as the clocks of the old and the new server agree. If you cannot trust a clock, raise the
tokens above the highest that any resource has seen, before anything is granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target, resolve
from dblock.admin.schema import status_of
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    from dblock._runtime.target import Where


@dataclass(frozen=True)
class Tokens:
    """The state of the token sequence."""

    highest: int
    """The highest token that was issued, or that the sequence was raised to; 0 for none."""
    behind: float
    """The seconds by which `highest` is behind the database's clock; negative if it is ahead."""


def show(target: Target | Where, schema: str = DEFAULT_SCHEMA) -> Tokens:
    """Return the state of the token sequence."""
    return Tokens(*_call(target, schema, "show_tokens()"))


def raise_above(target: Target | Where, above: int, schema: str = DEFAULT_SCHEMA) -> int:
    """Make every future token higher than `above`; return the lowest that the next can be. Never lowers tokens."""
    if isinstance(above, bool) or not isinstance(above, int) or not 0 <= above < 2**53 - 2**40:
        raise InvalidArgument(f"Tokens can be raised above an integer from 0 to 2^53 - 2^40; got {above!r}.")
    (next_token,) = _call(target, schema, "raise_tokens(%s)", above)
    return int(next_token)


def _call(target: Target | Where, schema: str, call: str, *args: int) -> tuple[Any, ...]:
    check_name(schema)
    with translated(schema), resolve(target).connect() as connection:
        status_of(connection, schema).check()
        statement = f"SELECT * FROM {quoted(schema).replace('%', '%%')}.{call}"
        row = connection.execute(statement.encode(), args or ()).fetchone()
        assert row is not None
        return tuple(row)

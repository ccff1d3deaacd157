"""Make every connection READ COMMITTED, whatever the default of the server, the database or the role.

dblock's functions rely on seeing the latest commits. In autocommit each statement takes the session's default, so the
session is opened with another default. If a pooler refuses that option or drops it, each call is put into a transaction
of its own that names its isolation. Such a pooler may run each transaction in another session, so nothing can be set
for the session.
"""

from __future__ import annotations

import enum
import os
import re
from typing import Any

from dblock._core.effects import Row
from dblock._core.statements import READ_COMMITTED, SET_READ_COMMITTED

DEFAULT = "-c default_transaction_isolation=read\\ committed"


_WHICH_SESSION = b"SELECT pg_backend_pid()::text, current_setting('default_transaction_isolation')"


class Remedy(enum.Enum):
    """What makes the calls over a connection READ COMMITTED."""

    NOTHING = "nothing"
    SET = "set"
    """Set the default of the session."""
    BEGIN = "begin"
    """Begin a transaction for each call."""


def with_option(parameters: dict[str, Any]) -> dict[str, Any]:
    """Add the option to the parameters of a connection. Options of the user stay, but the last one counts."""
    given = parameters.get("options") or os.environ.get("PGOPTIONS")
    return parameters | {"options": f"{given} {DEFAULT}" if given else DEFAULT}


def is_option_refused(error: Exception) -> bool:
    """Return whether no connection was opened because of the option: a pooler need not take any."""
    # Without names, which may contain these words. A refused login must not be tried twice.
    message = re.sub(r"\"[^\"]*\"|host:? \S+", "", str(error).lower())
    return "startup parameter" in message or "option" in message


def remedy(connection: Any, session: Row | None) -> Remedy:
    """Return what to do for a connection, given its reply to WHICH_BACKEND."""
    if session is None or session[1] in READ_COMMITTED:
        return Remedy.NOTHING
    return Remedy.SET if session[0] == str(connection.info.backend_pid) else Remedy.BEGIN


def set_isolation(connection: Any) -> Remedy:
    """Make a connection that was opened without the option READ COMMITTED, if that is possible for its session."""
    from psycopg import IsolationLevel

    try:
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        found = remedy(connection, connection.execute(_WHICH_SESSION).fetchone())
        if found is Remedy.SET:
            connection.execute(SET_READ_COMMITTED.sql)
    except BaseException:
        connection.close()
        raise
    return found


async def set_isolation_async(connection: Any) -> Remedy:
    """Make a connection that was opened without the option READ COMMITTED, if that is possible for its session."""
    from psycopg import IsolationLevel

    try:
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        found = remedy(connection, await (await connection.execute(_WHICH_SESSION)).fetchone())
        if found is Remedy.SET:
            await connection.execute(SET_READ_COMMITTED.sql)
    except BaseException:
        await connection.close()
        raise
    return found

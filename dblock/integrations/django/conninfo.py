"""Connect to the database of a Django connection."""

from __future__ import annotations

from typing import Any

from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo


def conninfo_of(connection: Any) -> str:
    """Return libpq's connection string for the database of a Django connection."""
    known = {one.keyword.decode() for one in Conninfo.get_defaults()} - {"application_name", "client_encoding"}
    given = dict(connection.get_connection_params())
    return make_conninfo("", **{name: value for name, value in given.items() if name in known and value is not None})

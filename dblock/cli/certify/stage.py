"""The schemas in which the trials run, and the targets through which they connect.

Guarantee: nothing stays behind, also after Ctrl-C. What a killed run could not drop, the next run drops.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target
from dblock.admin import schema as schemas

if TYPE_CHECKING:
    import psycopg

PREFIX = "dblock_certify_"
LEFT_BEHIND = 3600
"""Seconds after which a schema was left behind by a run that is gone."""


@contextmanager
def schema_for_trials(target: Target) -> Iterator[str]:
    """Install dblock in a schema of its own, yield its name, and drop it at the end."""
    name = f"{PREFIX}{int(time.time()):x}_{secrets.token_hex(4)}"
    try:
        _drop_left_behind(target)
        schemas.install(target, name)
        yield name
    finally:
        drop(target, name)


def drop(target: Target, name: str) -> None:
    """Drop a schema with everything in it, if it is there."""
    with translated(name), target.connect() as connection:
        connection.execute("SET client_min_messages TO warning")
        connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE".encode())


def _drop_left_behind(target: Target) -> None:
    with translated(PREFIX), target.connect() as connection:
        names = connection.execute(
            "SELECT nspname::text FROM pg_namespace WHERE starts_with(nspname::text, %s)"
            " AND pg_get_userbyid(nspowner) = current_user",
            [PREFIX],
        ).fetchall()
    for (name,) in names:
        with contextlib.suppress(ValueError):
            if int(name.removeprefix(PREFIX).partition("_")[0], 16) < time.time() - LEFT_BEHIND:
                drop(target, name)


class Cuttable(Target):
    """The same database, over connections that can all be cut at once."""

    def __init__(self, target: Target) -> None:
        self._parameters: dict[str, Any] = {}
        self._target = target
        self._opened: list[psycopg.Connection[Any]] = []
        self.away = False
        """Whether the database cannot be reached any more."""

    @property
    def is_one_host(self) -> bool:
        return self._target.is_one_host

    def conninfo(self) -> str:
        return self._target.conninfo()

    def connect(self) -> psycopg.Connection[Any]:
        import psycopg

        if self.away:
            raise psycopg.OperationalError("the connection was cut for a trial")
        connection = self._target.connect()
        self._opened.append(connection)
        return connection

    def cut(self, *, for_good: bool) -> None:
        """Close every connection under the client, and refuse new ones if it is for good."""
        self.away = for_good
        for connection in self._opened:
            if not connection.closed:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as opened:
                    opened.shutdown(socket.SHUT_RDWR)
        self._opened.clear()

    def __str__(self) -> str:
        return str(self._target)

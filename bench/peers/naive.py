"""The naive lock: two prepared statements on a raw connection, both durable.

It has no token order and no check for late replies: only the two statements.
"""

from __future__ import annotations

from typing import Any

import psycopg

from bench.harness.contender import Release

TABLE = """
    CREATE SEQUENCE IF NOT EXISTS naive_token;
    CREATE TABLE IF NOT EXISTS naive (name text PRIMARY KEY, token bigint, owner text, expires_at timestamptz)
"""
ACQUIRE = """
    INSERT INTO naive VALUES (%s, nextval('naive_token'), %s, clock_timestamp() + interval '30 s')
    ON CONFLICT (name) DO UPDATE
    SET token = excluded.token, owner = excluded.owner, expires_at = excluded.expires_at
    WHERE naive.expires_at <= clock_timestamp() RETURNING token
"""
RELEASE = "UPDATE naive SET expires_at = '-infinity' WHERE name = %s AND owner = %s"


class TwoStatements:
    """One connection."""

    def __init__(self, where: str) -> None:
        self._connection: psycopg.Connection[Any] = psycopg.connect(where, autocommit=True, prepare_threshold=0)
        self._connection.execute(TABLE, prepare=False)

    def acquire(self, name: str) -> Release:
        assert self._connection.execute(ACQUIRE, (name, "me")).fetchone()
        return lambda: self._connection.execute(RELEASE, (name, "me"))

    def close(self) -> None:
        self._connection.close()

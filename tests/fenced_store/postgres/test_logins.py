"""A login that the server refuses is a mistake in the configuration: a retry does not help."""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg
import pytest
from psycopg import conninfo

import fenced_store
from fenced_store import AsyncFencedStore, FencedStore, LoginRefused, Unavailable

pytestmark = pytest.mark.second_stage

SECRET = "s3cret-and-wrong"

WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "password": (lambda dsn: conninfo.make_conninfo(dsn, password=SECRET), "password authentication failed"),
    "role": (lambda dsn: conninfo.make_conninfo(dsn, user="nobody_here"), "nobody_here"),
    "database": (lambda dsn: conninfo.make_conninfo(dsn, dbname="nowhere"), 'database "nowhere" does not exist'),
    "no CONNECT": (
        lambda dsn: conninfo.make_conninfo(dsn, user="writer", password="writer", dbname="shut"),
        "permission denied for database",
    ),
    "no login": (lambda dsn: conninfo.make_conninfo(dsn, user="writers", password="writer"), "not permitted to log in"),
    "no password": (
        lambda dsn: conninfo.make_conninfo(dsn, user="writer", password="", passfile="/nowhere"),
        "no password supplied",
    ),
}
"""What is wrong with a login: how to make it so, and the reason that the server gives."""


@pytest.fixture(scope="module")
def roles(tcp_dsn: str) -> str:
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE writer LOGIN PASSWORD 'writer'")
        connection.execute("CREATE ROLE writers NOLOGIN PASSWORD 'writer'")
        connection.execute("CREATE DATABASE shut")
        connection.execute("REVOKE CONNECT ON DATABASE shut FROM PUBLIC")
    return tcp_dsn


@pytest.mark.parametrize("what", WRONG)
async def test_refused_login_is_raised_at_once_with_the_reason_of_the_server(roles: str, what: str) -> None:
    change, reason = WRONG[what]
    dsn = change(roles)
    raised: list[LoginRefused] = []
    began = time.monotonic()
    with FencedStore(dsn) as store:
        for write in (lambda: store.put("k", 1, fence=1), lambda: store.get("k"), lambda: store.claim("k", fence=1)):
            with pytest.raises(LoginRefused, match="a retry does not help") as caught:
                write()
            raised.append(caught.value)
    async with AsyncFencedStore(dsn) as other:
        with pytest.raises(LoginRefused) as caught:
            await other.put("k", 1, fence=1)
        raised.append(caught.value)
    for administrative in (fenced_store.install, fenced_store.protected, fenced_store.high_water):
        with pytest.raises(LoginRefused) as caught:
            administrative(dsn)
        raised.append(caught.value)
    took = time.monotonic() - began
    for error in raised:
        assert not isinstance(error, Unavailable)
        assert reason in str(error)
        assert SECRET not in str(error)
        assert "\n" not in str(error)
    assert took < 1.4, "seven refused logins take less time than the retries of one"


def test_server_that_is_away_is_still_unavailable(roles: str) -> None:
    with FencedStore(conninfo.make_conninfo(roles, port="1"), patience=0.3) as store, pytest.raises(Unavailable):
        store.get("k")


def test_word_of_a_refused_login_in_a_statement_is_not_taken_for_one(dsn: str) -> None:
    """Only an error of connecting is a refused login, whatever the text of another error says."""
    with pytest.raises(fenced_store.InvalidArgument), FencedStore(dsn) as store:
        store.put("password authentication failed\0", 1, fence=1)
    with pytest.raises(fenced_store.NotInstalled), FencedStore(dsn, schema="authentication failed") as other:
        other.get("k")

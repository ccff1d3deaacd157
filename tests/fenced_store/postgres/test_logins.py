"""A login that the server refuses is a mistake in the configuration: a retry does not help."""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy.exc import DBAPIError

import fenced_store
from fenced_store import AsyncFencedStore, FencedStore, LoginRefused, OutcomeUnknown, Unavailable, _calls
from fenced_store._postgres.error_mapping import is_login_refused

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
async def test_refused_login_is_raised_at_once_with_the_reason_of_the_server(
    roles: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_calls, "PAUSE", 60.0)
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
    assert took < 60, "seven refused logins take less time than the pause before one retry"


REFUSES = 'connection to server at "ADDRESS", port 5432 failed: FATAL:  no pg_hba.conf entry for host "10.0.0.9"'
AWAY = 'connection to server at "ADDRESS", port 5432 failed: Connection refused'
FULL = 'connection to server at "ADDRESS", port 5432 failed: FATAL:  too many connections for role "app"'
STARTS = 'connection to server at "ADDRESS", port 5432 failed: FATAL:  the database system is starting up'


@pytest.mark.parametrize(
    ("attempts", "is_refused"),
    [
        ([("a", REFUSES)], True),
        ([("a", FULL)], False),
        ([("a", STARTS)], False),
        ([("a", REFUSES), ("b", REFUSES)], True),
        ([("a", REFUSES), ("b", AWAY)], False),
        ([("a", AWAY), ("b", REFUSES)], False),
        ([("a", REFUSES), ("a", AWAY)], True),
        ([("a", REFUSES), ("a", FULL)], False),
        ([("a", STARTS), ("b", REFUSES)], False),
    ],
)
def test_login_is_refused_only_if_no_host_may_accept_it_later(
    attempts: list[tuple[str, str]], is_refused: bool
) -> None:
    """A name may stand for several addresses. A server that listens at only one of them is not away."""
    said = f"connection failed: {attempts[-1][1]}"
    if len(attempts) > 1:
        lines = [
            f"- host: '{host}', port: '5432', hostaddr: '10.0.0.{number}': connection failed: {failure}"
            for number, (host, failure) in enumerate(attempts)
        ]
        said = "\n".join([said, "Multiple connection attempts failed. All failures were:", *lines])
    assert is_login_refused(psycopg.OperationalError(said)) is is_refused


def test_refused_host_beside_a_host_that_is_away_is_unavailable(roles: str) -> None:
    given = conninfo.conninfo_to_dict(roles)
    both = {"host": f"{given['host']},{given['host']}", "port": f"{given['port']},1", "password": SECRET}
    with FencedStore(conninfo.make_conninfo(roles, **both), patience=0.3) as store, pytest.raises(Unavailable):
        store.get("k")


@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "sent"])
def test_write_that_was_sent_before_the_login_is_refused_has_an_unknown_outcome(sent: bool) -> None:
    """An operator changes the password and ends the sessions. The write may have been stored before that."""
    store = FencedStore("host=/nowhere")
    call = store._write_call("k", 1, 1, None, 9, False)
    call.tries, call.sent = 1, sent
    ended = psycopg.errors.AdminShutdown("terminating connection due to administrator command")
    assert store._delay_or_raise(call, DBAPIError("", None, ended)) > 0
    call.tries = 2
    refused = psycopg.OperationalError("connection failed: FATAL:  password authentication failed")
    with pytest.raises(OutcomeUnknown if sent else LoginRefused, match="password authentication failed") as caught:
        store._delay_or_raise(call, DBAPIError("", None, refused))
    assert getattr(caught.value, "write", 9) == 9


def test_server_that_is_away_is_still_unavailable(roles: str) -> None:
    with FencedStore(conninfo.make_conninfo(roles, port="1"), patience=0.3) as store, pytest.raises(Unavailable):
        store.get("k")


def test_word_of_a_refused_login_in_a_statement_is_not_taken_for_one(dsn: str) -> None:
    """Only an error of connecting is a refused login, whatever the text of another error says."""
    with pytest.raises(fenced_store.InvalidArgument), FencedStore(dsn) as store:
        store.put("password authentication failed\0", 1, fence=1)
    with pytest.raises(fenced_store.NotInstalled), FencedStore(dsn, schema="authentication failed") as other:
        other.get("k")

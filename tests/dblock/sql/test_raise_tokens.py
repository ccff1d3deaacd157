"""Raising tokens: the next token is above the requested one and above every token minted so far.

That holds for grants in the middle of a raise, too. Neither waits for the other's transaction.
"""

from __future__ import annotations

import time

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock import cli
from dblock._runtime.target import resolve
from dblock.admin import schema, tokens
from tests.support.sessions import Sessions
from tests.support.tokens import BASE


def test_next_token_is_above_the_requested_one(dsn: str, client: dblock.Client) -> None:
    assert tokens.show(resolve(dsn)).highest == 0
    assert tokens.raise_above(resolve(dsn), BASE) == BASE + 1
    assert tokens.show(resolve(dsn)).highest == BASE
    assert client.lock("a").acquire().token == BASE + 1
    assert tokens.show(resolve(dsn)).highest == BASE + 1


def test_raise_never_lowers_the_next_token(dsn: str, client: dblock.Client) -> None:
    target = resolve(dsn)
    tokens.raise_above(target, BASE)
    for above in (100, 0, BASE - 1):
        assert tokens.raise_above(target, above) == BASE + 1
    assert client.lock("a").acquire().token == BASE + 1
    assert tokens.raise_above(target, BASE) == BASE + 2
    assert tokens.raise_above(target, BASE + 1) > BASE + 2


def test_raise_above_a_low_number_moves_the_tokens_to_the_clock(dsn: str) -> None:
    before = time.time()
    assert tokens.raise_above(resolve(dsn), 500) > (before - 5) * 1e6


@pytest.mark.second_stage
def test_shown_distance_to_the_clock_is_that_of_the_highest_token(dsn: str, client: dblock.Client) -> None:
    client.lock("a").acquire()
    assert 0 <= tokens.show(resolve(dsn)).behind < 5
    tokens.raise_above(resolve(dsn), int((time.time() + 3600) * 1e6))
    assert -3610 < tokens.show(resolve(dsn)).behind < -3590


def test_raise_keeps_the_settings_of_the_sequence(dsn: str, owner: psycopg.Connection) -> None:
    tokens.raise_above(resolve(dsn), 500)
    row = owner.execute(
        "SELECT cache_size, cycle, increment_by FROM pg_sequences"
        " WHERE schemaname = 'dblock' AND sequencename = 'token_sequence'"
    ).fetchone()
    assert row == (1, False, 1)


@pytest.mark.usefixtures("known_tokens")
def test_raise_waits_for_no_uncommitted_grant_and_stays_above_its_token(sessions: Sessions) -> None:
    granting, raising = sessions.open(), sessions.open()
    raising.do("SET lock_timeout = '1 ms'")
    granting.do("BEGIN")
    for name in "abc":
        (token,) = granting.do("SELECT token FROM try_acquire(%s)", name)
    (least,) = raising.do("SELECT raise_tokens(1)")
    assert least == token + 1
    (least,) = raising.do("SELECT raise_tokens(%s)", token)
    assert granting.do("SELECT token FROM try_acquire('d')") == (least,)


def test_grant_waits_for_no_uncommitted_raise_and_gets_a_higher_token(sessions: Sessions) -> None:
    granting, raising = sessions.open(), sessions.open()
    granting.do("SET lock_timeout = '1 ms'")
    raising.do("BEGIN")
    raising.do("SELECT raise_tokens(%s)", BASE)
    assert granting.do("SELECT token FROM try_acquire('a')") == (BASE + 1,)
    raising.do("ROLLBACK")
    assert granting.do("SELECT token FROM try_acquire('b')") == (BASE + 2,)


@pytest.mark.parametrize("above", [-1, 2**53, 2**63, "12", 1.5, True])
def test_raise_tokens_refuses_values_that_are_no_tokens(dsn: str, above: int) -> None:
    with pytest.raises(dblock.InvalidArgument, match="raised above an integer"):
        tokens.raise_above(resolve(dsn), above)


def test_application_role_may_not_raise_tokens(dsn: str, role: str) -> None:
    schema.grant(resolve(dsn), role)
    application = resolve(conninfo.make_conninfo(dsn, user=role, password="app"))
    with pytest.raises(dblock.AccessDenied):
        tokens.raise_above(application, 500)
    with pytest.raises(dblock.AccessDenied):
        tokens.show(application)


def test_command_line_shows_and_raises_tokens(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["token", "show", "--dsn", dsn]) == 0
    assert "none issued yet" in capsys.readouterr().out
    assert cli.main(["token", "raise", "--above", str(BASE), "--dsn", dsn]) == 0
    assert f"will be {BASE + 1} or higher" in capsys.readouterr().out
    assert cli.main(["token", "show", "--dsn", dsn]) == 0
    shown = capsys.readouterr().out
    assert f"highest  {BASE}" in shown
    assert "s ahead of the database's clock" in shown
    assert cli.main(["token", "raise", "--above", "-1", "--dsn", dsn]) == 2
    assert "from 0" in capsys.readouterr().err


def test_raise_is_durable_whatever_the_default(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SET synchronous_commit = off")
    session.do("BEGIN")
    session.do("SELECT raise_tokens(5)")
    assert session.do("SHOW synchronous_commit") == ("on",)


def test_raise_that_changes_nothing_still_waits_for_the_disk(sessions: Sessions) -> None:
    """Another session may have raised the tokens in a transaction that is not on disk yet."""
    session, other = sessions.open(), sessions.open()
    other.do("BEGIN")
    other.do("SELECT raise_tokens(%s)", BASE)
    (unflushed,) = other.do("SELECT pg_current_wal_insert_lsn()")
    session.do("SELECT raise_tokens(%s)", BASE)
    assert session.do("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", unflushed) == (True,)
    other.do("ROLLBACK")

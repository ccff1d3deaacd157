"""Raising tokens: the next token is above the requested one and above every token minted so far.

That holds for grants in the middle of a raise, too.
"""

from __future__ import annotations

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock import cli
from dblock._runtime.target import resolve
from dblock.admin import schema, tokens
from tests.support.sessions import Sessions


def test_next_token_is_above_the_requested_one(dsn: str, client: dblock.Client) -> None:
    assert tokens.show(resolve(dsn)) == tokens.Tokens(0, 1)
    assert tokens.raise_above(resolve(dsn), 500) == 501
    assert tokens.show(resolve(dsn)).highest == 500
    assert client.lock("a").acquire().token == 501
    assert tokens.show(resolve(dsn)).highest == 501


def test_raise_never_lowers_the_next_token(dsn: str, client: dblock.Client) -> None:
    target = resolve(dsn)
    tokens.raise_above(target, 500)
    assert tokens.raise_above(target, 100) == 501
    assert tokens.raise_above(target, 0) == 501
    assert client.lock("a").acquire().token == 501
    assert tokens.raise_above(target, 501) == 502


def test_raise_keeps_the_settings_of_the_sequence(dsn: str, owner: psycopg.Connection) -> None:
    tokens.raise_above(resolve(dsn), 500)
    row = owner.execute(
        "SELECT cache_size, cycle, increment_by FROM pg_sequences WHERE schemaname = 'dblock'"
    ).fetchone()
    assert row == (1, False, 1)


def test_raise_waits_for_an_uncommitted_grant_and_stays_above_its_token(sessions: Sessions) -> None:
    granting, raising = sessions.open(), sessions.open()
    granting.do("BEGIN")
    for name in "abc":
        (token,) = granting.do("SELECT token FROM try_acquire(%s)", name)
    waiting = raising.start("SELECT raise_tokens(1)")
    raising.wait_until_blocked()
    granting.do("COMMIT")
    (least,) = waiting.result(20)
    assert least == token + 1


def test_grant_waits_for_an_uncommitted_raise(sessions: Sessions) -> None:
    granting, raising = sessions.open(), sessions.open()
    raising.do("BEGIN")
    raising.do("SELECT raise_tokens(100)")
    waiting = granting.start("SELECT token FROM try_acquire('a')")
    granting.wait_until_blocked()
    raising.do("COMMIT")
    assert waiting.result(20) == (101,)


@pytest.mark.parametrize("above", [-1, 2**63, "12", 1.5, True])
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
    assert cli.main(["token", "raise", "--above", "41", "--dsn", dsn]) == 0
    assert "will be 42 or higher" in capsys.readouterr().out
    assert cli.main(["token", "show", "--dsn", dsn]) == 0
    assert "highest   41" in capsys.readouterr().out
    assert cli.main(["token", "raise", "--above", "-1", "--dsn", dsn]) == 1
    assert "from 0" in capsys.readouterr().err


def test_raise_stays_above_tokens_that_are_minted_while_it_waits(sessions: Sessions) -> None:
    """A granting transaction already has the sequence locked, and mints once more while the raise waits for it."""
    granting, raising = sessions.open(), sessions.open()
    granting.do("BEGIN")
    granting.do("SELECT token FROM try_acquire('a')")
    waiting = raising.start("SELECT raise_tokens(0)")
    raising.wait_until_blocked()
    (second,) = granting.do("SELECT token FROM try_acquire('b')")
    granting.do("COMMIT")
    assert waiting.result(20)[0] > second


def test_raise_is_durable_whatever_the_default(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SET synchronous_commit = off")
    session.do("BEGIN")
    session.do("SELECT raise_tokens(5)")
    assert session.do("SHOW synchronous_commit") == ("on",)

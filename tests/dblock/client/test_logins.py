"""A login that the server refuses is a mistake in the configuration: a retry does not help."""

from __future__ import annotations

import sys
from collections.abc import Callable

import psycopg
import pytest
from psycopg import conninfo

import dblock
from tests.support import warm_start

pytestmark = [pytest.mark.second_stage]

WRONG: dict[str, Callable[[str], str]] = {
    "password": lambda dsn: conninfo.make_conninfo(dsn, password="wrong"),
    "role": lambda dsn: conninfo.make_conninfo(dsn, user="nobody_here"),
    "database": lambda dsn: conninfo.make_conninfo(dsn, dbname="nowhere"),
    "no CONNECT": lambda dsn: conninfo.make_conninfo(dsn, user="app", password="app", dbname="closed"),
    "no login": lambda dsn: conninfo.make_conninfo(dsn, user="group_role", password="app"),
    "no password": lambda dsn: conninfo.make_conninfo(dsn, user="app", password="", passfile="/nowhere"),
}


@pytest.fixture(scope="module")
def roles(tcp_dsn: str) -> str:
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE app LOGIN PASSWORD 'app'")
        connection.execute("CREATE ROLE group_role NOLOGIN PASSWORD 'app'")
        connection.execute("CREATE DATABASE closed")
        connection.execute("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
    return tcp_dsn


@pytest.mark.parametrize("what", WRONG)
async def test_refused_login_is_told_from_a_server_that_is_away(roles: str, what: str) -> None:
    dsn = WRONG[what](roles)
    with dblock.Client(dsn) as client, pytest.raises(dblock.LoginRefused, match="a retry does not help") as caught:
        client.lock("a").try_acquire()
    assert not isinstance(caught.value, dblock.Unavailable)
    async with dblock.AsyncClient(dsn) as other:
        with pytest.raises(dblock.LoginRefused):
            await other.lock("a").try_acquire()
    assert "wrong" not in str(caught.value)


def test_command_exits_with_the_code_of_a_configuration_error(roles: str) -> None:
    for arguments in (["ls"], ["run", "a", "true"]):
        command = [sys.executable, "-m", "dblock", "--dsn", WRONG["password"](roles), *arguments]
        done = warm_start.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 78, done.stderr


def test_server_that_is_away_is_still_unavailable(roles: str) -> None:
    dsn = conninfo.make_conninfo(roles, port="1")
    with dblock.Client(dsn) as client, pytest.raises(dblock.Unavailable):
        client.lock("a").try_acquire()

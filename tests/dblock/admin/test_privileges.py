"""A grant adds privileges, a revoke takes them away, and both report what the role has afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

import dblock
from dblock.admin import privileges, schema
from dblock.errors import AccessDenied, InvalidArgument
from tests.support.sessions import Sessions
from tests.support.shell import run_here


def may_call(dsn: str, role: str) -> set[str]:
    """Return the functions that the role may call."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace"
            " AND has_function_privilege(%s, oid, 'EXECUTE') AND has_schema_privilege(%s, pronamespace, 'USAGE')",
            [role, role],
        ).fetchall()
    return {name for (name,) in rows}


def functions(*may: str) -> set[str]:
    return {name for privilege in may for name in privileges.PRIVILEGES[privilege]}


def test_grant_adds_to_earlier_privileges(dsn: str, role: str) -> None:
    assert schema.grant(dsn, role) == ["lock"]
    assert schema.grant(dsn, role, may=["see"]) == ["lock", "see"]
    assert may_call(dsn, role) == functions("lock", "see")
    with dblock.Client(conninfo.make_conninfo(dsn, user=role, password="app")) as client:
        assert client.lock("a").acquire().release()


def test_revoke_takes_only_the_named_privilege(dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["lock", "see", "force-release"])
    assert schema.revoke(dsn, role, may=["see"]) == ["lock", "force-release"]
    assert may_call(dsn, role) == functions("lock", "force-release")


def test_revoke_without_a_privilege_takes_all(dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["lock", "see"])
    assert schema.revoke(dsn, role) == []
    with psycopg.connect(dsn, autocommit=True) as connection:
        usage = connection.execute("SELECT has_schema_privilege(%s, 'dblock', 'USAGE')", [role]).fetchone()
        assert usage == (False,)
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
    assert schema.revoke(dsn, role) == [], "a second revoke is no error"


def test_revoke_reports_a_privilege_that_remains_by_membership(dsn: str, role: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as dba:
        dba.execute(sql.SQL("CREATE ROLE {} IN ROLE {}").format(sql.Identifier(f"{role}_member"), sql.Identifier(role)))
        try:
            schema.grant(dsn, role)
            schema.grant(dsn, f"{role}_member", may=["see"])
            assert schema.revoke(dsn, f"{role}_member") == ["lock"]
            done = run_here(["--dsn", dsn, "revoke", f"{role}_member"], Path.cwd())
            assert "by membership in another role, or by PUBLIC" in done.out
        finally:
            dba.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(f"{role}_member")))
            dba.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(f"{role}_member")))


def test_revoke_takes_direct_access_too(dsn: str, role: str, owner: psycopg.Connection) -> None:
    schema.grant(dsn, role)
    owner.execute(sql.SQL("GRANT SELECT ON distributed_locks TO {}").format(sql.Identifier(role)))
    schema.revoke(dsn, role)
    allowed = owner.execute("SELECT has_table_privilege(%s, 'distributed_locks', 'SELECT')", [role]).fetchone()
    assert allowed == (False,)


def test_privileges_of_the_owner_cannot_be_revoked(bare_dsn: str, role: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(sql.SQL("CREATE SCHEMA dblock AUTHORIZATION {}").format(sql.Identifier(role)))
    as_role = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    schema.install(as_role)
    assert schema.grant(as_role, role) == ["lock", "see", "force-release"]
    with pytest.raises(InvalidArgument, match="owns schema 'dblock'"):
        schema.revoke(as_role, role)


def test_only_the_owner_revokes(dsn: str, role: str) -> None:
    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    schema.grant(dsn, role)
    with pytest.raises(AccessDenied):
        schema.revoke(as_role, role)
    assert may_call(dsn, role) == functions("lock")
    with psycopg.connect(dsn, autocommit=True) as dba:
        for kind in ("TABLES", "SEQUENCES", "FUNCTIONS"):
            dba.execute(f'GRANT ALL ON ALL {kind} IN SCHEMA dblock TO "{role}"'.encode())
    # Now Postgres only warns.
    with pytest.raises(AccessDenied, match="was not changed"):
        schema.revoke(as_role, role)


@pytest.mark.parametrize("change", [schema.grant, schema.revoke])
def test_unknown_privilege_or_role_is_refused(dsn: str, role: str, change: object) -> None:
    assert callable(change)
    with pytest.raises(InvalidArgument, match="got fly"):
        change(dsn, role, may=["fly"])
    with pytest.raises(InvalidArgument, match="There is no role"):
        change(dsn, "ghost")


def test_concurrent_grants_lose_nothing(dsn: str, role: str, sessions: Sessions) -> None:
    """The second grant waits for the first, and then sees what the first has granted, whatever the isolation."""
    with psycopg.connect(dsn, autocommit=True) as dba:
        dba.execute(
            f"ALTER DATABASE {conninfo.conninfo_to_dict(dsn)['dbname']} SET default_transaction_isolation TO"
            " 'serializable'".encode()
        )
    first = sessions.open("first")
    first.do("BEGIN")
    first.do("LOCK TABLE dblock.installed_revision IN SHARE ROW EXCLUSIVE MODE")
    for statement in privileges.grant_statements(role, "dblock", ["lock"]):
        first.do(statement)
    second = threading.Thread(target=schema.grant, args=(dsn, role), kwargs={"may": ["see"]})
    second.start()
    sessions.wait_until_a_session_waits()
    first.do("COMMIT")
    second.join(60)
    assert may_call(dsn, role) == functions("lock", "see")


def test_command_line_says_what_the_role_has_afterwards(dsn: str, role: str, tmp_path: Path) -> None:
    def dblock_command(*arguments: str) -> str:
        done = run_here(["--dsn", dsn, *arguments], tmp_path)
        assert done.code == 0, done.err
        return done.out

    assert "may now acquire and release locks in" in dblock_command("grant", role)
    granted = dblock_command("grant", role, "--may", "see")
    assert "may now acquire and release locks; list locks, waiters and history in" in granted
    assert "may now acquire and release locks in" in dblock_command("revoke", role, "--may", "see")
    assert "has no privileges in" in dblock_command("revoke", role)
    data = run_here(["--dsn", dsn, "--json", "grant", role, "--may", "see"], tmp_path).json
    assert data == {"role": role, "schema": "dblock", "granted": ["see"], "may": ["see"]}
    data = run_here(["--dsn", dsn, "--json", "revoke", role], tmp_path).json
    assert data == {"role": role, "schema": "dblock", "revoked": ["lock", "see", "force-release"], "may": []}

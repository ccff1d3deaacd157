"""The exit codes of `dblock fence`: they are those of every other command, whatever fenced_store raised."""

from __future__ import annotations

import json

import pytest
from psycopg import conninfo

import fenced_store
from tests.support.shell import Shell


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "says"),
    [
        (["grant", "no_such_role"], "InvalidArgument", 2, "no role 'no_such_role'"),
        (["install", "no_such_table"], "InvalidArgument", 2, "no table 'no_such_table'"),
        (["log", "--limit", "0"], "InvalidArgument", 2, "from 1"),
        (["setup", "--fences", "public"], "InvalidArgument", 2, "reserved"),
        (["list", "--fences", "elsewhere"], "SchemaError", 78, "dblock fence setup --fences elsewhere"),
        (["uninstall"], "DblockError", 1, "--yes"),
    ],
)
def test_error_has_the_exit_code_of_its_kind(
    shell: Shell, dsn: str, arguments: list[str], kind: str, code: int, says: str
) -> None:
    fenced_store.install(dsn)
    done = shell.run("fence", *arguments, "--json")
    reported = json.loads(done.err)
    assert (done.code, reported["kind"], reported["exit_code"]) == (code, kind, code)
    assert says in reported["error"]


def test_missing_privilege_is_exit_code_77(shell: Shell, dsn: str, role: str) -> None:
    fenced_store.install(dsn)
    fenced_store.grant(dsn, role)
    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    for arguments in (["log"], ["high-water"], ["setup", "--fences", "another"], ["uninstall", "--yes"]):
        assert shell.run("fence", *arguments, dsn=as_role).code == 77, arguments


def test_refused_login_is_exit_code_78_and_a_missing_server_69(shell: Shell, dsn: str) -> None:
    refused = shell.run("fence", "list", dsn=conninfo.make_conninfo(dsn, dbname="no_such_database"))
    assert (refused.code, "refused the login" in refused.err) == (78, True)
    assert shell.run("fence", "list", dsn="host=127.0.0.1 port=1 user=x").code == 69

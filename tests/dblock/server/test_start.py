"""If `dblock serve` cannot start, it says in one line what is wrong, where, and what to do. Its exit code fits."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from dblock.server import serving
from tests.dblock.server.conftest import Served
from tests.support.shell import Done, Shell
from tests.support.stages import first

NOWHERE = "postgresql://app@127.0.0.1:1/none"


@pytest.fixture
def shell(dsn: str, tmp_path: Path) -> Shell:
    return Shell(dsn, tmp_path)


def refused(done: Done, code: int, *words: str) -> None:
    """Check that a command has failed with this code, and with one line that has these words."""
    assert done.code == code, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert done.out == ""
    for word in words:
        assert word in done.err


def test_port_that_is_in_use_is_named(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        refused(shell.run_here("serve", "--listen", address), 78, address, "in use", "another address with --listen")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_address_of_another_machine_is_named(host: str, shell: Shell) -> None:
    done = shell.run_here("serve", "--i-know", "--listen", f"{host}:8080")
    refused(done, 78, f"cannot listen at {host}:8080", "--listen")


def test_missing_schema_is_reported_before_the_server_listens(bare_dsn: str, tmp_path: Path) -> None:
    shell = Shell(bare_dsn, tmp_path)
    refused(shell.run_here("serve", "--listen", "127.0.0.1:0"), 78, "'dblock'", "dblock install")
    refused(shell.run_here("--schema", "other", "serve", "--listen", "127.0.0.1:0"), 78, "'other'", "dblock install")


def test_login_that_the_database_refuses_is_reported(dsn: str, tmp_path: Path) -> None:
    wrong = Shell(conninfo.make_conninfo(dsn, dbname="no_such_database"), tmp_path)
    refused(wrong.run_here("serve", "--listen", "127.0.0.1:0"), 78, '"no_such_database" does not exist', "Check")


def test_role_without_privileges_is_reported(dsn: str, role: str, tmp_path: Path) -> None:
    own = Shell(conninfo.make_conninfo(dsn, user=role, password="app"), tmp_path)
    refused(own.run_here("serve", "--listen", "127.0.0.1:0"), 77, "dblock grant ROLE")


@pytest.mark.parametrize("wrong", ["postgresql://[", "postgresql://localhost:x/a", "nonsense"])
def test_dsn_that_cannot_be_read_is_reported(wrong: str, tmp_path: Path) -> None:
    done = Shell(wrong, tmp_path).run_here("serve", "--listen", "127.0.0.1:0")
    refused(done, 2, "DSN")


def test_unnamed_database_is_reported(tmp_path: Path) -> None:
    refused(Shell(None, tmp_path).run_here("serve", "--listen", "127.0.0.1:0"), 78, "No database is named", "--dsn")


def test_database_that_is_away_is_a_warning_and_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may come back by itself, and another server would not help."""
    monkeypatch.setattr(serving, "serve", lambda settings, listening: listening("http://here"))
    done = Shell(NOWHERE, tmp_path).run_here("serve")
    warning, started = done.err.splitlines()
    assert done.code == 0
    assert "127.0.0.1" in warning
    assert "the reply to every request is 503" in warning
    assert started == "dblock: serving at http://here"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["tokens", "No such file", "--tokens names"]),
        (b"\xff\xfe", ["tokens", "not UTF-8", "--tokens names"]),
        (b"", ["no token in", "tokens"]),
        (b"alice lock\n", ["Line 1 of tokens", "three words"]),
        (b"# team\nalice king 0123456789abcdef\n", ["Line 2 of tokens", "see, lock, break"]),
        (b"alice lock 0123456789\n", ["Line 1 of tokens", "16 or more"]),
    ],
)
def test_wrong_file_of_tokens_is_reported(content: bytes | None, words: list[str], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokens").write_bytes(content)
    done = Shell(NOWHERE, tmp_path).run_here("serve", "--tokens", "tokens")
    refused(done, 78, *words)
    assert "0123456789" not in done.err, "a token is never printed"


def test_folder_of_tokens_is_a_wrong_option(tmp_path: Path) -> None:
    done = Shell(NOWHERE, tmp_path).run_here("serve", "--tokens", ".")
    assert done.code == 2
    assert "'.' is a directory" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "8080"], ["HOST:PORT", "'8080'"]),
        (["--listen", "127.0.0.1:99999"], ["HOST:PORT", "99999"]),
        (["--proxy-from", "10.0.0.300"], ["--proxy-from", "10.0.0.300"]),
        (["--proxy-header", "X-User"], ["Give both"]),
        (["--prefix", "locks"], ["prefix", "'locks'"]),
        (["--listen", "0.0.0.0:8080"], ["without authentication", "--i-know"]),
    ],
)
def test_wrong_option_is_reported(options: list[str], words: list[str], tmp_path: Path) -> None:
    done = Shell(NOWHERE, tmp_path).run_here("serve", *options)
    assert done.code == 2
    for word in words:
        assert word in done.err


@pytest.mark.parametrize("missing", first(1, ["starlette", "uvicorn", "jinja2"]))
def test_missing_extra_is_named(missing: str, dsn: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from dblock.__main__ import main; sys.exit(main())"
    line = [sys.executable, "-c", program, "--dsn", dsn, "serve", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(line, capture_output=True, text=True)
    done = Done(ended.returncode, ended.stdout, ended.stderr)
    refused(done, 78, missing, "pip install 'dblock[server]'")


@pytest.mark.second_stage
async def test_schema_that_goes_away_is_reported_until_it_is_back(start_server: Any, owner: psycopg.Connection) -> None:
    served: Served = start_server()
    async with served.client() as client:
        assert (await client.get("/readyz")).status_code == 200
        owner.execute("ALTER SCHEMA dblock RENAME TO hidden")
        assert (await client.get("/readyz")).status_code == 503
        owner.execute("ALTER SCHEMA hidden RENAME TO dblock")
        assert (await client.get("/readyz")).status_code == 200

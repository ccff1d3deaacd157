"""The embedded server is used only if it was asked for, and files of other users choose no database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import dblock
from dblock import embedded
from dblock._runtime.target import EmbeddedTarget, resolve
from dblock.embedded import Server
from tests.support.servers import copy_fresh_data, memory, new_folder
from tests.support.shell import Shell


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell that passes no DSN, on a machine without an embedded server."""
    monkeypatch.setenv("DBLOCK_HOME", str(tmp_path / "home"))
    made = Shell(None, tmp_path)
    yield made
    made.close()


@pytest.fixture
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an embedded server that has its data and does not run yet."""
    if request.config.getoption("--postgres") != "embedded":
        pytest.skip("this test is about the embedded server")
    folder = new_folder(memory())
    monkeypatch.setenv("DBLOCK_HOME", str(folder))
    copy_fresh_data(Server(folder))
    yield folder
    Server(folder).stop()
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.mark.parametrize(
    "arguments", [["ls"], ["install"], ["doctor"], ["fence", "list"], ["run", "job", "--", "touch", "ran"]]
)
def test_missing_dsn_is_an_error_and_starts_no_server(bare: Shell, arguments: list[str]) -> None:
    done = bare.run(*arguments)
    assert (done.code, done.out) == (78, "")
    for way in ("No database is named", "DBLOCK_DSN", "--dsn", "--embedded", "DBLOCK_EMBEDDED=1"):
        assert way in done.err
    assert not (bare.folder / "home").exists()
    assert not (bare.folder / "ran").exists()


def test_client_without_a_database_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (dblock.Client, dblock.AsyncClient):
        with pytest.raises(dblock.ConfigurationError, match=r"No database is named.*embedded=True"):
            kind()
        with pytest.raises(dblock.InvalidArgument, match="Do not name another database"):
            kind("postgresql://h/db", embedded=True)
    assert "the embedded Postgres" in repr(dblock.Client(embedded=True))
    monkeypatch.setenv("DBLOCK_EMBEDDED", "1")
    assert isinstance(resolve(), EmbeddedTarget)
    monkeypatch.setenv("DBLOCK_EMBEDDED", "0")
    with pytest.raises(dblock.ConfigurationError, match="No database is named"):
        resolve()
    monkeypatch.setenv("DBLOCK_EMBEDDED", "perhaps")
    with pytest.raises(dblock.ConfigurationError, match="is 1 or 0; got 'perhaps'"):
        resolve()
    monkeypatch.setenv("DBLOCK_EMBEDDED", "1")
    monkeypatch.setenv("DBLOCK_DSN", "postgresql://h/db")
    assert str(resolve()) == "postgresql://h/db", "a named database comes first"


@pytest.mark.parametrize("way", ["option", "environment", ".env", "pyproject"])
def test_embedded_server_is_used_if_a_source_asks_for_it(bare: Shell, home: Path, way: str) -> None:
    options, env = (["--embedded"] if way == "option" else []), {}
    if way == "environment":
        env = {"DBLOCK_EMBEDDED": "1"}
    elif way == ".env":
        (bare.folder / ".env").write_text("DBLOCK_EMBEDDED=yes\n")
    elif way == "pyproject":
        (bare.folder / "pyproject.toml").write_text("[tool.dblock]\nembedded = true\n")
    done = bare.run("ls", *options, env=env)
    assert done.code == 0
    assert done.err.splitlines()[0] == f"dblock: embedded Postgres in {home}, starting it"
    again = bare.run("ls", "--json", *options, env=env)
    assert json.loads(again.err) == {"notice": f"embedded Postgres in {home}"}, "each use names the server"
    assert bare.run("status", "--dsn", embedded.start().url, *options).code == (2 if options else 0)


@pytest.mark.second_stage
def test_mistyped_schema_is_not_installed_in_the_embedded_server(bare: Shell, home: Path) -> None:
    assert bare.run("ls", "--embedded").code == 0
    mistyped = bare.run("ls", "--embedded", "--schema", "dblok")
    assert mistyped.code == 78
    assert "dblock install --schema dblok" in mistyped.err
    with dblock.Client(embedded=True, schema="dblok") as client, pytest.raises(dblock.SchemaMissing):
        client.lock("a").acquire()
    with psycopg.connect(embedded.start().url) as connection:
        assert connection.execute("SELECT to_regnamespace('dblok')").fetchone() == (None,)
    assert bare.run("install", "--embedded", "--schema", "dblok").code == 0
    assert bare.run("ls", "--embedded", "--schema", "dblok").code == 0


@pytest.mark.second_stage
def test_embedded_server_gives_no_warning_on_a_bare_machine(bare: Shell, home: Path) -> None:
    """As a warning of platformdirs, which the wheel's own module causes if XDG_RUNTIME_DIR is not set."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dblock", "--embedded", "ls"],
        env=environment, cwd=bare.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("kind", [".env", "pyproject.toml"])
@pytest.mark.parametrize(
    ("change", "why"),
    [("owner", "it belongs to another user"), ("mode", "every user may write to it"), ("link", "another user")],
)
def test_file_of_another_user_above_is_ignored(bare: Shell, dsn: str, change: str, why: str, kind: str) -> None:
    if change != "mode" and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path, below = bare.folder / kind, bare.folder / "below"
    below.mkdir()
    path.write_text(f"DBLOCK_DSN='{dsn}'\n" if kind == ".env" else f"[tool.dblock]\ndsn = {json.dumps(dsn)}\n")
    assert bare.run("ls", cwd=below).code == 0
    if change == "owner":
        os.chown(path, 65534, 65534)
    elif change == "mode":
        path.chmod(0o666)
    else:
        path.rename(bare.folder / "mine")
        path.symlink_to(bare.folder / "mine")
        os.chown(path, 65534, 65534, follow_symlinks=False)
    ignored = bare.run("ls", cwd=below)
    assert ignored.code == 78
    assert f"{path} is ignored: " in ignored.err
    assert why in ignored.err
    said = bare.run("ls", cwd=below, env={"DBLOCK_DSN": dsn}).err
    assert "is ignored" not in said, "files are not read if the environment names the database"


def test_safe_file_above_an_ignored_one_is_used(bare: Shell, dsn: str) -> None:
    middle = bare.folder / "middle"
    (middle / "below").mkdir(parents=True)
    (bare.folder / ".env").write_text(f"DBLOCK_DSN='{dsn}'\n")
    (middle / ".env").write_text("DBLOCK_DSN=host=/nowhere\n")
    (middle / ".env").chmod(0o666)
    done = bare.run("status", cwd=middle / "below")
    assert f"named by  {bare.folder / '.env'}" in done.out
    assert done.err.count("is ignored: every user may write to it.") == 1


def test_file_of_the_owner_of_the_working_folder_is_used(bare: Shell, dsn: str) -> None:
    """In a container, the mounted folder and its files often belong to another user than the process."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    mounted = bare.folder / "mounted"
    mounted.mkdir()
    (mounted / ".env").write_text(f"DBLOCK_DSN='{dsn}'\n")
    for path in (mounted, mounted / ".env"):
        os.chown(path, 1000, 1000)
    assert bare.run("ls", cwd=mounted).code == 0
    os.chown(mounted / ".env", 65534, 65534)
    assert bare.run("ls", cwd=mounted).code == 78


def test_search_ends_at_the_home_folder(bare: Shell, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bare.folder / "own"
    (own / "project").mkdir(parents=True)
    (bare.folder / ".env").write_text(f"DBLOCK_DSN='{dsn}'\n")
    assert bare.run("ls", cwd=own / "project").code == 0
    monkeypatch.setenv("HOME", str(own))
    assert bare.run("ls", cwd=own / "project").code == 78
    (own / ".env").write_text(f"DBLOCK_DSN='{dsn}'\n")
    assert bare.run("ls", cwd=own / "project").code == 0, "the home folder itself counts"


def test_search_ends_where_another_file_system_begins(bare: Shell, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = bare.folder / "mounted"
    (mounted / "project").mkdir(parents=True)
    (bare.folder / ".env").write_text(f"DBLOCK_DSN='{dsn}'\n")
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        device = 7 if self.is_relative_to(mounted) else found.st_dev
        return os.stat_result((*found[:2], device, *found[3:]))

    assert bare.run("ls", cwd=mounted / "project").code == 0
    monkeypatch.setattr(Path, "stat", stat)
    assert bare.run("ls", cwd=mounted / "project").code == 78


def test_commands_without_libpq_say_what_to_install(bare: Shell) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dblock", *arguments],
            env=os.environ | {"PSYCOPG_IMPL": "missing"}, cwd=bare.folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    helped = run("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "force-release" in helped.stdout
    refused = run("--dsn", "host=127.0.0.1", "ls")
    assert refused.returncode == 78
    assert "pip install 'dblock[binary]' (in a checkout: pip install -e '.[binary]')" in refused.stderr
    assert "Traceback" not in refused.stderr

"""`dblock run`: what it says and does not say, its own exit codes, and what others see of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock.admin import schema
from dblock.cli.run.passwords import has_password, without
from tests.support.eventually import eventually
from tests.support.shell import Shell, ended
from tests.support.stages import first


def waits(path: Path) -> list[str]:
    return ["--", "sh", "-c", f"touch {path}/on; while [ ! -e {path}/off ]; do sleep 0.02; done"]


@pytest.mark.second_stage
@pytest.mark.parametrize("options", first(1, [["--timeout", "0.2"], ["--skip-if-held"], ["--timeout", "0"]]))
def test_quiet_run_that_does_not_get_the_lock_prints_nothing(
    shell: Shell, client: dblock.Client, options: list[str]
) -> None:
    client.lock("job", ttl=60).acquire()
    assert shell.run("run", "job", "-q", *options, "--", "echo", "ran") == (75, "", "")
    assert shell.run("--json", "run", "job", "-q", *options, "--", "echo", "ran") == (75, "", "")


@pytest.mark.second_stage
def test_run_that_does_not_get_the_lock_names_the_holder(shell: Shell, dsn: str, role: str) -> None:
    """Also for a role that may only lock. It advises no command, because the role may not call `dblock show`."""
    schema.grant(dsn, role)
    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    with dblock.Client(dsn, holder="ann") as ann:
        ann.lock("job", ttl=60).acquire()
        for options in (["--skip-if-held"], ["--timeout", "0"]):
            done = shell.run("run", "job", *options, "--", "echo", "ran", dsn=as_role)
            assert done.code == 75
            assert done.err.splitlines()[-1] == "dblock: lock 'job' was not acquired; it is held by ann."
            assert "waiting" not in done.err


@pytest.mark.second_stage
@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        ("no database", 78),
        *(
            pytest.param(*case, marks=pytest.mark.second_stage)
            for case in (("privilege", 77), ("schema", 78), ("settings file", 78), ("refusal", 71))
        ),
    ],
)
def test_errors_of_run_itself_have_codes_of_their_own(
    shell: Shell, dsn: str, role: str, owner: psycopg.Connection, trouble: str, code: int
) -> None:
    """None of them is 1 or 2, with which commands often fail."""
    options: list[str] = []
    if trouble == "privilege":
        shell.dsn = conninfo.make_conninfo(dsn, user=role, password="app")
    elif trouble == "schema":
        options = ["--schema", "elsewhere"]
    elif trouble == "refusal":
        owner.execute("ALTER TABLE distributed_locks ADD CHECK (name <> 'job')")
    else:
        shell.dsn = None
        (shell.folder / "pyproject.toml").write_text("[tool.dblock]\nx = 1\n" if trouble == "settings file" else "")
    done = shell.run("run", *options, "job", "--", "echo", "ran")
    assert (done.code, done.out) == (code, "")


@pytest.mark.second_stage
def test_others_see_the_program_that_runs(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    process = shell.start("run", "job", *waits(tmp_path))
    eventually((tmp_path / "on").exists)
    shown = f"{socket.gethostname()} pid {process.pid} (sh)"
    assert shown in shell.run("ls").out
    assert shown in shell.run("show", "job").out
    assert shell.run("ls", "--json").json[0]["meta"] == {"command": "sh"}
    (tmp_path / "off").touch()
    assert ended(process).code == 0


@pytest.mark.second_stage
def test_holder_and_meta_are_shown(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    options = ["--holder", "nightly on web-3", "--meta", "ticket=812", "--meta", "url=http://x/?a=b"]
    process = shell.start("run", "job", *options, *waits(tmp_path))
    eventually((tmp_path / "on").exists)
    found = client.lock("job").holder()
    assert found is not None
    assert (found.holder, found.meta) == (
        "nightly on web-3",
        {"command": "sh", "ticket": "812", "url": "http://x/?a=b"},
    )
    (tmp_path / "off").touch()
    assert ended(process).code == 0


@pytest.mark.second_stage
def test_listen_dsn_wakes_the_waiting_run(shell: Shell, dsn: str, client: dblock.Client) -> None:
    lease = client.lock("job").acquire()
    listen = conninfo.make_conninfo(dsn, application_name="past the pooler")
    process = shell.start("run", "job", "--listen-dsn", listen, "--", "echo", "ran")
    eventually(client.lock("job").queue)
    with psycopg.connect(dsn, autocommit=True) as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'past the pooler'"
        eventually(lambda: connection.execute(asked).fetchone() == (1,), "the listener's connection")
    lease.release()
    assert ended(process).out == "ran\n"
    assert shell.run("run", "job", "--listen-dsn", "nonsense", "--", "true").code == 64


@pytest.mark.second_stage
@pytest.mark.parametrize("form", first(1, [["--dsn", "{}"], ["--dsn={}"], ["--listen-dsn", "{}"]]))
def test_password_of_an_option_is_not_in_the_arguments_of_any_process(
    shell: Shell, dsn: str, role: str, tmp_path: Path, form: list[str]
) -> None:
    """Nor in the environment of the command."""
    schema.grant(dsn, role)
    secret = conninfo.make_conninfo(dsn, user=role, password="app")
    shell.dsn = dsn if "--listen-dsn" in form else None
    options = [part.format(secret) for part in form]
    command = f"env > {tmp_path}/env; touch {tmp_path}/on; while [ ! -e {tmp_path}/off ]; do sleep 0.02; done"
    process = shell.start("run", *options, "job", "--", "sh", "-c", command, env={"MARK": f"{tmp_path}"}, cold=True)
    eventually((tmp_path / "on").exists)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, arguments = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(f"MARK={tmp_path}") in environment:
            assert b"password=app" not in arguments
    assert "password=app" not in (tmp_path / "env").read_text()
    (tmp_path / "off").touch()
    done = ended(process)
    assert done.code == 0
    assert done.err.count("was visible to every user") == 1
    assert "~/.pgpass" in done.err
    assert "app'" not in done.err


@pytest.mark.second_stage
def test_quiet_run_prints_no_warning_of_a_password(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(dsn, role)
    shell.dsn = conninfo.make_conninfo(dsn, user=role, password="app")
    assert shell.run("run", "-q", "job", "--", "echo", "ran") == (0, "ran\n", "")


def test_passwords_are_recognised_and_removed() -> None:
    for dsn in ("postgresql://u:p@h/db", "host=h password = p", "postgres://h/db?user=u&password=p", "sslpassword=p"):
        assert has_password(dsn)
    for dsn in ("postgresql://u@h:5432/db", "host=h user=u", "postgresql://[::1]:5432/db", "service=password"):
        assert not has_password(dsn)
    assert without(["run", "--dsn", "x", "--", "--dsn", "x"], "--dsn", "x") == ["run", "--", "--dsn", "x"]
    assert without(["run", "--dsn=x", "job"], "--dsn", "x") == ["run", "job"]
    assert without(["run", "job"], "--dsn", "x") == ["run", "job"]

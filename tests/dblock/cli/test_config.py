"""The sources of the settings, the output formats, and what commands never print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dblock
from dblock.cli import config
from tests.support import warm_start
from tests.support.shell import Shell, ended
from tests.support.stages import first

COMMANDS = [
    "run", "once", "schedules", "barriers", "ls", "show", "history", "waiters", "graph", "watch", "force-release",
    "doctor", "certify", "install", "uninstall", "status", "grant", "revoke", "reaper", "token", "embedded", "fence",
    "demo", "bench", "completion",
]  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Shell]:
    """A shell that passes no DSN."""
    made = Shell(None, tmp_path)
    yield made
    made.close()


def named_by(shell: Shell, *arguments: str, **options: object) -> object:
    done = shell.run("status", "--json", *arguments, **options)  # type: ignore[arg-type]
    assert done.code == 0, done.err
    return done.json["named_by"]


def test_sources_of_the_dsn_have_an_order(bare: Shell, dsn: str) -> None:
    (bare.folder / "pyproject.toml").write_text(f"[tool.dblock]\ndsn = {json.dumps(dsn)}\n")
    assert str(named_by(bare)).endswith("pyproject.toml [tool.dblock]")
    (bare.folder / ".env").write_text(f"OTHER=1\nexport DBLOCK_DSN='{dsn}'\n")
    assert named_by(bare) == str(bare.folder / ".env")
    assert named_by(bare, env={"DBLOCK_DSN": dsn}) == "environment"
    assert named_by(bare, "--dsn", dsn, env={"DBLOCK_DSN": "host=/nowhere"}) == "--dsn"


def test_files_are_found_from_a_folder_below(bare: Shell, dsn: str) -> None:
    (bare.folder / ".env").write_text(f"DBLOCK_DSN='{dsn}'\n")
    below = bare.folder / "a" / "b"
    below.mkdir(parents=True)
    assert named_by(bare, cwd=below) == str(bare.folder / ".env")


def test_files_without_dblock_settings_are_ignored(bare: Shell, dsn: str) -> None:
    """Even if the files are invalid."""
    (bare.folder / ".env").write_bytes(b"\xff\xfe what is this")
    (bare.folder / "pyproject.toml").write_text("this is not TOML")
    assert named_by(bare, "--dsn", dsn) == "--dsn"
    assert bare.run("ls", "--dsn", dsn).code == 0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("pyproject.toml", "[tool.dblock\n", "cannot be read"),
        ("pyproject.toml", "[tool.dblock]\ndns = 'x'\n", "may hold only dsn, schema and accept"),
        ("pyproject.toml", "[tool.dblock]\ndsn = 7\n", "may hold only dsn, schema and accept"),
        ("pyproject.toml", "tool = 'dblock'\n", "cannot be read"),
        (".env", "DBLOCK_DSN=\n", "DSN is empty"),
    ],
)
def test_invalid_file_is_an_error(bare: Shell, name: str, text: str, says: str) -> None:
    (bare.folder / name).write_text(text)
    done = bare.run("ls")
    assert (done.code, done.out) == (78, "")
    assert says in done.err


def test_schema_is_read_from_every_source(bare: Shell, dsn: str) -> None:
    (bare.folder / "pyproject.toml").write_text(f"[tool.dblock]\ndsn = {json.dumps(dsn)}\nschema = 'elsewhere'\n")
    assert "elsewhere" in bare.run("ls").err
    assert bare.run("ls", "--schema", "dblock").code == 0
    assert bare.run("ls", env={"DBLOCK_SCHEMA": "dblock"}).code == 0


def test_library_reads_no_files(bare: Shell) -> None:
    """Only the command reads files: a file that happens to be there must not choose an application's database."""
    (bare.folder / ".env").write_text("DBLOCK_DSN=host=/nowhere\n")
    script = "from dblock._runtime.target import resolve; print(resolve(None))"
    environment = os.environ | {"DBLOCK_EMBEDDED": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=bare.folder, env=environment, stdout=subprocess.PIPE)
    assert done.stdout == b"the embedded Postgres\n"


@pytest.mark.parametrize("where", ["before", "after"])
def test_shared_options_work_before_and_after_the_command(bare: Shell, dsn: str, where: str) -> None:
    options = ["--dsn", dsn, "--json"]
    arguments = [*options, "ls"] if where == "before" else ["ls", *options]
    assert bare.run(*arguments).json == []


def test_every_command_has_a_help(bare: Shell) -> None:
    listed = bare.run("--help").out
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        shown = bare.run(name, "-h")
        assert shown.code == 0
        assert shown.out.startswith("Usage: dblock")


def test_version_option_prints_the_version(bare: Shell) -> None:
    assert bare.run("--version").out == f"dblock {dblock.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "No such command 'nope'"),
        (["histroy"], "Did you mean 'history'?"),
        (["ls", "--nope"], "--nope"),
        (["ls", "--limit", "0"], "0"),
        (["token"], "Usage"),
        ([], "Usage"),
    ],
)
def test_invalid_command_line_is_exit_code_2(bare: Shell, arguments: list[str], says: str) -> None:
    done = bare.run(*arguments)
    assert done.code == 2
    assert says in done.out + done.err


@pytest.mark.second_stage
def test_value_that_the_library_refuses_is_exit_code_2(shell: Shell, role: str) -> None:
    for arguments in (["ls", "--schema", ""], ["grant", "ghost"], ["reaper", "--once", "--idle", "-1"]):
        assert shell.run(*arguments).code == 2, arguments


def test_shared_options_work_between_a_group_and_its_command(bare: Shell, dsn: str) -> None:
    assert bare.run("token", "--json", "--dsn", dsn, "show").json["highest"] == 0
    assert bare.run("fence", "--dsn", dsn, "list", "--json").json == []
    assert bare.run("embedded", "--json", "status", env={"DBLOCK_HOME": "/nowhere"}).json["running"] is False


def test_invalid_command_line_is_reported_in_json(bare: Shell) -> None:
    told = json.loads(bare.run("--json", "nope").err)
    assert told["exit_code"] == 2
    assert "nope" in told["error"]


@pytest.mark.second_stage
def test_debug_prints_a_traceback_without_the_password(bare: Shell) -> None:
    process = bare.start("ls", "--debug", "--dsn", "host=127.0.0.1 port=1 user=x password=hunter2")
    _, err = process.communicate(timeout=30)
    assert "Traceback" in err
    assert "hunter2" not in err
    assert process.returncode == 69


def test_unexpected_error_is_reported_as_a_bug(
    bare: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dblock import cli

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(config.Sources, "setting", broken)
    assert cli.main(["ls"]) == 70
    said = capsys.readouterr().err
    assert "ZeroDivisionError: oh" in said
    assert "--debug" in said


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(bare: Shell, shell_name: str) -> None:
    done = bare.run("completion", shell_name)
    assert done.code == 0
    assert "_DBLOCK_COMPLETE" in done.out
    assert bare.run("completion", "tcsh").code == 2


def completed(words: str, dsn: str, folder: Path) -> list[str]:
    """Return the completions, requested as bash's script does."""
    done = warm_start.run(
        [sys.executable, "-m", "dblock"],
        env=os.environ
        | {
            "_DBLOCK_COMPLETE": "bash_complete",
            "COMP_WORDS": f"dblock {words}",
            "COMP_CWORD": str(len(words.split(" "))),
            "DBLOCK_DSN": dsn,
        },
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=30,
    )
    assert done.stderr == ""
    return [line.split(",", 1)[1] for line in done.stdout.splitlines() if line]


def test_completion_offers_commands_options_and_lock_names(dsn: str, client: dblock.Client, tmp_path: Path) -> None:
    client.lock("invoice:1").acquire().release()
    client.lock("invoice:2").acquire().release()
    assert completed("hist", dsn, tmp_path) == ["history"]
    assert "--skip-if-held" in completed("run --sk", dsn, tmp_path)
    assert completed("show inv", dsn, tmp_path) == ["invoice:1", "invoice:2"]
    assert completed("show inv", "host=127.0.0.1 port=1", tmp_path) == [], "no names from an unreachable database"


@pytest.mark.second_stage
@pytest.mark.parametrize(
    "arguments", first(1, [["install"], ["status"], ["grant", "x"], ["token", "show"], ["uninstall", "--yes"]])
)
def test_ctrl_c_is_reported_in_one_line(bare: Shell, arguments: list[str]) -> None:
    """The server accepts the connection and never replies."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = bare.start(*arguments, dsn=f"host=127.0.0.1 port={silent.getsockname()[1]} user=x dbname=x")
        with silent.accept()[0] as connection:
            assert connection.recv(1), "the command has sent its first message, and waits for the reply"
            process.send_signal(signal.SIGINT)
            done = ended(process)
    assert (done.code, done.err) == (130, "dblock: interrupted\n")


@pytest.mark.second_stage
def test_every_command_prints_json(shell: Shell, role: str) -> None:
    for arguments in (
        ["install"], ["status"], ["grant", role, "--may", "see"], ["revoke", role], ["token", "show"],
        ["token", "raise", "--above", "9"],
        ["reaper", "--once"], ["install", "--sql"], ["fence", "setup"], ["fence", "list"], ["fence", "log"],
        ["fence", "high-water"], ["completion", "bash"], ["ls"], ["waiters"], ["history"], ["uninstall", "--yes"],
    ):  # fmt: skip
        done = shell.run(*arguments, "--json")
        assert done.code == 0, (arguments, done.err)
        json.loads(done.out)

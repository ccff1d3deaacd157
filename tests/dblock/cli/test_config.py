"""Which database a command is about, how it answers, and what it never shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dblock
from dblock.cli import config
from tests.support.shell import Shell, ended

COMMANDS = [
    "run", "ls", "show", "history", "waiters", "graph", "watch", "break", "doctor", "install", "uninstall", "status",
    "grant", "reaper", "token", "embedded", "fence", "demo", "bench", "completion",
]  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Shell]:
    """A shell that names no database by itself."""
    made = Shell(None, tmp_path)
    yield made
    made.close()


def named_by(shell: Shell, *arguments: str, **options: object) -> object:
    done = shell.run("status", "--json", *arguments, **options)  # type: ignore[arg-type]
    assert done.code == 0, done.err
    return done.json["named_by"]


def test_the_database_is_looked_for_in_this_order(bare: Shell, dsn: str) -> None:
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


def test_files_that_are_not_about_us_are_left_alone(bare: Shell, dsn: str) -> None:
    """However broken they are."""
    (bare.folder / ".env").write_bytes(b"\xff\xfe what is this")
    (bare.folder / "pyproject.toml").write_text("this is not TOML")
    assert named_by(bare, "--dsn", dsn) == "--dsn"
    assert bare.run("ls", "--dsn", dsn).code == 0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("pyproject.toml", "[tool.dblock\n", "cannot be read"),
        ("pyproject.toml", "[tool.dblock]\ndns = 'x'\n", "takes dsn and schema"),
        ("pyproject.toml", "[tool.dblock]\ndsn = 7\n", "takes dsn and schema"),
        ("pyproject.toml", "tool = 'dblock'\n", "cannot be read"),
        (".env", "DBLOCK_DSN=\n", "DSN is empty"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(bare: Shell, name: str, text: str, says: str) -> None:
    (bare.folder / name).write_text(text)
    done = bare.run("ls")
    assert (done.code, done.out) == (1, "")
    assert says in done.err


def test_the_schema_can_be_set_too(bare: Shell, dsn: str) -> None:
    (bare.folder / "pyproject.toml").write_text(f"[tool.dblock]\ndsn = {json.dumps(dsn)}\nschema = 'elsewhere'\n")
    assert "elsewhere" in bare.run("ls").err
    assert bare.run("ls", "--schema", "dblock").code == 0
    assert bare.run("ls", env={"DBLOCK_SCHEMA": "dblock"}).code == 0


def test_the_library_reads_no_files(bare: Shell) -> None:
    """Only the command does: what lies about must not decide where an application's locks are."""
    (bare.folder / ".env").write_text("DBLOCK_DSN=host=/nowhere\n")
    script = "from dblock._runtime.target import resolve; print(resolve(None))"
    done = subprocess.run([sys.executable, "-c", script], cwd=bare.folder, capture_output=True, text=True)
    assert done.stdout == "the embedded Postgres\n"


@pytest.mark.parametrize("where", ["before", "after"])
def test_options_of_all_commands_come_before_or_after(bare: Shell, dsn: str, where: str) -> None:
    options = ["--dsn", dsn, "--json"]
    arguments = [*options, "ls"] if where == "before" else ["ls", *options]
    assert bare.run(*arguments).json == []


def test_every_command_explains_itself(bare: Shell) -> None:
    listed = bare.run("--help").out
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        shown = bare.run(name, "-h")
        assert shown.code == 0
        assert shown.out.startswith("Usage: dblock")


def test_the_version(bare: Shell) -> None:
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
def test_what_is_not_understood_is_exit_code_2(bare: Shell, arguments: list[str], says: str) -> None:
    done = bare.run(*arguments)
    assert done.code == 2
    assert says in done.out + done.err


def test_what_is_not_understood_is_told_in_json_too(bare: Shell) -> None:
    told = json.loads(bare.run("--json", "nope").err)
    assert told["exit_code"] == 2
    assert "nope" in told["error"]


def test_a_traceback_is_shown_to_who_asks_for_it(bare: Shell) -> None:
    process = bare.start("ls", "--debug", "--dsn", "host=127.0.0.1 port=1 user=x password=hunter2")
    _, err = process.communicate(timeout=30)
    assert "Traceback" in err
    assert "hunter2" not in err
    assert process.returncode == 69


def test_a_bug_is_said_to_be_one(
    bare: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dblock import cli

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(config, "_sources", broken)
    assert cli.main(["ls"]) == 70
    said = capsys.readouterr().err
    assert "ZeroDivisionError: oh" in said
    assert "--debug" in said


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_for(bare: Shell, shell_name: str) -> None:
    done = bare.run("completion", shell_name)
    assert done.code == 0
    assert "_DBLOCK_COMPLETE" in done.out
    assert bare.run("completion", "tcsh").code == 2


def completed(words: str, dsn: str, folder: Path) -> list[str]:
    """Ask for completions as bash's script does."""
    done = subprocess.run(
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


def test_commands_options_and_names_of_locks_are_completed(dsn: str, client: dblock.Client, tmp_path: Path) -> None:
    client.lock("invoice:1").acquire().release()
    client.lock("invoice:2").acquire().release()
    assert completed("hist", dsn, tmp_path) == ["history"]
    assert "--skip-if-held" in completed("run --sk", dsn, tmp_path)
    assert completed("show inv", dsn, tmp_path) == ["invoice:1", "invoice:2"]
    assert completed("show inv", "host=127.0.0.1 port=1", tmp_path) == [], "silent where it cannot be had"


@pytest.mark.parametrize(
    "arguments", [["install"], ["status"], ["grant", "x"], ["token", "show"], ["uninstall", "--yes"]]
)
def test_ctrl_c_in_the_middle_is_one_line(bare: Shell, arguments: list[str]) -> None:
    """The database takes the connection and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = bare.start(*arguments, dsn=f"host=127.0.0.1 port={silent.getsockname()[1]} user=x dbname=x")
        with silent.accept()[0]:
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            done = ended(process)
    assert (done.code, done.err) == (130, "dblock: interrupted\n")


@pytest.mark.second_stage
def test_every_answer_can_be_json(shell: Shell, role: str) -> None:
    for arguments in (
        ["install"], ["status"], ["grant", role, "--may", "see"], ["token", "show"], ["token", "raise", "--above", "9"],
        ["reaper", "--once"], ["install", "--sql"], ["fence", "setup"], ["fence", "list"], ["fence", "log"],
        ["fence", "high-water"], ["completion", "bash"], ["ls"], ["waiters"], ["history"], ["uninstall", "--yes"],
    ):  # fmt: skip
        done = shell.run(*arguments, "--json")
        assert done.code == 0, (arguments, done.err)
        json.loads(done.out)

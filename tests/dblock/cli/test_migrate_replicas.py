"""Many replicas start `dblock migrate` at once: every step runs once, and what is done or has failed costs nothing."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dblock.recipes.migrations.turn import Plan, Turn
from tests.support.eventually import eventually
from tests.support.machine import Host, measured
from tests.support.migrations import errors, outcomes, query
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.programs import program, psql
from tests.support.servers import private_server
from tests.support.shell import Shell

PATIENCE = 300

IN_ONE_TRANSACTION = """
BEGIN;
CREATE TABLE steps (n int);
INSERT INTO steps VALUES (1);
COMMIT;
"""
CONCURRENTLY = """
CREATE TABLE steps (n int);
INSERT INTO steps VALUES (1);
CREATE INDEX CONCURRENTLY by_n ON steps (n);
"""

STEPS = pytest.mark.parametrize("steps", [IN_ONE_TRANSACTION, CONCURRENTLY], ids=["transaction", "concurrently"])

SLOW_INDEX = """
CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql
AS 'BEGIN PERFORM pg_sleep(0.002); RETURN n; END';
CREATE TABLE times (at timestamptz);
CREATE TABLE rows AS SELECT n FROM generate_series(1, 500) AS n;
"""

FAILS_WHEN_TOLD = "while [ ! -e go ]; do sleep 0.1; done; echo no >&2; exit 1"


def start_together(shell: Shell, number: int, *arguments: str, **options: Any) -> list[Any]:
    return [shell.start("migrate", *arguments, **options) for _ in range(number)]


def exit_codes(replicas: list[Any]) -> list[tuple[int, str]]:
    """Return the exit code of each replica that did not succeed, with what it said."""
    said = [replica.communicate(timeout=PATIENCE)[1] for replica in replicas]
    return [(one.returncode, text) for one, text in zip(replicas, said, strict=True) if one.returncode != 0]


@pytest.mark.second_stage
def test_replicas_run_the_script_once(shell: Shell, dsn: str, tmp_path: Path) -> None:
    script = tmp_path / "1.sql"
    script.write_text(IN_ONE_TRANSACTION)
    assert exit_codes(start_together(shell, 3, "--version", "1", "--", *psql(dsn, script))) == []
    assert query(dsn, "SELECT n FROM steps") == [(1,)]
    assert outcomes(dsn) == ["succeeded"]


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(2, marks=[pytest.mark.second_stage, pytest.mark.timeout(900)]),
        pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]),
    ],
)
def test_ten_replicas_run_every_step_once_on_an_empty_database(
    shell: Shell, bare_dsn: str, tmp_path: Path, rounds: int
) -> None:
    script = tmp_path / "1.sql"
    for number in range(rounds):
        script.write_text((CONCURRENTLY, IN_ONE_TRANSACTION)[number % 2])
        query(bare_dsn, "DROP TABLE IF EXISTS public.steps")
        query(bare_dsn, "DROP SCHEMA IF EXISTS dblock CASCADE")
        arguments = ["--version", "1", "--", *psql(bare_dsn, script)]
        assert exit_codes(start_together(shell, 10, *arguments, dsn=bare_dsn)) == []
        assert query(bare_dsn, "SELECT n FROM steps") == [(1,)]
        assert outcomes(bare_dsn) == ["succeeded"]
        assert query(bare_dsn, "SELECT count(*) FROM pg_index WHERE NOT indisvalid") == [(0,)]


@pytest.mark.second_stage
def test_twenty_first_starts_leave_no_error_in_the_log(tmp_path: Path) -> None:
    with private_server({"fsync": "off", "log_line_prefix": "[%e] "}, in_memory=True) as server:
        shell = Shell(server.url, tmp_path)
        try:
            script = tmp_path / "1.sql"
            script.write_text("CREATE TABLE version_table (n int);")
            assert exit_codes(start_together(shell, 20, "--version", "1", "--", *psql(server.url, script))) == []
        finally:
            shell.close()
        states = set(re.findall(r"^\[(\w{5})\] (?:ERROR|FATAL)", server.log.read_text(), re.MULTILINE))
        assert states & {"23505", "40P01", "42P06", "42P07", "42710", "XX000"} == set()
        assert outcomes(server.url) == ["succeeded"]


def tuples_written(dsn: str) -> int:
    ((count,),) = query(
        dsn,
        "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables WHERE schemaname = 'dblock'",
    )
    return int(count)


def wait_for_statistics(dsn: str) -> None:
    """Wait until other sessions have ended. A session reports the rest of its statistics before it disappears."""
    others = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    eventually(lambda: not query(dsn, others), "the end of the other sessions")


@pytest.mark.second_stage
def test_version_that_is_done_needs_a_database_that_can_only_be_read(shell: Shell, dsn: str) -> None:
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0
    read_only = {"PGOPTIONS": "-c default_transaction_read_only=on"}
    assert shell.run("migrate", "--version", "1", "--", "false", env=read_only).code == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "replicas", [pytest.param(30, marks=pytest.mark.second_stage), pytest.param(100, marks=pytest.mark.nightly)]
)
def test_replicas_of_a_version_that_is_done_write_nothing(shell: Shell, dsn: str, replicas: int) -> None:
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0
    wait_for_statistics(dsn)
    written, locks = tuples_written(dsn), query(dsn, "SELECT l::text FROM dblock.distributed_locks AS l")
    assert exit_codes(start_together(shell, replicas, "--version", "1", "--", "false")) == []
    wait_for_statistics(dsn)
    assert tuples_written(dsn) == written
    assert query(dsn, "SELECT l::text FROM dblock.distributed_locks AS l") == locks


@pytest.mark.alone
@pytest.mark.second_stage
def test_version_that_is_done_costs_one_statement_and_little_time(dsn: str) -> None:
    with Turn(dsn, Plan("m", "1")) as turn:
        assert turn.take()
        turn.finish("succeeded")
    times = []
    for _ in range(20):
        with Turn(dsn, Plan("m", "1")) as turn:
            began = time.thread_time()
            assert not turn.take()
            times.append(time.thread_time() - began)
    assert min(times) < 0.05, times


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("replicas", "starts"),
    [pytest.param(5, 3, marks=pytest.mark.second_stage), pytest.param(10, 5, marks=pytest.mark.nightly)],
)
def test_failure_is_told_to_all_replicas_and_their_restarts(
    shell: Shell, dsn: str, tmp_path: Path, replicas: int, starts: int
) -> None:
    script = tmp_path / "1.sql"
    script.write_text("SELECT pg_sleep(1); SELECT 1 / 0;")
    arguments = ["--version", "1", "--attempts", "2", "--", *psql(dsn, script)]
    said = []
    for _ in range(starts):
        said += exit_codes(start_together(shell, replicas, *arguments))
    assert outcomes(dsn) == ["failed", "failed"]
    assert sorted(code for code, _ in said) == [3, 3, *[65] * (replicas * starts - 2)]
    assert all("division by zero" in text for _, text in said)
    with measured() as lateness:
        began = time.monotonic()
        assert shell.run("migrate", *arguments).code == 65
        assert time.monotonic() - began < 2.0 + 20 * lateness()


@pytest.mark.alone
@pytest.mark.second_stage
def test_waiters_learn_of_a_failure_within_two_seconds(shell: Shell, dsn: str) -> None:
    replicas = start_together(shell, 5, "--version", "1", "--", "sh", "-c", FAILS_WHEN_TOLD)
    eventually(lambda: query(dsn, "SELECT count(*) FROM dblock.list_waiters('migrate')") == [(4,)], "the queue")
    (shell.folder / "go").touch()
    eventually(lambda: outcomes(dsn) == ["failed"], "the failure")
    with measured() as lateness:
        began = time.monotonic()
        eventually(lambda: all(one.poll() is not None for one in replicas), "the end of the others")
        took = time.monotonic() - began
        assert took < 2.0 + 20 * lateness()
    assert sorted(code for code, text in exit_codes(replicas)) == [1, 65, 65, 65, 65]
    assert errors(dsn) == ["no"]


@contextlib.contextmanager
def waiters(dsn: str, number: int) -> Iterator[None]:
    """Keep a number of replicas waiting, each as `dblock migrate` waits."""
    turns = [Turn(dsn, Plan("migrate", "1", timeout=PATIENCE), presence=None) for _ in range(number)]

    def wait(turn: Turn) -> None:
        with turn:
            assert not turn.take()

    threads = [threading.Thread(target=wait, args=[turn]) for turn in turns]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


@pytest.mark.second_stage
@pytest.mark.timeout(900)
def test_waiters_hold_no_snapshot_and_do_not_delay_an_index(tmp_path: Path) -> None:
    from dblock._runtime.target import resolve
    from dblock.admin import schema

    with private_server({"fsync": "off", "max_connections": "300"}, in_memory=True) as server:
        dsn = server.url
        schema.install(resolve(dsn))
        query(dsn, SLOW_INDEX)
        noted = "INSERT INTO times SELECT clock_timestamp();"
        builds = [f"{noted} CREATE INDEX CONCURRENTLY by_n{i} ON rows (slow(n)); {noted}" for i in range(5)]
        build = tmp_path / "1.sql"
        build.write_text("\n".join(builds))
        before = _fastest_build(dsn, "before")
        shell = Shell(dsn, tmp_path)
        try:
            holder = shell.start(
                "migrate", "--version", "1", "--",
                "sh", "-c", 'while [ ! -e go ]; do sleep 0.1; done; exec "$@"', "-", *psql(dsn, build),
            )  # fmt: skip
            eventually(lambda: outcomes(dsn) == [None], "the run")
            with waiters(dsn, 50):
                queue = "SELECT count(*) FROM dblock.list_waiters('migrate', 100)"
                eventually(lambda: query(dsn, queue) == [(50,)], "50 waiters")
                (tmp_path / "go").touch()
                longest, taken = _longest_snapshot(dsn, lambda: holder.poll() is None)
            assert holder.wait(60) == 0
        finally:
            shell.close()
        assert longest < 1.0
        after = _fastest_build(dsn, "after")
        noted_at = [at for (at,) in query(dsn, "SELECT date_part('epoch', at) FROM times ORDER BY at")]
        took = [
            end - begin - _taken_between(taken, begin, end)
            for begin, end in zip(noted_at[::2], noted_at[1::2], strict=True)
        ]
        # A waiter with a snapshot would delay every build. A busy machine delays some.
        assert min(took) <= 1.2 * max(before, after), f"{took}, alone {before} and {after}"
        assert query(dsn, "SELECT count(*) FROM pg_index WHERE indisvalid AND indrelid = 'rows'::regclass") == [(11,)]


def _fastest_build(dsn: str, name: str) -> float:
    """Return how many seconds the fastest of three builds takes without waiters."""
    took = []
    for number in range(3):
        began = time.monotonic()
        query(dsn, f"CREATE INDEX CONCURRENTLY {name}_{number} ON rows (slow(n))")
        took.append(time.monotonic() - began)
    return min(took)


def _longest_snapshot(dsn: str, goes_on: Any) -> tuple[float, list[tuple[float, float]]]:
    """Return for how long one session of dblock showed the same snapshot, while something lasts.

    The time that the host took is not counted. It is returned too, as it was at each look.
    """
    host = Host()
    since: dict[tuple[int, Any], float] = {}
    longest, taken = 0.0, []
    with psycopg.connect(dsn, autocommit=True, application_name="test") as connection:
        while goes_on():
            taken.append((time.time(), host.took()))
            now = time.monotonic() - host.took()
            rows = connection.execute(
                "SELECT pid, query_start FROM pg_stat_activity"
                " WHERE application_name = 'dblock' AND backend_xmin IS NOT NULL"
            ).fetchall()
            since = {(pid, began): since.get((pid, began), now) for pid, began in rows}
            longest = max([longest, *(now - first for first in since.values())])
            time.sleep(0.05)
    return longest, taken


def _taken_between(taken: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return how many seconds the host took between two moments."""
    within = [seconds for at, seconds in taken if begin <= at <= end]
    return within[-1] - within[0] if within else 0.0


@needs_pgbouncer
@pytest.mark.second_stage
@pytest.mark.timeout(900)
@STEPS
def test_ten_replicas_behind_a_transaction_pooler_run_every_step_once(
    shell: Shell, bare_dsn: str, tmp_path: Path, steps: str
) -> None:
    script = tmp_path / "1.sql"
    script.write_text(steps)
    advisory = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    with pooled(bare_dsn) as through:
        before = query(bare_dsn, advisory)
        replicas = start_together(shell, 10, "--version", "1", "--", *psql(through, script), dsn=through)
        said = [replica.communicate(timeout=PATIENCE)[1] for replica in replicas]
        assert [replica.returncode for replica in replicas] == [0] * 10, said
        assert query(bare_dsn, advisory) == before
    assert query(bare_dsn, "SELECT n FROM steps") == [(1,)]
    assert outcomes(bare_dsn) == ["succeeded"]
    assert sum("the command gets no PGOPTIONS" in text for text in said) == 1, said


@pytest.mark.second_stage
def test_lock_of_a_restored_dump_is_not_waited_for(shell: Shell, dsn: str, bare_dsn: str, tmp_path: Path) -> None:
    running = shell.start("migrate", "--version", "1", "--ttl", "600", "--", "sleep", "600")
    eventually(lambda: outcomes(dsn) == [None], "the run")
    ((token,),) = query(dsn, "SELECT token FROM dblock.distributed_locks")
    dump = tmp_path / "dump.sql"
    subprocess.run([program("pg_dump"), "-d", dsn, "-f", str(dump)], check=True)
    subprocess.run(psql(bare_dsn, dump), check=True, stdout=subprocess.DEVNULL)
    assert outcomes(bare_dsn) == [None]
    done = shell.run("migrate", "--version", "1", "--timeout", "5", "--", "true", dsn=bare_dsn)
    assert done.code == 0, done.err
    assert outcomes(bare_dsn) == ["killed", "succeeded"]
    ((later,),) = query(bare_dsn, "SELECT token FROM dblock.distributed_locks")
    assert later > token
    running.terminate()
    assert running.wait(60) == 143

"""Programs in other languages contend with Python for one lock: one holder at a time, one queue, one order of tokens.

They use the clients of docs/languages, and each records its history by itself. The checkers judge the joint history.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import psycopg
import pytest

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
from tests.robustness.languages.programs import ROOT, clock_offset, command, skip_without, variables
from tests.robustness.traffic.environment import WITNESS
from tests.robustness.traffic.workloads.queue import TICKETS
from tests.support.machine import measured, too_late_to_renew
from tests.support.servers import tcp_server

# The compilers take a while, if other programs want the machine too.
pytestmark = [pytest.mark.second_stage, pytest.mark.timeout(300)]

LOCK, TTL = "languages", 1
ENOUGH = 10
"""Turns of each program, at least."""
RELEASE = re.compile('"kind": ?"release"')
CHECKERS = (linearizability, token_order, loss, queue_order, durability)


@pytest.fixture
def own_dsn() -> Iterator[str]:
    with tcp_server() as dsn:
        yield dsn


def contend(dsn: str, folder: Path, languages: dict[str, str], seconds: float, freeze: float = 0) -> History:
    """Let a program of each language contend, and return the joint history with the server's own records.

    With `freeze`, also stop each program in turn for this time.
    """
    histories, stop = folder / "histories", folder / "stop"
    histories.mkdir()
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(WITNESS)
        owner.execute(TICKETS)
    programs: dict[str, subprocess.Popen[str]] = {}
    before = clock_offset()
    try:
        for name, language in languages.items():
            arguments = [str(histories / f"{name}.jsonl"), LOCK, str(stop), str(TTL), name.removeprefix("python ")]
            with open(folder / f"{name}.err", "w") as errors:
                programs[name] = subprocess.Popen(
                    [*command(language, "contend"), *arguments],
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
            _freeze_in_turn(dsn, programs, freeze, histories)
        time.sleep(seconds)
        _wait_for_turns(histories, programs)
        stop.touch()
        for name, program in programs.items():
            assert program.wait(60) == 0, f"{name}: {(folder / f'{name}.err').read_text()}"
    finally:
        for program in programs.values():
            program.kill()
            program.communicate()
    if abs(clock_offset() - before) > 1000:
        pytest.skip("the clock of this machine was set during the run, and bash has no other")
    _record_server(dsn, Recorder(histories / "server.jsonl"))
    return History.read(histories)


def _wait_for_turns(histories: Path, programs: Iterable[str]) -> None:
    """Return once each program has had enough turns to compare them: a slow machine gets up to a minute more."""
    ends = time.monotonic() + 60
    for name in programs:
        while len(RELEASE.findall((histories / f"{name}.jsonl").read_text())) < ENOUGH and time.monotonic() < ends:
            time.sleep(0.1)


def _freeze_in_turn(dsn: str, programs: dict[str, subprocess.Popen[str]], seconds: float, histories: Path) -> None:
    recorder = Recorder(histories / "faults.jsonl")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name, program in programs.items():
            deadline = time.monotonic() + 30
            while not _freeze_holder(connection, histories / f"{name}.jsonl", program, seconds, recorder):
                assert time.monotonic() < deadline, f"{name} was never seen to hold the lock"
                time.sleep(0.002)
    recorder.close()


def _freeze_holder(
    connection: psycopg.Connection, history: Path, program: subprocess.Popen[str], seconds: float, recorder: Recorder
) -> bool:
    """Stop the program if it knows that it holds the lock, and return whether it did not release the lock then."""
    token, expires = _held_by(connection, program)
    if token is None or str(token) not in history.read_text():
        return False
    before = time.monotonic()
    program.send_signal(signal.SIGSTOP)
    try:
        # A release or a renewal that was sent may arrive at any time, so only the end of the lease tells.
        while (held := _held_by(connection, program))[0] == token:
            expires = held[1]
            time.sleep(0.01)
        if time.time() < expires:
            return False
        time.sleep(max(before + seconds - time.monotonic(), 0))
    finally:
        program.send_signal(signal.SIGCONT)
    recorder.record("fault", "freeze-past", called=before, victim=history.stem, seconds=seconds, token=token)
    return True


def _held_by(connection: psycopg.Connection, program: subprocess.Popen[str]) -> tuple[int | None, float]:
    """Return the token under which the program holds the lock, and when its lease expires."""
    row = connection.execute(
        "SELECT token, date_part('epoch', expires_at) FROM dblock.holder(%s) WHERE holder LIKE %s",
        [LOCK, f"% pid {program.pid}"],
    ).fetchone()
    return (None, 0.0) if row is None else (int(row[0]), float(row[1]))


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
        pytest.param(CROWD, 15, id="node and bash"),
        pytest.param({"python sync": "python", "go": "go", "java": "java"}, 6, id="go and java"),
        pytest.param(CROWD | {"go": "go", "java": "java"}, 60, id="all", marks=pytest.mark.nightly),
    ],
)
def test_programs_in_several_languages_share_one_lock_and_one_queue(
    request: pytest.FixtureRequest, own_dsn: str, tmp_path: Path, crowd: dict[str, str], seconds: float
) -> None:
    skip_without(*crowd.values())
    with measured() as lateness:
        history = contend(own_dsn, tmp_path, crowd, seconds)
        late = lateness()
    grants = Counter(one.process for one in history.of("acquire") if one.ok)
    print(dict(grants), f"{len(history)} operations")
    assert set(grants) == set(crowd)
    judges = [*CHECKERS]
    if not too_late_to_renew(late, TTL):
        judges.append(kept_leases)
    if request.node.get_closest_marker("nightly"):
        judges.append(hand_over)  # judges durations, and beside other tests they say little
    for checker in judges:
        finding = checker.check(history)
        assert finding.checked, finding.checker
        assert finding.violations == []
    if kept_leases in judges:
        # The queue serves all in turn. A waiter that gave up, and one that polls, has fewer turns.
        assert min(grants.values()) > max(grants.values()) / 3


@pytest.mark.parametrize(
    "crowd",
    [
        pytest.param(CROWD, id="node and bash"),
        pytest.param({"python sync": "python", "go": "go", "java": "java"}, id="go and java"),
    ],
)
def test_programs_that_are_stopped_past_their_lease_notice_the_loss(
    own_dsn: str, tmp_path: Path, crowd: dict[str, str]
) -> None:
    skip_without(*crowd.values())
    history = contend(own_dsn, tmp_path, crowd, 1, freeze=TTL * 1.5)
    assert [one.details["victim"] for one in history.faults] == [*crowd]
    for fault in history.faults:
        # The victim finds the lease lost before it works on, or at the latest when it releases the lock.
        ends = [one for one in history.of("loss", "release") if one.token == fault.token]
        assert ends
        assert all(one.kind == "loss" or one.details["freed"] is False for one in ends)
    for checker in CHECKERS:
        finding = checker.check(history)
        assert finding.checked, finding.checker
        assert finding.violations == []

"""Elections under faults: killed, frozen and cut-off leaders, errors at every call, observers that lose the server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock import Leader, Vacancy
from dblock._core.effects import Call
from dblock._runtime.error_mapping import translate
from tests.support.candidates import ELECTION, LOCK, TABLES
from tests.support.eventually import eventually, eventually_async
from tests.support.machine import measured
from tests.support.proxy import Proxy
from tests.support.servers import private_server
from tests.support.timings import timings_with
from tests.support.warm_start import Program

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0


class Observer:
    """Observes the election from its first term, in a thread."""

    def __init__(self, dsn: str, name: str = ELECTION, **changes: float) -> None:
        self.client = dblock.Client(dsn, patience=2.0, timings=timings_with(**changes))
        self.seen: list[Leader | Vacancy] = []
        self._name = name
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(dblock.ClientClosed):
            for event in self.client.election(self._name).observe(0):
                self.seen.append(event)

    def tokens(self) -> list[tuple[int, str]]:
        return [(one.token, "began" if isinstance(one, Leader) else "ended") for one in list(self.seen)]

    def has_seen(self, events: int) -> bool:
        return len(self.seen) >= events

    def close(self) -> None:
        self.client.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def logged(owner: psycopg.Connection) -> list[tuple[int, str]]:
    """Return what an observer must have seen."""
    rows = owner.execute("SELECT token, ended_at IS NOT NULL FROM dblock.terms ORDER BY token").fetchall()
    return [(token, what) for token, ended in rows for what in (("began", "ended") if ended else ("began",))]


class Processes:
    """Processes with candidates, each behind a proxy of its own."""

    def __init__(self, dsn: str, stack: ExitStack, candidates: int, ttl: float) -> None:
        self._dsn, self._stack, self._candidates, self._ttl = dsn, stack, candidates, ttl
        self._started = 0
        self.proxies: dict[str, Proxy] = {}
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> None:
        name = f"p{self._started}"
        self._started += 1
        folder = None
        if str(conninfo.conninfo_to_dict(self._dsn).get("host", "")).startswith("/"):
            # On a Unix socket too, neither end can detect the proxy, and clients have a presence.
            folder = Path(tempfile.mkdtemp(prefix="dblock-proxy-"))
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.proxies[name] = self._stack.enter_context(Proxy(self._dsn, folder))
        config = {
            "dsn": self.proxies[name].dsn,
            "direct": self._dsn,
            "process": name,
            "candidates": self._candidates,
            "ttl": self._ttl,
        }
        process = Program(
            [sys.executable, "-m", "tests.support.candidates", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.running[name] = process
        self._stack.callback(self._end, process)

    def wait_until_ready(self) -> None:
        for process in self.running.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def strike(self, name: str, how: str) -> None:
        process = self.running[name]
        if how == "kill":
            process.kill()
            process.wait()
            del self.running[name]
            self.start()
            assert self.running[f"p{self._started - 1}"].stdout.readline() == "ready\n"  # type: ignore[union-attr]
        elif how == "freeze":
            process.send_signal(signal.SIGSTOP)
            time.sleep(self._ttl * 1.5)
            process.send_signal(signal.SIGCONT)
        else:
            self.proxies[name].fall_silent()
            time.sleep(self._ttl * 1.5)
            self.proxies[name].flow()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "strikes",
    [pytest.param(5, marks=pytest.mark.second_stage), pytest.param(100, marks=pytest.mark.nightly)],
)
def test_no_two_terms_are_believed_or_accepted_at_once(dsn: str, owner: psycopg.Connection, strikes: int) -> None:
    """20 candidates in 5 processes. Each strike kills, freezes or cuts off the process that leads."""
    owner.execute(TABLES.encode())
    rng = random.Random(strikes)
    with ExitStack() as stack:
        observer = Observer(dsn)
        stack.callback(observer.close)
        processes = Processes(dsn, stack, candidates=4, ttl=1.5)
        for _ in range(5):
            processes.start()
        processes.wait_until_ready()
        client = stack.enter_context(dblock.Client(dsn))
        election = client.election(ELECTION)
        for strike in range(strikes):
            leader: Leader = eventually(
                lambda: _established(election, owner, processes), "a leader has written", PATIENCE
            )
            processes.strike(leader.holder.partition(".")[0], ("kill", "freeze", "cut")[strike % 3])
            eventually(functools.partial(_follows, election, leader.token), "a new leader", PATIENCE)
            time.sleep(rng.uniform(0, 0.1))
        for process in processes.running.values():
            assert process.stdin is not None
            process.stdin.close()
        eventually(
            lambda: all(one.poll() is not None for one in processes.running.values()), "the end of the candidates"
        )
        eventually(lambda: election.leader() is None, "no term is left")
        eventually(lambda: observer.tokens() == logged(owner), "the observer has seen the end")
    rows = owner.execute("SELECT token, since, until FROM public.believed ORDER BY token").fetchall()
    assert len(rows) >= strikes
    # A term with one moment of belief has no time between two of them.
    believed = [(token, since, until) for token, since, until in rows if since < until]
    for (token, _, end), (later, begin, _) in itertools.pairwise(believed):
        assert end <= begin, f"the terms {token} and {later} were believed at once, for {end - begin:.3f} s"
    accepted = [token for (token,) in owner.execute("SELECT token FROM public.accepted ORDER BY number").fetchall()]
    assert len(accepted) >= strikes
    assert accepted == sorted(accepted), "a fence accepted an earlier term after a later one"


def _established(election: dblock.Election, owner: psycopg.Connection, processes: Processes) -> Leader | None:
    """Return the leader if its process runs and its body has written.

    A process that was killed may have sent the request that begins a term before. The term is then in the log until the
    server has noticed the end of the process.
    """
    leader = election.leader()
    if leader is None or leader.holder.partition(".")[0] not in processes.running:
        return None
    written = owner.execute("SELECT FROM public.accepted WHERE token = %s LIMIT 1", [leader.token]).fetchall()
    return leader if written else None


def _follows(election: dblock.Election, token: int) -> bool:
    now = election.leader()
    return now is not None and now.token > token


def terms_of(client: dblock.Client, count: int) -> None:
    election = client.election(ELECTION)
    for _ in range(count):
        with election.lead():
            pass


@pytest.mark.timeout(900)
@pytest.mark.parametrize("reconnects", [3, pytest.param(100, marks=pytest.mark.second_stage)])
def test_observer_misses_nothing_over_reconnects(dsn: str, owner: psycopg.Connection, reconnects: int) -> None:
    with Proxy(dsn) as proxy, dblock.Client(dsn) as client:
        observer = Observer(proxy.dsn, observe_interval=0.02)
        for _ in range(reconnects):
            # Each connection is used before it is cut: the observer sees something that is new.
            before = len(observer.seen)
            terms_of(client, 2)
            eventually(functools.partial(observer.has_seen, before + 1), "something was seen")
            eventually(proxy.cut, "a connection is open")
        terms_of(client, 1)
        eventually(lambda: observer.tokens() == logged(owner), "every event was seen")
        assert len(observer.seen) == 2 * (2 * reconnects + 1)
        observer.close()


@pytest.mark.second_stage
def test_observer_misses_nothing_over_a_restart_of_the_server() -> None:
    with private_server(installed=True) as server, dblock.Client(server.url) as client:
        observer = Observer(server.url)
        terms_of(client, 3)
        eventually(lambda: len(observer.seen) == 6, "six events were seen")
        server.stop(signal.SIGINT)
        time.sleep(1.0)
        server.start()
        eventually(lambda: _leads(client), "the client has reconnected")
        with psycopg.connect(server.url, autocommit=True) as owner:
            eventually(lambda: observer.tokens() == logged(owner), "every event was seen")
        assert len(observer.seen) >= 8
        observer.close()


def _leads(client: dblock.Client) -> bool:
    try:
        terms_of(client, 1)
    except dblock.DatabaseError:
        return False
    return True


STATES = ["08006", "22023", "25006", "40001", "40P01", "42501", "53300", "55P03", "57014", "57P01", "58000", "XX000"]
"""One SQLSTATE of each class that a call may raise."""


class Injector:
    """Makes calls of a client fail: before they are sent, or after they were carried out."""

    def __init__(self, seed: int, share: float = 0.3) -> None:
        self.count = 0
        self.on = True
        self._rng = random.Random(seed)
        self._share = share

    def error(self) -> dblock.DblockError | None:
        """Return an error to raise, None for none."""
        if not self.on or self._rng.random() > self._share:
            return None
        self.count += 1
        state = self._rng.choice(STATES)
        return translate(psycopg.errors.lookup(state)(f"injected {state}"), "dblock")

    def lost_reply(self) -> dblock.DblockError | None:
        if not self.on or self._rng.random() > self._share / 2:
            return None
        self.count += 1
        lost = dblock.Unavailable("injected: the reply was lost")
        lost.may_be_done = True
        return lost


@pytest.mark.second_stage
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "errors", [20, pytest.param(100, marks=pytest.mark.second_stage), pytest.param(1000, marks=pytest.mark.nightly)]
)
def test_candidate_campaigns_again_after_every_error(dsn: str, owner: psycopg.Connection, errors: int) -> None:
    with dblock.Client(dsn, timings=timings_with(longest_election_pause=0.05)) as client:
        election = client.election(ELECTION, ttl=2)
        injector = Injector(errors)
        tokens: list[int] = []

        def body(term: dblock.Term) -> str | None:
            tokens.append(term.token)
            if not injector.on:
                return "calm"
            election.resign()
            return None

        client.election("warm").leader()
        runner: Any = client._runtime.runner
        original = runner._call

        def call(asked: Call, *trouble: Any) -> Any:
            if (error := injector.error()) is not None:
                raise error
            row = original(asked, *trouble)
            if (error := injector.lost_reply()) is not None:
                raise error
            return row

        runner._call = call
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(election.run(body)))
        thread.start()
        eventually(lambda: injector.count >= errors or not thread.is_alive(), "the errors", 1000)
        assert thread.is_alive(), "the candidate gave up"
        injector.on = False
        thread.join(PATIENCE)
        assert results == ["calm"], "the candidate does not campaign any more"
        runner._call = original
        assert tokens == sorted(set(tokens))
        eventually(lambda: election.leader() is None, "no term is left")
        eventually(lambda: client.lock(LOCK).holder() is None, "the lock is free")
        assert owner.execute("SELECT count(*) FROM lock_tickets").fetchall() == [(0,)]


@pytest.mark.parametrize("answered", [False, True], ids=["before the reply", "with the reply"])
async def test_campaign_cancelled_at_each_call_leaks_nothing(
    dsn: str, owner: psycopg.Connection, answered: bool
) -> None:
    async with dblock.AsyncClient(dsn, patience=PATIENCE) as client:
        runtime: Any = client._runtime
        original = runtime.run

        async def vacant() -> bool:
            return await client.election(ELECTION).leader() is None and await client.lock(LOCK).holder() is None

        completed = step = 0
        while not completed:
            step += 1
            election = client.election(ELECTION)
            calls = 0

            async def campaign_and_end(election: dblock.AsyncElection = election) -> None:
                async with election.lead():
                    pass

            async def run(flow: Any, step: int = step) -> Any:
                nonlocal calls
                calls += 1
                if calls != step:
                    return await original(flow)
                if answered:
                    await original(flow)
                current = asyncio.current_task()
                assert current is not None
                current.cancel()
                return await asyncio.sleep(0)

            runtime.run = run
            task = asyncio.ensure_future(campaign_and_end())
            with contextlib.suppress(asyncio.CancelledError):
                await task
                completed = step
            runtime.run = original
            await eventually_async(vacant, f"the term is over, cancelled at call {step}")
            assert owner.execute("SELECT count(*) FROM lock_tickets").fetchall() == [(0,)]
        assert completed >= 4, "a campaign joins, acquires, begins and ends"


@pytest.mark.second_stage
@pytest.mark.alone
def test_expired_term_found_at_the_start_delays_nothing(dsn: str, owner: psycopg.Connection) -> None:
    """A new client finds a term whose process is gone, and whose lease of 30 s was not renewed."""
    times = []
    for _ in range(7):
        owner.execute("SELECT begin_term('e', token) FROM try_acquire('election:e', '30 s', 'gone')")
        owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
        with dblock.Client(dsn, patience=PATIENCE) as client:
            election = client.election(ELECTION)
            began = time.monotonic()
            with election.lead():
                times.append(time.monotonic() - began)
    # The quickest: whatever else the machine does can only add to it.
    assert min(times) < 0.2, times


@pytest.mark.second_stage
@pytest.mark.alone
def test_resigned_leader_is_followed_within_milliseconds(dsn: str) -> None:
    gaps: list[float] = []
    released: list[float] = []
    rounds = 100

    def body(election: dblock.Election) -> Callable[[dblock.Term], str | None]:
        def lead(term: dblock.Term) -> str | None:
            now = time.monotonic()
            if released:
                gaps.append(now - released[-1])
            if len(gaps) >= rounds:
                return "done"
            time.sleep(0.05)  # the others wait in the queue by then
            election.resign()
            released.append(time.monotonic())
            return None

        return lead

    with ExitStack() as stack, measured() as lateness:
        threads = []
        elections = []
        for number in range(3):
            client = stack.enter_context(dblock.Client(dsn, holder=f"c{number}"))
            election = client.election(ELECTION)
            elections.append(election)
            threads.append(threading.Thread(target=election.run, args=(body(election),)))
        for thread in threads:
            thread.start()
        eventually(lambda: len(gaps) >= rounds, "all rounds", PATIENCE)
        for election in elections:
            election.stop()
        for thread in threads:
            thread.join(PATIENCE)
        late = lateness()
    gaps.sort()
    assert statistics.median(gaps) < 0.010 + late, gaps
    assert gaps[int(len(gaps) * 0.99) - 1] < 0.100 + 4 * late, gaps


@pytest.mark.second_stage
@pytest.mark.usefixtures("needs_presence")
def test_killed_leader_is_followed_within_half_a_second(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute(TABLES.encode())
    with ExitStack() as stack:
        processes = Processes(dsn, stack, candidates=1, ttl=30.0)
        processes.start()
        processes.wait_until_ready()
        client = stack.enter_context(dblock.Client(dsn))
        before: Leader = eventually(client.election(ELECTION).leader, "a leader")
        lateness = stack.enter_context(measured())
        led: list[float] = []

        def follow() -> None:
            with client.election(ELECTION).lead():
                led.append(time.monotonic())

        thread = threading.Thread(target=follow)
        thread.start()
        eventually(client.lock(LOCK).queue, "a candidate waits")
        time.sleep(0.5)
        killed = time.monotonic()
        processes.running["p0"].kill()
        thread.join(PATIENCE)
        assert led[0] - killed < 0.5 + 4 * lateness(), led[0] - killed
        assert ("died",) in owner.execute("SELECT how FROM terms WHERE token = %s", [before.token]).fetchall()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "freezes", [5, pytest.param(50, marks=pytest.mark.second_stage), pytest.param(1000, marks=pytest.mark.nightly)]
)
def test_frozen_leader_commits_nothing_after_the_next_term(dsn: str, owner: psycopg.Connection, freezes: int) -> None:
    """A leader is frozen past its lease before its fence, or between its fence and its commit.

    Its deadline is set back instead of waiting for it. The fence decides, whatever the leader believes.
    """
    owner.execute("CREATE TABLE public.written (number bigserial, token bigint)")
    rng = random.Random(freezes)
    stale = 0
    with dblock.Client(dsn) as first, dblock.Client(dsn) as second, psycopg.connect(dsn) as connection:
        old, new = first.election(ELECTION), second.election(ELECTION)
        for _ in range(freezes):
            fenced_first = rng.random() < 0.5
            with pytest.raises(dblock.LeaseLost), old.lead() as term:
                if fenced_first:
                    term.fence(connection)
                owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = %s", [LOCK])
                if fenced_first:
                    with pytest.raises(dblock.LockTimeout):
                        new.campaign(0)
                else:
                    with new.lead(timeout=PATIENCE) as later:
                        owner.execute("INSERT INTO public.written (token) VALUES (%s)", [later.token])
                try:
                    if not fenced_first:
                        term.fence(connection)
                        stale += 1
                    connection.execute("INSERT INTO public.written (token) VALUES (%s)", [term.token])
                    connection.commit()
                except dblock.LeaseLost:
                    connection.rollback()
    assert stale == 0
    tokens = [token for (token,) in owner.execute("SELECT token FROM public.written ORDER BY number").fetchall()]
    assert tokens == sorted(tokens)
    assert len(tokens) == freezes

"""Scheduled functions: one run per slot over all hosts, with an outcome that all hosts can read."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

import dblock
from dblock._core.effects import Call
from dblock._core.slots import SlotFlows
from dblock.recipes.schedules import cron
from dblock.recipes.schedules.schedule import LONGEST_WAIT, slots_of
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.still_clock import NOON, StillClock

WEEK = 7 * 86_400
"""Seconds between the slots of a test on the real clock, so that it meets no second slot, as it would on the hour."""


@pytest.fixture
def clock(dsn: str) -> Iterator[StillClock]:
    clock = StillClock(dsn, NOON)
    yield clock
    clock.close()


@pytest.fixture
def other(dsn: str) -> Iterator[dblock.Client]:
    """A second host."""
    with dblock.Client(dsn) as client:
        yield client


def outcomes(owner: psycopg.Connection, name: str = "job") -> Counter[str]:
    """Return how many slots of a schedule have each outcome."""
    rows = owner.execute(
        "SELECT coalesce(outcome, 'running'), sum(slots)::int FROM slot_runs WHERE name = %s GROUP BY 1", [name]
    ).fetchall()
    return Counter(dict(rows))


def test_call_runs_a_slot_once_for_all_hosts(client: dblock.Client, other: dblock.Client, clock: StillClock) -> None:
    ran: list[datetime] = []

    def job(greeting: str) -> str:
        run = dblock.current_run()
        ran.append(run.slot)
        assert (run.name, run.number) == ("job", 1)
        assert run.token == run.lease.token
        assert run.deadline > run.slot
        assert run.remaining() > 0
        assert not run.lost.is_set()
        return f"{greeting} world"

    here, there = client.once("job", every=3600)(job), other.once("job", every=3600)(job)
    assert here("hello") == "hello world"
    assert there("hello") is dblock.SKIPPED
    assert here("hello") is dblock.SKIPPED
    clock.at("13:00:05")
    assert there("bye") == "bye world"
    assert ran == [NOON, NOON + timedelta(hours=1)]
    assert not dblock.SKIPPED
    with pytest.raises(dblock.DblockError, match="no current run"):
        dblock.current_run()


def test_failure_is_recorded_and_raised_and_not_run_again(
    client: dblock.Client, clock: StillClock, owner: psycopg.Connection
) -> None:
    @client.once("job", every=3600, delivery="at-least-once")
    def job() -> None:
        raise RuntimeError("disk is full")

    with pytest.raises(RuntimeError, match="disk is full"):
        job()
    assert job() is dblock.SKIPPED
    row = owner.execute("SELECT outcome, error, number FROM slot_runs").fetchall()
    assert row == [("failed", "RuntimeError: disk is full", 1)]


async def test_coroutine_runs_once_and_is_cancelled_when_its_lease_is_lost(
    dsn: str, clock: StillClock, owner: psycopg.Connection
) -> None:
    async with dblock.AsyncClient(dsn) as client:
        cancelled = []

        @client.once("job", every=3600, ttl=10)
        async def job(forever: bool) -> int:
            try:
                if forever:
                    clock.advance(31)  # the next renewal finds that the lease has expired
                    await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(dblock.current_run().slot)
                raise
            return dblock.current_run().token

        assert await job(False)
        assert await job(False) is dblock.SKIPPED
        clock.at("13:00")
        with pytest.raises(dblock.LeaseLost):
            await job(True)
        assert cancelled == [NOON + timedelta(hours=1)]
        clock.at("14:00")
        assert await job(False)
    assert outcomes(owner) == {"succeeded": 2, "died": 1}


def test_call_whose_lease_was_lost_raises_although_its_function_returned(
    client: dblock.Client, owner: psycopg.Connection
) -> None:
    @client.once("job", delay=60)
    def job() -> str:
        owner.execute("UPDATE distributed_locks SET expires_at = '-infinity', released_at = clock_timestamp()")
        return "done"

    with pytest.raises(dblock.LeaseLost):
        job()
    assert outcomes(owner) == {"running": 1}, "the next host records that the run died"


def test_run_does_not_trust_its_lease_after_its_client_was_closed(dsn: str) -> None:
    client, left = dblock.Client(dsn), []

    @client.once("job", delay=60)
    def job() -> None:
        client.close()
        left.append(dblock.current_run().remaining())

    with pytest.raises(dblock.ClientClosed):
        job()
    assert left == [0]


HELD = "SELECT count(*)::int FROM distributed_locks WHERE expires_at > clock_timestamp()"


async def test_call_cancelled_with_the_reply_of_its_claim_gives_the_grant_back(
    dsn: str, owner: psycopg.Connection
) -> None:
    async with dblock.AsyncClient(dsn) as client:
        runtime: Any = client._runtime
        original = runtime.run

        async def job() -> None:
            pytest.fail("the function was called")

        async def run(flow: Any) -> Any:
            runtime.run = original
            await original(flow)
            assert owner.execute(HELD).fetchone() == (1,)
            raise asyncio.CancelledError

        runtime.run = run
        with pytest.raises(asyncio.CancelledError):
            await client.once("job", delay=60)(job)()
        assert owner.execute(HELD).fetchone() == (0,)


def test_call_interrupted_with_the_reply_of_its_claim_gives_the_grant_back(
    client: dblock.Client, owner: psycopg.Connection
) -> None:
    runtime: Any = client._runtime
    original = runtime.run

    def run(flow: Any) -> Any:
        runtime.run = original
        original(flow)
        assert owner.execute(HELD).fetchone() == (1,)
        raise KeyboardInterrupt

    runtime.run = run
    with pytest.raises(KeyboardInterrupt):
        client.once("job", delay=60)(lambda: pytest.fail("the function was called"))()
    assert owner.execute(HELD).fetchone() == (0,)


def test_late_write_of_a_run_whose_lease_is_over_is_refused(
    client: dblock.Client, other: dblock.Client, clock: StillClock, owner: psycopg.Connection
) -> None:
    tokens = []

    @other.once("job", every=3600, delivery="at-least-once")
    def takes_over() -> None:
        tokens.append(dblock.current_run().token)

    @client.once("job", every=3600, delivery="at-least-once", at_most=30)
    def frozen() -> None:
        run = dblock.current_run()
        tokens.append(run.token)
        clock.advance(31)
        takes_over()
        assert tokens[1] > tokens[0]
        with psycopg.connect(other._runtime.settings.target.conninfo()) as connection:
            with pytest.raises(dblock.LeaseLost):
                run.lease.assert_held(connection)
            connection.rollback()

    with pytest.raises(dblock.LeaseLost):
        frozen()
    assert outcomes(owner) == {"died": 1, "succeeded": 1}


def test_all_missed_slots_run_in_order_in_one_call(
    client: dblock.Client, clock: StillClock, owner: psycopg.Connection
) -> None:
    ran: list[int] = []

    @client.once("job", every=3600, catch_up="all")
    def job() -> int:
        ran.append(dblock.current_run().slot.hour)
        return ran[-1]

    assert job() == 12
    clock.at("18:20")
    assert job() == 18
    assert ran == [12, 13, 14, 15, 16, 17, 18]


@pytest.mark.second_stage
@pytest.mark.alone
@pytest.mark.parametrize(("catch_up", "runs"), [("none", 1), pytest.param("latest", 2, marks=pytest.mark.second_stage)])
def test_ten_thousand_missed_slots_of_a_cron_expression_are_decided_within_a_second(
    client: dblock.Client, clock: StillClock, owner: psycopg.Connection, catch_up: str, runs: int
) -> None:
    ran = []
    job = client.once("job", cron="* * * * *", catch_up=catch_up, grace=1)(
        lambda: ran.append(dblock.current_run().slot)
    )
    job()
    clock.advance(10_000 * 60 + 30)
    began = time.process_time()
    job()
    assert time.process_time() - began < 1
    assert len(ran) == runs
    assert outcomes(owner)["missed"] == 10_000 + 1 - runs


def test_loser_costs_one_query(client: dblock.Client, other: dblock.Client, clock: StillClock) -> None:
    slots = slots_of(client, "job", every=3600)
    claim, run = slots.claim()
    assert run is not None
    assert claim.decision == "run"
    for decision in ("running", "none"):
        calls = []
        flow = SlotFlows(other._runtime.flows, slots.definition).claim("0" * 32)
        effect = next(flow)
        while True:
            assert isinstance(effect, Call)
            calls.append(effect)
            try:
                effect = flow.send(other._runtime.run(_one(effect)))
            except StopIteration as done:
                assert done.value.decision == decision
                break
        assert len(calls) == 1
        slots.end(run, "succeeded")


def _one(call: Call) -> Any:
    return (yield call)


def test_queued_call_starts_when_the_run_before_it_ends(
    client: dblock.Client, other: dblock.Client, clock: StillClock, owner: psycopg.Connection
) -> None:
    first = slots_of(client, "job", every=3600, overlap="queue", ttl=86_400)
    _, run = first.claim()
    assert run is not None
    clock.at("13:00")
    job = other.once("job", every=3600, overlap="queue", ttl=86_400)(lambda: dblock.current_run().slot)
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(job)
        eventually(lambda: outcomes(owner)["queued"] == 1)
        assert not queued.done()
        first.end(run, "succeeded")
        assert queued.result(20) == NOON + timedelta(hours=1)


def test_loop_runs_each_slot_until_it_is_stopped_and_survives_failures(
    client: dblock.Client, other: dblock.Client, owner: psycopg.Connection
) -> None:
    stop = threading.Event()
    ran: list[datetime] = []

    def job() -> None:
        ran.append(dblock.current_run().slot)
        if len(ran) == 2:
            raise RuntimeError("no")
        if len(ran) >= 4:
            stop.set()

    with ThreadPoolExecutor(2) as pool:
        loops = [pool.submit(one.once("job", every=0.25, catch_up="all")(job).run, stop) for one in (client, other)]
        for loop in loops:
            loop.result(60)
    assert len(set(ran)) == len(ran)
    assert outcomes(owner)["failed"] == 1


async def test_asyncio_loop_runs_until_it_is_stopped(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        stop, ran = asyncio.Event(), []

        @client.once("job", every=0.25, catch_up="all")
        async def job() -> None:
            ran.append(dblock.current_run().slot)
            if len(ran) == 2:
                stop.set()

        await asyncio.wait_for(job.run(stop), 60)
        assert len(set(ran)) == 2


def test_loop_ends_when_its_client_is_closed(dsn: str) -> None:
    ran = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with dblock.Client(dsn) as client:
            loop = pool.submit(client.once("job", every=0.25, catch_up="latest")(ran.set).run)
            assert ran.wait(60)
        loop.result(60)


async def test_asyncio_loop_ends_when_its_client_is_closed(dsn: str) -> None:
    ran = asyncio.Event()

    async def job() -> None:
        ran.set()

    async with dblock.AsyncClient(dsn) as client:
        loop = asyncio.create_task(client.once("job", every=0.25, catch_up="latest")(job).run())
        await asyncio.wait_for(ran.wait(), 60)
    await asyncio.wait_for(loop, 60)


def test_loop_pauses_after_a_claim_that_fails(
    client: dblock.Client, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.execute("ALTER FUNCTION claim_slot RENAME TO claim_away")
    stop = threading.Event()
    waits: list[float | None] = []

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds)
        if len(waits) == 3:
            stop.set()
        return stop.is_set()

    monkeypatch.setattr(stop, "wait", wait)
    client.once("job", every=0.25)(lambda: None).run(stop)
    assert waits == [LONGEST_WAIT] * 3
    assert caplog.text.count("could not be asked, retrying") == 3


CHANGES = [
    ("Europe/Berlin", datetime(2026, 3, 29, tzinfo=timezone.utc)),
    ("Europe/Berlin", datetime(2026, 10, 25, tzinfo=timezone.utc)),
    pytest.param("America/New_York", datetime(2026, 3, 8, tzinfo=timezone.utc), marks=pytest.mark.second_stage),
    pytest.param("America/New_York", datetime(2026, 11, 1, tzinfo=timezone.utc), marks=pytest.mark.second_stage),
]


@pytest.mark.parametrize(("zone", "day"), CHANGES)
def test_daylight_saving_change_neither_drops_nor_repeats_a_slot(zone: str, day: datetime) -> None:
    begin, end = day - timedelta(days=2), day + timedelta(days=2)

    def planned(expression: str, after: datetime, until: datetime) -> list[datetime]:
        plan = cron.slots(expression, ZoneInfo(zone), after, until)
        return [moment for slot in plan if (moment := datetime.fromtimestamp(slot, timezone.utc)) <= until]

    minutely, daily = planned("* * * * *", begin, end), planned("30 2 * * *", begin, end)
    assert len(minutely) == len(set(minutely)) == 96 * 60
    per_day = Counter(moment.astimezone(ZoneInfo(zone)).date() for moment in daily)
    assert set(per_day.values()) == {1}
    assert len(per_day) in (4, 5)
    # A plan that begins in the middle of the change continues the same slots.
    for after in (day + timedelta(minutes=25 * number) for number in range(-2, 20)):
        until = after + timedelta(hours=1)
        for expression, whole in (("* * * * *", minutely), ("30 2 * * *", daily)):
            assert planned(expression, after, until) == [moment for moment in whole if after < moment <= until]


def test_plan_is_shared_and_a_daily_job_runs_once_on_the_day_of_the_change(
    client: dblock.Client, other: dblock.Client, clock: StillClock
) -> None:
    ran: list[str] = []
    clock.set(datetime(2026, 10, 24, 12, 0, tzinfo=timezone.utc))
    jobs = [
        one.once("job", cron="30 2 * * *", tz="Europe/Berlin", catch_up="latest")(
            lambda: ran.append(f"{dblock.current_run().slot:%d %H:%M}")
        )
        for one in (client, other)
    ]
    for _ in range(48 * 2):
        for job in jobs:
            job()
        clock.advance(1800)
    assert ran == ["25 00:30", "26 01:30"]


def test_cron_without_its_package_says_what_to_install(client: dblock.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(dblock.ConfigurationError, match=r"pip install 'dblock\[cron\]'"):
        client.once("job", cron="* * * * *")


@pytest.mark.parametrize(
    "options",
    [{}, {"every": 1, "delay": 1}, {"every": 0}, {"every": 1, "tz": "UTC"}, {"cron": "x"}, {"cron": "* * * * * *"},
     {"cron": "* * * * *", "tz": "Nowhere"}, {"every": 1, "overlap": "x"}, {"every": 1, "catch_up": None},
     {"every": 1, "at_most": 0}, {"every": 1, "overlap": "allow", "at_least": 1}, {"every": "1"}],
)  # fmt: skip
def test_bad_option_is_refused_before_anything_is_sent(options: dict[str, Any]) -> None:
    with pytest.raises(dblock.InvalidArgument, match="'job'"):
        dblock.Client("host=nowhere").once("job", **options)


def test_function_of_the_other_kind_is_refused() -> None:
    async def coroutine() -> None: ...

    with pytest.raises(dblock.InvalidArgument, match=r"Use AsyncClient\.once"):
        dblock.Client("host=nowhere").once("job", every=1)(coroutine)
    with pytest.raises(dblock.InvalidArgument, match=r"Use Client\.once"):
        dblock.AsyncClient("host=nowhere").once("job", every=1)(lambda: None)  # type: ignore[arg-type,return-value]


def test_method_is_called_on_its_object(client: dblock.Client, clock: StillClock) -> None:
    class Reports:
        def __init__(self, title: str) -> None:
            self.title = title

        @client.once("job", every=3600)
        def build(self, suffix: str) -> str:
            return self.title + suffix

        @client.once("static", every=3600)
        @staticmethod
        def count() -> int:
            return 1

    reports = Reports("sales")
    assert reports.build.name == "job"
    assert reports.build("!") == "sales!"
    assert Reports("other").build("!") is dblock.SKIPPED
    assert reports.count() == 1
    assert repr(Reports.build) == "<Schedule 'job' of test_method_is_called_on_its_object.<locals>.Reports.build>"


async def test_coroutine_method_is_called_on_its_object(dsn: str, clock: StillClock) -> None:
    async with dblock.AsyncClient(dsn) as client:

        class Reports:
            @client.once("job", every=3600)
            async def build(self) -> str:
                return type(self).__name__

        assert await Reports().build() == "Reports"


def test_decorator_that_is_not_called_says_how_to_write_it() -> None:
    def function() -> None: ...

    with pytest.raises(dblock.InvalidArgument, match=r'Write @client\.once\("NAME", every=…\)'):
        dblock.Client("host=nowhere").once(function)  # type: ignore[arg-type]
    with pytest.raises(dblock.InvalidArgument, match="schedule 'job' decorates is not a function"):
        dblock.Client("host=nowhere").once("job", every=1)("text")  # type: ignore[arg-type]


def test_message_about_a_limit_has_units_that_people_read() -> None:
    with pytest.raises(dblock.InvalidArgument, match=r"every of schedule 'job' lies between 0\.1 s and 366 days"):
        dblock.Client("host=nowhere").once("job", every=0)
    with pytest.raises(dblock.InvalidArgument, match="at_least of schedule 'job' lies between 0 s and 24 h"):
        dblock.Client("host=nowhere").once("job", every=1, at_least=90_000)
    with pytest.raises(dblock.InvalidArgument, match=r"cannot be read \(bad minute\): '61 \* .*Write five fields"):
        dblock.Client("host=nowhere").once("job", cron="61 * * * *")


# Many sessions and processes.


@pytest.mark.second_stage
def test_two_hundred_callers_in_one_second_get_one_grant(dsn: str, owner: psycopg.Connection) -> None:
    connections = [psycopg.connect(dsn, autocommit=True) for _ in range(40)]
    try:
        claim = (
            "SELECT decision FROM dblock.claim_slot('job', every => '7 days', grace => '7 days', catch_up => 'latest')"
        )
        connections[0].execute(claim)
        owner.execute("UPDATE schedules SET since = since - interval '7 days'")
        owner.execute("DELETE FROM slot_runs; UPDATE distributed_locks SET expires_at = '-infinity'")
        owner.execute("UPDATE schedules SET decided_until = NULL, last_claimed_at = NULL")
        before = owner.execute("SELECT count(*) FROM lock_history").fetchone()
        with ThreadPoolExecutor(40) as pool:
            found = list(pool.map(lambda number: connections[number % 40].execute(claim).fetchone(), range(200)))
        assert Counter(row[0] for row in found if row) in ({"run": 1, "running": 199}, {"run": 1, "none": 199})
        assert before == owner.execute("SELECT count(*) FROM lock_history").fetchone()
        assert outcomes(owner)["running"] == 1
    finally:
        for connection in connections:
            connection.close()


def killed_at(step: int, dsn: str) -> bool:
    """Claim a slot in a child process that is killed at a step before its first instruction; return whether it was.

    A step is a line of the recipe, of the flows, or of what tracks the lease.
    """
    pid = os.fork()
    if pid == 0:
        try:
            client = dblock.Client(dsn, presence=None, patience=60)
            lines = 0

            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal lines
                if frame.f_code.co_filename.endswith(("schedule.py", "slots.py", "lease_state.py", "runtime.py")):
                    lines += event == "line"
                    if lines >= step:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace

            claimed = SlotFlows.claim_now

            def then_count(self: SlotFlows, attempt: str) -> Any:
                claim = yield from claimed(self, attempt)
                sys.settrace(trace)
                threading.settrace(trace)
                frame = sys._getframe()
                while frame is not None:
                    frame.f_trace = trace
                    frame = frame.f_back  # type: ignore[assignment]
                return claim

            SlotFlows.claim_now = then_count  # type: ignore[method-assign]
            weekly = client.once("job", every=WEEK, delivery="at-least-once", catch_up="latest", ttl=1.0)
            weekly(lambda: os._exit(0))()
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child neither died at the step nor passed it"
    return os.WIFSIGNALED(status)


def _is_second(job: Callable[[], object]) -> bool:
    return job() == 2


@pytest.mark.second_stage
def test_claimer_killed_at_any_step_loses_no_slot_and_marks_none_done(dsn: str, owner: psycopg.Connection) -> None:
    """The slot runs again under a new grant, whichever line the claimer reached."""
    step, kills = 1, 0
    definition = "every => '7 days', delivery => 'at-least-once', catch_up => 'latest'"
    owner.execute(f"SELECT claim_slot('job', {definition})".encode())
    while True:
        # As a new slot each time.
        owner.execute("DELETE FROM slot_runs")
        owner.execute("UPDATE schedules SET decided_until = NULL, last_claimed_at = NULL, last_ended_at = NULL")
        owner.execute("UPDATE schedules SET since = clock_timestamp() - interval '7 days'")
        owner.execute("UPDATE distributed_locks SET expires_at = '-infinity'")
        if not killed_at(step, dsn):
            break
        kills += 1
        assert "succeeded" not in outcomes(owner)
        with dblock.Client(dsn, patience=60) as client:
            weekly = client.once("job", every=WEEK, delivery="at-least-once", catch_up="latest")
            again = weekly(lambda: dblock.current_run().number)
            eventually(functools.partial(_is_second, again))
        assert outcomes(owner) == {"died": 1, "succeeded": 1}
        step += 15
    assert kills >= 4


def run_in_child(dsn: str, body: Callable[[dblock.Client], object]) -> int:
    """Start a host in a child process, and return its process number."""
    pid = os.fork()
    if pid == 0:
        try:
            body(dblock.Client(dsn))
        finally:
            os._exit(0)
    return pid


@pytest.mark.second_stage
@pytest.mark.usefixtures("needs_presence")
@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])
def test_slot_of_a_killed_runner_is_taken_over_within_a_second_or_not_at_all(
    dsn: str, owner: psycopg.Connection, delivery: str
) -> None:
    owner.execute("CREATE TABLE public.began (at timestamptz DEFAULT clock_timestamp(), number int, token bigint)")

    def host(client: dblock.Client) -> None:
        @client.once("job", every=WEEK, delivery=delivery, catch_up="latest", grace=WEEK)
        def job() -> None:
            run = dblock.current_run()
            with psycopg.connect(dsn) as connection:
                run.lease.assert_held(connection)
                connection.execute("INSERT INTO public.began (number, token) VALUES (%s, %s)", [run.number, run.token])
            time.sleep(60)

        job.run()

    owner.execute(f"SELECT claim_slot('job', every => '7 days', delivery => '{delivery}')".encode())
    owner.execute("DELETE FROM slot_runs; UPDATE schedules SET decided_until = NULL, last_claimed_at = NULL")
    owner.execute("UPDATE schedules SET since = since - interval '7 days'")
    owner.execute("UPDATE distributed_locks SET expires_at = '-infinity'")
    hosts = [run_in_child(dsn, host) for _ in range(3)]
    try:
        holder = "SELECT substring(holder FROM 'pid (\\d+)')::int FROM slot_runs WHERE outcome IS NULL"
        eventually(lambda: owner.execute("SELECT FROM public.began").fetchone() is not None)
        eventually(
            lambda: owner.execute("SELECT FROM distributed_locks WHERE presence IS NOT NULL").fetchone() is not None
        )
        time.sleep(0.5)
        running = owner.execute(holder).fetchone()
        assert running is not None
        with measured() as lateness:
            killed_at_moment = owner.execute("SELECT clock_timestamp()").fetchone()
            assert killed_at_moment is not None
            os.kill(running[0], signal.SIGKILL)
            if delivery == "at-least-once":
                eventually(lambda: len(owner.execute("SELECT FROM public.began").fetchall()) == 2)
                late = 4 * lateness()  # of the host that stands by, its two sessions, and the server that ends one
        if delivery == "at-least-once":
            (gap,) = owner.execute(
                "SELECT date_part('epoch', max(at) - %s) FROM public.began", [killed_at_moment[0]]
            ).fetchone() or (9,)
            assert gap < 1 + late
        else:
            eventually(lambda: outcomes(owner)["died"] == 1)
            time.sleep(1)
            assert len(owner.execute("SELECT FROM public.began").fetchall()) == 1
        assert outcomes(owner)["died"] == 1
    finally:
        for host_pid in hosts:
            os.kill(host_pid, signal.SIGKILL)
            os.waitpid(host_pid, 0)


@pytest.mark.parametrize(
    ("hosts", "slots", "every"),
    [
        pytest.param(6, 8, 0.5, marks=[pytest.mark.second_stage, pytest.mark.alone]),
        pytest.param(50, 20, 2.0, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
        pytest.param(20, 100, 1.0, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_many_hosts_with_wrong_clocks_and_random_phase_run_each_slot_once(
    dsn: str, owner: psycopg.Connection, hosts: int, slots: int, every: float
) -> None:
    """The hosts' wall clocks are up to five minutes off, and each host calls far more often than there are slots."""
    owner.execute("CREATE TABLE public.ran (slot timestamptz, host int)")

    def host(number: int) -> Callable[[dblock.Client], object]:
        def body(client: dblock.Client) -> None:
            off = (number - hosts / 2) / hosts * 600
            real = time.time
            time.time = lambda: real() + off
            with psycopg.connect(dsn, autocommit=True) as connection:

                @client.once("job", every=every, catch_up="latest")
                def job() -> None:
                    row = [dblock.current_run().slot, number]
                    connection.execute("INSERT INTO public.ran VALUES (%s, %s)", row)
                    time.sleep(0.05)

                stop = threading.Event()
                time.sleep(every * number / hosts)
                job.run(stop)

        return body

    pids = [run_in_child(dsn, host(number)) for number in range(hosts)]
    try:
        ran = "SELECT count(*), count(DISTINCT slot) FROM public.ran"
        eventually(lambda: (owner.execute(ran).fetchone() or (0,))[0] >= slots, within=300)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    total, distinct = owner.execute(ran).fetchone() or (0, 1)
    assert total == distinct
    decided = outcomes(owner)
    assert sum(decided.values()) >= slots
    assert decided["missed"] + decided["skipped"] <= 1 + len(pids), "only where this machine was late"


@pytest.mark.parametrize(
    "runs", [pytest.param(10, marks=pytest.mark.second_stage), pytest.param(50, marks=pytest.mark.nightly)]
)
def test_delay_is_kept_from_the_end_of_a_run_to_the_start_of_the_next_over_hosts(
    dsn: str, owner: psycopg.Connection, runs: int
) -> None:
    owner.execute("CREATE TABLE public.ran (began timestamptz, ended timestamptz)")

    def host(client: dblock.Client) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:

            @client.once("job", delay=0.2)
            def job() -> None:
                (began,) = connection.execute("SELECT clock_timestamp()").fetchone() or (None,)
                time.sleep(0.02)
                connection.execute("INSERT INTO public.ran VALUES (%s, clock_timestamp())", [began])

            job.run()

    pids = [run_in_child(dsn, host) for _ in range(5)]
    try:
        eventually(lambda: len(owner.execute("SELECT FROM public.ran").fetchall()) >= runs, within=120)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    gaps = owner.execute(
        "SELECT date_part('epoch', began - lag(ended) OVER (ORDER BY began)) FROM public.ran"
    ).fetchall()
    assert all(gap >= 0.2 for (gap,) in gaps if gap is not None)


@pytest.mark.second_stage
@pytest.mark.parametrize("overlap", ["skip", "queue", "allow"])
def test_job_longer_than_its_interval_is_counted_exactly(
    client: dblock.Client, clock: StillClock, owner: psycopg.Connection, overlap: str
) -> None:
    """A hundred slots, a job of two and a half intervals, and a host that asks in between."""
    slots = slots_of(client, "job", every=10, overlap=overlap, ttl=3600, grace=4)
    active: list[tuple[float, Any]] = []
    for tick in range(500):  # of 2 s each
        now = tick * 2.0
        clock.set(NOON + timedelta(seconds=now))
        for ends, run in [one for one in active if one[0] <= now]:
            slots.end(run, "succeeded")
            active.remove((ends, run))
        _, run = slots.claim(queue=False)
        if run is not None:
            active.append((now + 25, run))
    counted = outcomes(owner)
    ran = counted["succeeded"] + counted["running"]
    assert sum(counted.values()) == 100
    assert counted["missed"] == 0
    # With skip a run takes the time of three slots, and with a queue runs follow each other.
    expected = {"skip": (34, 66), "queue": (39, 60), "allow": (100, 0)}[overlap]
    assert (ran, counted["skipped"]) == expected

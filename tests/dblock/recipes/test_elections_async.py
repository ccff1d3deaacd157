"""Elections for asyncio: what differs from threads, and the steps that both share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

import dblock
from dblock import AsyncTerm, Leader, Vacancy
from tests.support.eventually import eventually_async

PATIENCE = 60.0


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[dblock.AsyncClient]:
    async with dblock.AsyncClient(dsn, patience=PATIENCE) as made:
        yield made


async def log(client: dblock.AsyncClient) -> list[str]:
    events = client.election("e").observe(0, timeout=0)
    return [one.how if isinstance(one, Vacancy) else "leads" async for one in events]


async def forever(term: AsyncTerm) -> None:
    await asyncio.sleep(PATIENCE)


def running(election: dblock.AsyncElection, body: Callable[[AsyncTerm], Awaitable[Any]] = forever) -> asyncio.Task[Any]:
    return asyncio.ensure_future(election.run(body))


async def test_term_lasts_for_the_body(client: dblock.AsyncClient) -> None:
    election = client.election("e", value=1)
    async with election.lead() as term:
        assert election.is_leader()
        await term.publish(2)
        seen = await election.leader()
        assert seen is not None
        assert (seen.token, seen.value) == (term.token, 2)
    assert not election.is_leader()
    assert await election.leader() is None
    assert await log(client) == ["leads", "resigned"]


async def test_resign_cancels_the_body_of_run_and_campaigns_again(client: dblock.AsyncClient) -> None:
    election = client.election("e")
    tokens: list[int] = []
    ended: list[bool] = []

    async def body(term: AsyncTerm) -> None:
        tokens.append(term.token)
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            ended.append(election.is_leader())  # still the leader: the term is released afterwards

    task = running(election, body)
    await eventually_async(lambda: tokens)
    assert await election.resign() is True
    assert ended == [True]
    await eventually_async(lambda: len(tokens) == 2)
    election.stop()
    assert await task is None
    assert await log(client) == ["leads", "resigned", "leads", "resigned"]


@pytest.mark.second_stage
async def test_body_that_ignores_its_cancellation_keeps_the_term_until_the_deadline(
    client: dblock.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    election = client.election("e", ttl=1)
    led, returned = asyncio.Event(), asyncio.Event()

    async def stubborn(term: AsyncTerm) -> str:
        led.set()
        while True:
            try:
                await returned.wait()
                return "late"
            except asyncio.CancelledError:
                pass

    task = running(election, stubborn)
    try:
        await led.wait()
        with caplog.at_level(logging.WARNING, "dblock"):
            assert await election.resign() is False
        assert "has not returned" in caplog.text
        events = client.election("e").observe(0, timeout=PATIENCE)
        assert isinstance(await anext(events), Leader)
        vacancy = await anext(events)
        assert isinstance(vacancy, Vacancy)
        assert vacancy.how == "expired"
        election.stop()
    finally:
        returned.set()
        await task


async def test_cancelling_run_releases_the_term_after_the_body(client: dblock.AsyncClient) -> None:
    election = client.election("e")
    seen: list[Leader | None] = []

    async def body(term: AsyncTerm) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            seen.append(await client.election("e").leader())

    task = running(election, body)
    await eventually_async(election.is_leader)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen != [None], "released while the body ran"
    assert await log(client) == ["leads", "resigned"]


async def test_body_that_cancels_itself_has_failed_and_pauses_before_the_next_term(
    client: dblock.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    election, bodies = client.election("e"), 0

    async def body(term: AsyncTerm) -> None:
        nonlocal bodies
        bodies += 1
        if bodies == 2:
            election.stop()
        raise asyncio.CancelledError

    await asyncio.wait_for(running(election, body), PATIENCE)
    assert bodies == 2
    assert "the body failed, its term ends" in caplog.text


async def test_candidate_that_was_stopped_says_so(client: dblock.AsyncClient) -> None:
    election = client.election("e")
    election.stop()
    with pytest.raises(dblock.DblockError, match="was stopped"):
        await election.campaign()


@pytest.mark.second_stage
async def test_loss_cancels_the_body_and_run_campaigns_again(
    client: dblock.AsyncClient, owner: psycopg.Connection
) -> None:
    election = client.election("e", ttl=1)
    tokens: list[int] = []

    async def body(term: AsyncTerm) -> str:
        tokens.append(term.token)
        if len(tokens) == 1:
            client._runtime.keepalive.discard(term._state)  # as if its renewals failed
            await asyncio.sleep(PATIENCE)
        return "done"

    assert await election.run(body) == "done"
    assert len(tokens) == 2
    assert await log(client) == ["leads", "expired", "leads", "resigned"]


async def test_plain_function_is_refused_as_a_body(client: dblock.AsyncClient) -> None:
    def body(term: object) -> None: ...

    with pytest.raises(dblock.InvalidArgument, match=r"election 'e' is not a coroutine function.*Client\.election"):
        await client.election("e").run(body)  # type: ignore[arg-type]
    assert await client.election("e").leader() is None


async def test_candidate_that_is_cancelled_leaves_nothing_behind(
    client: dblock.AsyncClient, owner: psycopg.Connection
) -> None:
    async with client.election("e").lead():
        waits = asyncio.ensure_future(client.election("e").campaign())
        count = "SELECT count(*) FROM list_candidates('e')"
        await eventually_async(lambda: owner.execute(count).fetchall() == [(1,)])
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await eventually_async(lambda: owner.execute(count).fetchall() == [(0,)])
        assert owner.execute("SELECT count(*) FROM candidates").fetchall() == [(0,)]


@pytest.mark.second_stage
async def test_transfer_and_priority_reach_an_asynchronous_leader(dsn: str) -> None:
    async with dblock.AsyncClient(dsn, holder="a") as first, dblock.AsyncClient(dsn, holder="b") as second:
        leading, waiting = first.election("e"), second.election("e")

        async def transferred() -> bool:
            with contextlib.suppress(dblock.TransferRefused):
                await second.election("e").transfer(to="b")
                return True
            return False

        tasks = [running(leading)]
        await eventually_async(leading.is_leader)
        tasks.append(running(waiting))
        await eventually_async(transferred, "the transfer")
        await eventually_async(waiting.is_leader)
        async with dblock.AsyncClient(dsn, holder="c") as third:
            high = third.election("e", priority=1)
            tasks.append(running(high))
            await eventually_async(high.is_leader)
            for election in (high, waiting, leading):
                election.stop()
            await asyncio.gather(*tasks)
        assert (await log(first))[:5] == ["leads", "transferred", "leads", "outranked", "leads"]


@pytest.mark.second_stage
async def test_term_that_the_log_does_not_have_ends(client: dblock.AsyncClient, owner: psycopg.Connection) -> None:
    async with client.election("e").lead() as term:
        owner.execute("DELETE FROM terms")
        assert await term.wait(60)
        assert term.ending_reason == "over"
        assert term.remaining() > 0


async def test_callbacks_may_be_coroutines_and_come_in_pairs(client: dblock.AsyncClient) -> None:
    calls: list[str] = []

    async def started(term: AsyncTerm) -> None:
        calls.append("started")

    election = client.election("e", on_started=started, on_stopped=lambda term: calls.append("stopped"))

    async def body(term: AsyncTerm) -> str:
        if len(calls) < 3:
            raise ValueError("broken")
        return "done"

    assert await election.run(body) == "done"
    assert calls == ["started", "stopped"] * 2
    assert await log(client) == ["leads", "failed", "leads", "resigned"]


async def test_fence_is_awaited_or_entered(client: dblock.AsyncClient, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection, client.election("e").lead() as term:
        await term.fence(connection)
        async with term.fence(connection) as proved:
            assert proved is term
        await connection.commit()


async def test_closing_the_client_ends_a_term_that_has_no_body(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn, presence=None, patience=PATIENCE) as client:
        await client.election("e", ttl=60).campaign()
    assert owner.execute("SELECT how FROM terms").fetchall() == [("resigned",)]


async def test_closing_the_client_waits_for_the_body(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as other:
        client = dblock.AsyncClient(dsn)
        election = client.election("e")
        seen: list[Leader | None] = []

        began = asyncio.Event()

        async def body(term: AsyncTerm) -> None:
            began.set()
            try:
                await asyncio.sleep(PATIENCE)
            finally:
                seen.append(await other.election("e").leader())

        task = running(election, body)
        await began.wait()
        await client.close()
        assert await task is None
        assert [one is not None for one in seen] == [True], "released while the body ran"
        assert await log(other) == ["leads", "resigned"]


async def test_term_that_must_end_before_its_body_begins_is_resigned(client: dblock.AsyncClient) -> None:
    election = client.election("e")
    bodies: list[int] = []

    async def body(term: AsyncTerm) -> None:
        bodies.append(term.token)

    term = await election.campaign()
    term._ask_to_end("stop")
    await election._run_body(body, term)
    assert bodies == []
    assert not election.is_leader()
    assert await log(client) == ["leads", "resigned"]

"""Waiting over HTTP: long polls, tickets, clients that leave, and servers that stop."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from dblock._core.effects import Flow
from dblock.server.settings import Limits
from tests.dblock.server.by_hand import ByHand
from tests.dblock.server.conftest import RECORD_GRANTS, Http, serving
from tests.support.eventually import eventually_async
from tests.support.machine import measured

SLOW_GRANTS = """
CREATE FUNCTION public.delay() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep({seconds}); RETURN new; END $$;
CREATE TRIGGER delay BEFORE INSERT OR UPDATE ON distributed_locks FOR EACH ROW EXECUTE FUNCTION public.delay();
"""


SLOW_PARKING = """
CREATE FUNCTION public.delay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.2); RETURN new; END $$;
CREATE TRIGGER delay BEFORE UPDATE ON lock_tickets FOR EACH ROW
WHEN (new.client <> old.client) EXECUTE FUNCTION public.delay();
"""


def queue_of(owner: psycopg.Connection, name: str = "a") -> list[str]:
    return [one["holder"] for one in owner.execute("SELECT queue(%s)", [name]).fetchall()[0][0]]


async def test_long_poll_ends_with_the_grant_when_the_lock_is_released(http: Http, owner: psycopg.Connection) -> None:
    first = await http.acquire("a")
    waiting = asyncio.ensure_future(http.acquire("a", wait=30))
    await eventually_async(lambda: queue_of(owner))
    await http.delete(f"/v1/leases/{first['lease']}")
    assert (await waiting)["token"] > first["token"]
    assert queue_of(owner) == []


async def test_long_polls_are_served_in_the_order_of_their_arrival(http: Http, owner: psycopg.Connection) -> None:
    current = await http.acquire("a")
    polls = []
    for number in range(4):
        polls.append(asyncio.ensure_future(http.acquire("a", wait=60, holder=f"waiter {number}")))
        await eventually_async(lambda: len(queue_of(owner)) == len(polls))
    tokens = []
    for poll in polls:
        await http.delete(f"/v1/leases/{current['lease']}")
        current = await poll
        tokens.append(current["token"])
    assert tokens == sorted(tokens)


async def test_ticket_keeps_the_position_between_two_requests(http: Http, dsn: str, owner: psycopg.Connection) -> None:
    first = await http.acquire("a")
    body = {"wait": 0.1, "holder": "patient"}
    response = await http.post("/v1/locks/a", json=body)
    assert (response.status_code, response.json()["requeued"]) == (202, False)
    ticket = response.json()["ticket"]
    async with serving(dsn) as other:
        late = asyncio.ensure_future(other.acquire("a", wait=60, holder="late"))
        await eventually_async(lambda: queue_of(owner) == ["patient", "late"])
        again = await other.post("/v1/locks/a", json={**body, "ticket": ticket})
        assert (again.status_code, again.json()["requeued"]) == (202, False)
        assert queue_of(owner) == ["patient", "late"], "the ticket works at another server"
        await http.delete(f"/v1/leases/{first['lease']}")
        second = await http.acquire("a", wait=30, ticket=ticket)
        assert owner.execute("SELECT holder FROM holder('a')").fetchone() == ("anonymous",)
        assert not late.done()
        await http.delete(f"/v1/leases/{second['lease']}")
        assert (await late)["token"] > second["token"]


async def test_free_lock_stays_reserved_for_a_ticket(http: Http, owner: psycopg.Connection) -> None:
    first = await http.acquire("a")
    ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
    await http.delete(f"/v1/leases/{first['lease']}")
    assert (await http.post("/v1/locks/a", json={})).status_code == 423
    assert owner.execute("SELECT granted FROM try_acquire('a')").fetchone() == (False,)
    assert (await http.post("/v1/locks/a", json={"wait": 0, "ticket": ticket})).status_code == 200


async def test_ticket_that_is_not_used_loses_its_position(dsn: str, owner: psycopg.Connection) -> None:
    async with serving(dsn, ticket_ttl=0.3) as http:
        first = await http.acquire("a")
        ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
        await eventually_async(lambda: queue_of(owner) == [])
        await http.delete(f"/v1/leases/{first['lease']}")
        await http.acquire("a", wait=10)
        late = await http.post("/v1/locks/a", json={"wait": 0.05, "ticket": ticket})
        assert (late.status_code, late.json()["requeued"]) == (202, True)


async def test_ticket_can_be_given_back(http: Http, owner: psycopg.Connection) -> None:
    await http.acquire("a")
    ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
    assert queue_of(owner) == ["anonymous"]
    assert (await http.delete(f"/v1/tickets/{ticket}")).status_code == 204
    assert queue_of(owner) == []
    wrong = await http.post("/v1/locks/b", json={"ticket": ticket})
    assert wrong.status_code == 400, "the ticket is one of another lock"


@pytest.mark.parametrize("kind", ["read", "write", "semaphore"])
async def test_ticket_of_a_shared_lock_keeps_its_position(kind: str, http: Http, owner: psycopg.Connection) -> None:
    asked = {"kind": kind, **({"permits": 1} if kind == "semaphore" else {})}
    first = await http.acquire("s", **({**asked, "kind": "write"} if kind == "read" else asked))
    ticket = (await http.post("/v1/locks/s", json={**asked, "wait": 0.05})).json()["ticket"]
    await http.delete(f"/v1/leases/{first['lease']}")
    tried = await http.post("/v1/locks/s", json=asked)
    assert tried.status_code == (200 if kind == "read" else 423)
    grant = await http.acquire("s", **asked, ticket=ticket, wait=10)
    assert grant["share"].startswith("s#")


@pytest.mark.second_stage
async def test_client_that_leaves_gives_its_position_back(http: Http, owner: psycopg.Connection) -> None:
    await http.acquire("a")
    with measured() as lateness:
        poll = ByHand(http.app, "/v1/locks/a", {"wait": 60})
        await eventually_async(lambda: queue_of(owner))
        poll.leave()
        began = time.monotonic()
        await eventually_async(lambda: not queue_of(owner))
        assert time.monotonic() - began < 1 + 3 * lateness()
        await poll.task
    assert http.service.waits.count == 0


@pytest.mark.second_stage
async def test_client_that_leaves_with_a_ticket_keeps_its_position(http: Http, owner: psycopg.Connection) -> None:
    await http.acquire("a")
    ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
    own_tickets = "SELECT count(*) FROM lock_tickets WHERE client = %s"
    for headers, body in (({}, {"ticket": ticket}), ({"Idempotency-Key": "k"}, {})):
        poll = ByHand(http.app, "/v1/locks/a", {"wait": 60, **body}, headers)
        await eventually_async(
            lambda: owner.execute(own_tickets, [http.service.database.flows.client]).fetchall() == [(1,)]
        )
        poll.leave()
        await poll.task
    assert len(queue_of(owner)) == 2
    await asyncio.sleep(3.5)
    assert len(queue_of(owner)) == 2, "no heartbeat of the server is needed"


@pytest.mark.parametrize("when", ["before", "during"])
async def test_grant_that_cannot_be_delivered_is_released(when: str, http: Http, owner: psycopg.Connection) -> None:
    request = ByHand(http.app, "/v1/locks/a", {"ttl": 60})
    if when == "before":
        request.leave()
    else:
        request.leave_after_first_message = True
    await request.task
    assert owner.execute("SELECT FROM holder('a')").fetchall() == []


async def test_grant_of_a_waiter_that_left_is_released(http: Http, owner: psycopg.Connection) -> None:
    """The lock is freed at the same moment as the client leaves."""
    for _ in range(10):
        first = await http.acquire("a", ttl=30)
        poll = ByHand(http.app, "/v1/locks/a", {"wait": 60, "ttl": 600})
        await eventually_async(lambda: queue_of(owner))
        await asyncio.gather(http.delete(f"/v1/leases/{first['lease']}"), asyncio.sleep(0.002))
        poll.leave()
        await poll.task
        if poll.status is None or poll.status == 499:
            await eventually_async(lambda: not owner.execute("SELECT FROM holder('a')").fetchall())
        owner.execute("SELECT force_release('a', token, now => true) FROM holder('a')")


@pytest.mark.parametrize("when", ["parking", "answering"])
async def test_ticket_that_no_client_was_told_of_is_given_back(
    when: str, http: Http, owner: psycopg.Connection
) -> None:
    """The client leaves when its time is over, and its ticket is kept for the next request already."""
    await http.acquire("a")
    flows = http.service.database.flows
    if when == "parking":
        owner.execute(SLOW_PARKING)
    poll = ByHand(http.app, "/v1/locks/a", {"wait": 0.1})
    poll.leave_after_first_message = when == "answering"
    await eventually_async(lambda: queue_of(owner))
    await eventually_async(lambda: not flows.private)
    if when == "parking":
        poll.leave()
    await poll.task
    await eventually_async(lambda: not queue_of(owner))


@pytest.mark.second_stage
async def test_stopping_server_answers_every_waiter_with_a_ticket(dsn: str, owner: psycopg.Connection) -> None:
    async with serving(dsn) as http:
        first = await http.acquire("a")
        polls = [ByHand(http.app, "/v1/locks/a", {"wait": 60, "holder": f"{number}"}) for number in range(5)]
        await eventually_async(lambda: len(queue_of(owner)) == 5)
        before = queue_of(owner)
        with measured() as lateness:
            began = time.monotonic()
            await http.service.close()
            assert time.monotonic() - began < 2 + 3 * lateness()
        for poll in polls:
            await poll.task
            assert poll.status == 202
    assert queue_of(owner) == before, "every waiter keeps its position"
    async with serving(dsn) as other:
        await other.delete(f"/v1/leases/{first['lease']}")
        ticket = polls[int(before[0])].answer["ticket"]
        await other.acquire("a", ticket=ticket, wait=10)


async def test_stopping_server_answers_a_try_with_the_reply_of_the_database(
    http: Http, owner: psycopg.Connection
) -> None:
    await http.acquire("b")
    owner.execute(SLOW_GRANTS.format(seconds=0.2))
    request = ByHand(http.app, "/v1/locks/a", {})
    await eventually_async(lambda: http.service.waits.count == 1)
    http.service.stopping.set()
    await request.task
    assert request.status == 200, "a refusal would leave a grant that no client knows of"


async def test_heartbeat_that_is_answered_late_leaves_a_parked_ticket_alone(
    http: Http, owner: psycopg.Connection
) -> None:
    """The ticket is parked, and its waiter leaves, between the heartbeat and its reply."""
    await http.acquire("a")
    poll = ByHand(http.app, "/v1/locks/a", {"wait": 60}, {"Idempotency-Key": "k"})
    await eventually_async(lambda: queue_of(owner))
    database = http.service.database
    waiters = database.runtime.listener.waiters
    await eventually_async(lambda: waiters._checks)
    waiters._checks["a"] = 0.0
    checking = waiters.check(5.0)
    reply = await database.run(asked_once(next(checking)))
    poll.leave()
    await poll.task
    assert waiters.count == 0
    await database.run(continued(checking, reply))
    assert len(queue_of(owner)) == 1, "the position is kept"


def asked_once(effect: Any) -> Flow[Any]:
    return (yield effect)


def continued(flow: Flow[Any], reply: Any) -> Flow[None]:
    """Perform the rest of a flow, which waits for this reply."""
    with suppress(StopIteration):
        while True:
            reply = yield flow.send(reply)


@pytest.mark.second_stage
@pytest.mark.parametrize("wait", [0, 0.05])
async def test_short_wait_does_not_shorten_the_patience_with_the_database(
    wait: float, http: Http, owner: psycopg.Connection
) -> None:
    await http.acquire("b")
    owner.execute(SLOW_GRANTS.format(seconds=1.5))
    await http.acquire("a", wait=wait)


async def test_same_key_finds_the_same_grant(http: Http, dsn: str) -> None:
    key = {"Idempotency-Key": "job-1"}
    grants = [(await http.post("/v1/locks/a", json={}, headers=key)).json() for _ in range(3)]
    async with serving(dsn) as other:
        grants.append((await other.post("/v1/locks/a", json={}, headers=key)).json())
        assert len({grant["token"] for grant in grants}) == 1
        assert (await other.post("/v1/locks/a", json={}, headers={"Idempotency-Key": "job-2"})).status_code == 423
        assert (await other.put(f"/v1/leases/{grants[0]['lease']}")).status_code == 200
    for wrong in ("", "x" * 256):
        response = await http.post("/v1/locks/a", json={}, headers={"Idempotency-Key": wrong})
        assert response.status_code == 400


async def test_same_key_of_another_caller_is_another_request(dsn: str) -> None:
    from dblock.server.access import credential

    users = tuple(credential(name, "lock", f"{name}-0123456789abcdef") for name in ("alice", "bob"))
    async with serving(dsn, credentials=users) as http:
        statuses = []
        for name in ("alice", "bob", "alice"):
            headers = {"Authorization": f"Bearer {name}-0123456789abcdef", "Idempotency-Key": "k"}
            statuses.append((await http.post("/v1/locks/a", json={}, headers=headers)).status_code)
        assert statuses == [200, 423, 200]


async def test_same_key_for_another_lock_is_another_request(http: Http, owner: psycopg.Connection) -> None:
    held = [await http.acquire(name) for name in "ab"]
    polls = []
    for name in "ab":
        polls.append(ByHand(http.app, f"/v1/locks/{name}", {"wait": 60}, {"Idempotency-Key": "k"}))
        await eventually_async(lambda: sum(len(queue_of(owner, one)) for one in "ab") == len(polls))
    for lease in held:
        await http.delete(f"/v1/leases/{lease['lease']}")
    for poll in polls:
        await poll.task
    assert [poll.status for poll in polls] == [200, 200]


async def test_newer_request_with_the_same_key_takes_over(http: Http, owner: psycopg.Connection) -> None:
    first = await http.acquire("a")
    key = {"Idempotency-Key": "k"}
    older = ByHand(http.app, "/v1/locks/a", {"wait": 60}, key)
    await eventually_async(lambda: queue_of(owner))
    newer = asyncio.ensure_future(http.post("/v1/locks/a", json={"wait": 60}, headers=key))
    await older.task
    assert (older.status, older.answer["type"]) == (409, "urn:dblock:problem:superseded")
    assert len(queue_of(owner)) == 1
    await http.delete(f"/v1/leases/{first['lease']}")
    assert (await newer).status_code == 200


async def test_waiter_beyond_the_limit_is_refused(dsn: str) -> None:
    async with serving(dsn, limits=Limits(waiters=2)) as http:
        await http.acquire("a")
        polls = [ByHand(http.app, "/v1/locks/a", {"wait": 60}) for _ in range(2)]
        await eventually_async(lambda: http.service.waits.count == 2)
        response = await http.post("/v1/locks/a", json={"wait": 60})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        for poll in polls:
            poll.leave()
            await poll.task


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "requests", [20, pytest.param(200, marks=pytest.mark.second_stage), pytest.param(1000, marks=pytest.mark.nightly)]
)
async def test_cut_connections_make_no_second_grant_and_no_orphan(
    requests: int, http: Http, owner: psycopg.Connection
) -> None:
    """Each request is cut off at another moment and sent again with its key, over a few contended locks."""
    owner.execute(RECORD_GRANTS)
    tokens: list[int] = []

    async def client(number: int) -> None:
        name, headers = f"lock {number % 5}", {"Idempotency-Key": f"key {number}"}
        for cut in range(3):
            request = ByHand(http.app, f"/v1/locks/{name.replace(' ', '%20')}", {"wait": 60, "ttl": 120}, headers)
            await asyncio.sleep((number * 7 % 13 + cut) * 0.003)
            request.leave()
            await request.task
        while True:
            response = await http.post(f"/v1/locks/{name}", json={"wait": 60, "ttl": 120}, headers=headers)
            if response.status_code == 200:
                break
            assert response.status_code in (202, 409), response.text
        tokens.append(response.json()["token"])
        assert (await http.delete(f"/v1/leases/{response.json()['lease']}")).status_code == 204

    for start in range(0, requests, 20):
        await asyncio.gather(*(client(number) for number in range(start, min(start + 20, requests))))
    granted = owner.execute("SELECT token FROM public.grants").fetchall()
    assert sorted(token for (token,) in granted) == sorted(tokens), "each key was granted once"
    assert owner.execute("SELECT name FROM list_locks()").fetchall() == [], "nothing is held that no client knows of"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "requests", [40, pytest.param(200, marks=pytest.mark.second_stage), pytest.param(1000, marks=pytest.mark.nightly)]
)
async def test_cut_connections_without_a_key_leave_no_grant_and_no_ticket(
    requests: int, http: Http, owner: psycopg.Connection
) -> None:
    told: list[dict[str, Any]] = []

    async def client(number: int) -> None:
        request = ByHand(http.app, f"/v1/locks/lock{number % 3}", {"wait": 20 * (number % 2), "ttl": 600})
        await asyncio.sleep((number * 7 % 13) * 0.003)
        request.leave()
        await request.task
        if request.status == 200 and not request.sent[-1]["more_body"]:
            told.append(request.answer)
            await http.delete(f"/v1/leases/{request.answer['lease']}")

    for start in range(0, requests, 20):
        await asyncio.gather(*(client(number) for number in range(start, min(start + 20, requests))))
    await eventually_async(lambda: not owner.execute("SELECT FROM list_locks()").fetchall())
    assert http.service.waits.count == 0
    assert not http.service.database.flows.private | http.service.database.flows.requeued, (
        "the server remembers nothing"
    )

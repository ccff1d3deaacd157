"""Locks and leases over HTTP, by a server in this process."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

import dblock
from tests.dblock.server.conftest import Http, quoted, serving
from tests.support.machine import measured
from tests.support.proxy import Proxy
from tests.support.servers import private_server


def assert_lasts(seconds: float, ttl: float, began: float) -> None:
    """Check that a lease that was acquired or renewed since `began` lasts for its ttl, less what its reply took."""
    took = time.monotonic() - began
    # The database counts from its grant, and the server from before its request.
    assert ttl - 2 * took - 0.1 < seconds <= ttl


async def test_grant_has_token_lease_and_deadline(http: Http, owner: psycopg.Connection) -> None:
    began = time.monotonic()
    grant = await http.acquire("invoice:42", ttl=20, holder="worker 7", meta={"job": 1})
    assert_lasts(grant["expires_in"], 20, began)
    ((token, holder, meta),) = owner.execute("SELECT token, holder, meta FROM holder('invoice:42')").fetchall()
    assert (token, holder, meta) == (grant["token"], "worker 7", {"job": 1})


async def test_held_lock_is_refused_with_its_holder(http: Http, dsn: str) -> None:
    with dblock.Client(dsn, holder="a program in Python") as client:
        lease = client.lock("a").acquire()
        response = await http.post("/v1/locks/a", json={"wait": 0})
        assert (response.status_code, response.json()["holder"]["token"]) == (423, lease.token)
        assert response.json()["holder"]["holder"] == "a program in Python"
        assert "Try again" in response.json()["next"]


@pytest.mark.parametrize(
    "name",
    ["a/b", "a%2Fb", "a b", "/", "%", "queue", "a/queue", "ä€\U0001f512", "?#&=+;", "x" * 512, "\x7f\n", "€" * 170],
)
async def test_names_of_all_characters_round_trip(name: str, http: Http, owner: psycopg.Connection) -> None:
    grant = await http.acquire(name)
    assert grant["lock"] == name
    assert owner.execute("SELECT name FROM list_locks()").fetchall() == [(name,)]
    assert (await http.get(f"/v1/locks/{quoted(name)}")).json()["name"] == name
    assert (await http.get(f"/v1/locks/{quoted(name)}/queue")).json() == {"lock": name, "waiters": []}
    assert (await http.get("/v1/locks", params={"name": name})).json()["locks"][0]["name"] == name
    assert (await http.put(f"/v1/leases/{grant['lease']}")).json()["token"] == grant["token"]
    assert (await http.delete(f"/v1/leases/{grant['lease']}")).status_code == 204
    assert owner.execute("SELECT name FROM list_locks()").fetchall() == []


@pytest.mark.parametrize("name", [".", ".."])
async def test_names_that_no_path_can_have_are_given_in_the_body(name: str, http: Http) -> None:
    response = await http.post("/v1/locks", json={"name": name})
    assert response.json()["lock"] == name


@pytest.mark.parametrize("name", ["x" * 513, "a\0b"])
async def test_invalid_name_is_refused(name: str, http: Http) -> None:
    assert (await http.post(f"/v1/locks/{quoted(name)}", json={})).status_code == 400
    assert (await http.post("/v1/locks/%FF")).status_code == 400


async def test_renewal_extends_the_lease_from_now_on(http: Http, owner: psycopg.Connection) -> None:
    grant = await http.acquire("a", ttl=20)
    began = time.monotonic()
    renewed = (await http.put(f"/v1/leases/{grant['lease']}", json={"ttl": 500})).json()
    assert_lasts(renewed["expires_in"], 500, began)
    ((remaining,),) = owner.execute("SELECT remaining FROM holder('a')").fetchall()
    assert_lasts(remaining, 500, began)
    began = time.monotonic()
    again = (await http.put(f"/v1/leases/{renewed['lease']}")).json()
    assert_lasts(again["expires_in"], 500, began)
    shown = (await http.get(f"/v1/leases/{grant['lease']}")).json()
    assert shown["token"] == grant["token"]


@pytest.mark.parametrize("reason", ["expired", "superseded", "released", "forced"])
async def test_lost_lease_is_gone_with_the_reason(reason: str, http: Http, owner: psycopg.Connection) -> None:
    grant = await http.acquire("a", ttl=30)
    if reason in ("expired", "superseded"):
        owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = 'a'")
    if reason == "superseded":
        await http.acquire("a")
    elif reason == "released":
        assert owner.execute("SELECT release('a', %s)", [grant["token"]]).fetchone() == (True,)
    elif reason == "forced":
        broken = await http.post("/v1/locks/a/break", json={"token": grant["token"], "reason": "stuck"})
        assert 0 < broken.json()["free_within"] <= 30
    response = await http.put(f"/v1/leases/{grant['lease']}")
    assert (response.status_code, response.json()["reason"]) == (410, reason)
    assert "Stop writing" in response.json()["next"]


async def test_released_lease_frees_only_its_own_grant(http: Http) -> None:
    first = await http.acquire("a")
    assert (await http.delete(f"/v1/leases/{first['lease']}")).status_code == 204
    second = await http.acquire("a")
    assert second["token"] > first["token"]
    for request in (http.delete, http.get):
        assert (await request(f"/v1/leases/{first['lease']}")).status_code == 410
    assert (await http.get(f"/v1/leases/{second['lease']}")).status_code == 200


async def test_lease_cannot_be_guessed_or_altered(http: Http) -> None:
    grant = await http.acquire("a")
    lease = grant["lease"]
    altered = [
        lease[:-1] + ("A" if lease[-1] != "A" else "B"),
        lease[1:],
        lease + "A",
        "A" * len(lease),
        "ä",
        "a" * 2000,
    ]
    for one in altered:
        assert (await http.put(f"/v1/leases/{quoted(one)}")).status_code == 404
    ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
    assert (await http.delete(f"/v1/leases/{ticket}")).status_code == 404, "a ticket is no lease"


async def test_kinds_of_locks_share_and_exclude(http: Http) -> None:
    first = await http.acquire("s", kind="semaphore", permits=2)
    second = await http.acquire("s", kind="semaphore")
    assert {first["share"], second["share"]} == {"s#0", "s#1"}
    assert (await http.post("/v1/locks/s", json={"kind": "semaphore"})).status_code == 423
    assert (await http.post("/v1/locks/s", json={})).status_code == 409
    assert len((await http.get("/v1/locks/s")).json()["shares"]) == 2
    assert (await http.delete(f"/v1/leases/{first['lease']}")).status_code == 204
    await http.acquire("s", kind="semaphore", permits=2)
    await http.acquire("rw", kind="read")
    await http.acquire("rw", kind="read")
    assert (await http.post("/v1/locks/rw", json={"kind": "write"})).status_code == 423
    await http.acquire("a")
    shown = {name: (await http.get(f"/v1/locks/{name}")).json()["kind"] for name in ("s", "rw", "a")}
    assert shown == {"s": "semaphore", "rw": "read-write", "a": "mutex"}


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"{", b'"a"', b"{}x", b'{"ttl": 0}', b'{"ttl": "30"}', b'{"ttl": NaN}', b'{"ttl": 1e999}',
        b'{"wait": -1}',
        b'{"wait": 61}', b'{"wait": true}', b'{"holder": 7}', b'{"holder": ""}', b'{"holder": "a\\u0000"}',
        b'{"kind": "x"}', b'{"permits": 2}', b'{"kind": "semaphore", "permits": 0}', b'{"ticket": 7}', b'{"other": 1}',
        b'{"meta": "\\ud800"}', b'{"name": "b"}', b"[" * 60_000, b"\xff", b'{"ttl": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
async def test_invalid_request_is_refused_and_does_nothing(body: bytes, http: Http, owner: psycopg.Connection) -> None:
    response = await http.post("/v1/locks/a", content=body)
    assert response.status_code == 400, response.text
    assert owner.execute("SELECT FROM distributed_locks").fetchall() == []


async def test_ttl_that_is_no_number_is_refused_in_the_terms_of_json(http: Http) -> None:
    lease = (await http.acquire("a"))["lease"]
    for response in (
        await http.post("/v1/locks/b", json={"ttl": "30"}),
        await http.put(f"/v1/leases/{lease}", json={"ttl": "30"}),
    ):
        assert response.status_code == 400
        assert response.json()["detail"] == "ttl is a number of seconds; got '30'."


async def test_body_that_is_too_large_or_not_json_is_refused(http: Http) -> None:
    assert (await http.post("/v1/locks/a", content=b" " * 70_000)).status_code == 413
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await http.post("/v1/locks/a", content=b"ttl=30", headers=form)).status_code == 415


async def test_list_has_pages_and_filters(http: Http, owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire(format('job:%s', lpad(n::text, 2, '0'))) FROM generate_series(1, 25) AS n")
    owner.execute("SELECT try_acquire('other_x')")
    seen, after, pages = [], "", 0
    while after is not None:
        page = (await http.get("/v1/locks", params={"pattern": "job:*", "limit": 10, "after": after})).json()
        seen += [lock["name"] for lock in page["locks"]]
        after, pages = page["after"], pages + 1
    assert (seen, pages) == ([f"job:{n:02}" for n in range(1, 26)], 3)
    assert (await http.get("/v1/locks", params={"pattern": "other?x"})).json()["locks"][0]["name"] == "other_x"
    owner.execute("SELECT release('other_x', token) FROM holder('other_x')")
    for free, count in (("false", 0), ("true", 1)):
        assert len((await http.get("/v1/locks", params={"name": "other_x", "free": free})).json()["locks"]) == count
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"limit": "100000"}, {"other": "1"}, {"pattern": "a\0"}):
        assert (await http.get("/v1/locks", params=wrong)).status_code == 400


async def test_unknown_lock_is_not_found(http: Http) -> None:
    assert (await http.get("/v1/locks/never")).status_code == 404


async def test_break_takes_only_the_grant_with_that_token(http: Http, owner: psycopg.Connection) -> None:
    grant = await http.acquire("a")
    wrong = await http.post("/v1/locks/a/break", json={"token": grant["token"] - 1, "reason": "stuck"})
    assert wrong.status_code == 409
    for body in ({"token": grant["token"]}, {"token": "1", "reason": "x"}, {"token": True, "reason": "x"}):
        assert (await http.post("/v1/locks/a/break", json=body)).status_code == 400
    body = {"token": grant["token"], "reason": "stuck since noon", "now": True}
    assert (await http.post("/v1/locks/a/break", json=body)).json()["free_within"] == 0
    ((event, actor, reason),) = owner.execute("SELECT event, actor, reason FROM list_history('a')").fetchall()
    assert (event, reason) == ("forced_now", "stuck since noon")
    assert actor.startswith("anonymous over HTTP as ")
    await http.acquire("a")


async def test_break_whose_reply_is_lost_does_not_say_that_nothing_was_done(
    dsn: str, owner: psycopg.Connection
) -> None:
    with Proxy(dsn) as proxy:
        async with serving(proxy.dsn) as http:
            grant = await http.acquire("a")
            await http.get("/v1/locks")
            proxy.lose_reply_to(b"the reason in question")
            body = {"token": grant["token"], "reason": "the reason in question", "now": True}
            response = await http.post("/v1/locks/a/break", json=body)
            assert owner.execute("SELECT FROM holder('a')").fetchall() == []
            assert response.status_code == 503
            assert "may have" in response.json()["next"]


async def test_broken_semaphore_loses_the_permit_with_that_token(http: Http) -> None:
    grants = [await http.acquire("s", kind="semaphore", permits=2) for _ in range(2)]
    body = {"token": grants[1]["token"], "reason": "stuck", "now": True}
    assert (await http.post("/v1/locks/s/break", json=body)).json()["lock"] == grants[1]["share"]
    assert (await http.put(f"/v1/leases/{grants[0]['lease']}")).status_code == 200
    assert (await http.put(f"/v1/leases/{grants[1]['lease']}")).status_code == 410


@pytest.mark.second_stage
async def test_lease_is_free_after_its_ttl_and_not_before(http: Http) -> None:
    with measured() as lateness:
        began = time.monotonic()
        await http.acquire("a", ttl=1.5)
        told = time.monotonic()
        await http.acquire("a", wait=30)
        took = time.monotonic()
        assert took - began >= 1.5, "the next holder came before the lease had ended"
        assert took - told < 1.5 + 0.5 + 3 * lateness()


@pytest.mark.second_stage
async def test_lease_of_ten_seconds_is_free_after_ten_seconds(http: Http) -> None:
    with measured() as lateness:
        began = time.monotonic()
        await http.acquire("a", ttl=10)
        told = time.monotonic()
        await http.acquire("a", wait=30)
        assert time.monotonic() - began >= 10
        assert time.monotonic() - told < 10.5 + 3 * lateness()


@pytest.mark.second_stage
async def test_server_renews_no_lease_by_itself(http: Http) -> None:
    grant = await http.acquire("a", ttl=0.5)
    await asyncio.sleep(1)
    assert (await http.put(f"/v1/leases/{grant['lease']}")).json()["reason"] == "expired"


async def test_database_that_cannot_be_reached_is_answered_with_503() -> None:
    async with serving("postgresql://app@127.0.0.1:1/none") as http:
        for method, path in (
            ("POST", "/v1/locks/a"), ("GET", "/v1/locks"), ("PUT", "/v1/leases/x"), ("DELETE", "/v1/leases/x"),
            ("DELETE", "/v1/tickets/x"), ("GET", "/v1/locks/a/queue"),
        ):  # fmt: skip
            response = await http.request(method, path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1"), path
            assert "127.0.0.1" not in response.text


@pytest.mark.second_stage
async def test_database_that_fails_never_leads_to_a_grant() -> None:
    with private_server() as own:
        from dblock._runtime.target import resolve
        from dblock.admin import schema

        schema.install(resolve(own.url))
        async with serving(own.url, patience=1.0) as http:
            grant = await http.acquire("a")
            key = {"Idempotency-Key": "k"}
            own.stop()
            for response in (
                await http.post("/v1/locks/b", json={}),
                await http.post("/v1/locks/b", json={}, headers=key),
                await http.put(f"/v1/leases/{grant['lease']}"),
                await http.delete(f"/v1/leases/{grant['lease']}"),
                await http.get("/v1/locks"),
                await http.request("LOCK", "/v1/terraform/b", json={"ID": "1"}),
                await http.get("/readyz"),
            ):
                assert response.status_code == 503, response.text
                assert response.headers["retry-after"] == "1"
            assert (await http.get("/healthz")).status_code == 200


async def test_missing_schema_is_answered_with_503(bare_dsn: str) -> None:
    async with serving(bare_dsn) as http:
        assert (await http.post("/v1/locks/a", json={})).status_code == 503
        assert (await http.get("/readyz")).status_code == 503


async def test_path_below_the_prefix_is_found_with_and_without_it(dsn: str) -> None:
    async with serving(dsn, prefix="/db/locks") as http:
        assert (await http.get("/db/locks/v1/openapi.json")).json()["servers"] == [{"url": "/db/locks/v1"}]
        assert (await http.post("/db/locks/v1/locks/a%2Fb", json={})).json()["lock"] == "a/b"
        assert (await http.post("/v1/locks/a%2Fc", json={})).json()["lock"] == "a/c"
        assert (await http.get("/db/locks/healthz")).status_code == 200

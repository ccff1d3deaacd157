"""Requests that no client should send are refused, and none of them is answered with a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import psycopg
import pytest

from tests.dblock.server.conftest import Http

METHODS = ("GET", "POST", "PUT", "DELETE", "LOCK", "UNLOCK", "PATCH", "HEAD", "OPTIONS", "FOO")
WORDS = (
    "v1", "locks", "leases", "tickets", "terraform", "openapi.json", "queue", "break", "a", "", "%2F", "%00", "%FF",
    "%", "..", "%2e%2e", "x" * 600, "€", "a%0Ab", "healthz", "readyz", "metrics",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.1, 61, 1e308, -1e308, 10**30, "", "a", "\0", "\ud800", "x" * 9000, [], {}, [[]],
    {"a": "\0"}, "mutex", "read", "semaphore", "A" * 60, "1 day",
)  # fmt: skip
KEYS = (
    "name", "ttl", "wait", "holder", "meta", "kind", "permits", "ticket", "token", "reason", "now", "ID", "Who", "x",
)  # fmt: skip
QUERIES = ("?limit=x", "?limit=5&after=%00", "?pattern=%FF", "?ttl=nan", "?ttl=1e999", "?name=a", "?free=1&limit=1000")
HEADERS = (
    ("Idempotency-Key", "k"), ("Idempotency-Key", "x" * 300), ("Authorization", "Bearer x"),
    ("Authorization", "Basic !"), ("Authorization", "Basic " + "A" * 99), ("Origin", "http://["), ("Origin", "null"),
    ("Sec-Fetch-Site", "cross-site"), ("Host", "["), ("Host", ""), ("Content-Type", "text/plain"),
    ("Content-Type", "application/json; charset=utf-16"), ("X-Forwarded-For", "10.0.0.1"),
)  # fmt: skip


def valid(random: random.Random, lease: str, ticket: str) -> tuple[str, list[str], dict[str, Any]]:
    """Return a request that is right: its method, the parts of its path, and its body."""
    name = random.choice("abcd")
    return random.choice(
        (
            ("POST", ["locks", name], {"ttl": 0.2, "wait": 0}),
            ("POST", ["locks", name], {"kind": "semaphore", "permits": 2, "ttl": 0.2, "holder": "me", "meta": [1]}),
            ("POST", ["locks"], {"name": name, "ttl": 0.2}),
            ("POST", ["locks", "a"], {"ticket": ticket}),
            ("GET", ["locks"], {}),
            ("GET", ["locks", name], {}),
            ("GET", ["locks", name, "queue"], {}),
            ("POST", ["locks", name, "break"], {"token": 7, "reason": "stuck"}),
            ("PUT", ["leases", lease], {"ttl": 60}),
            ("GET", ["leases", lease], {}),
            ("DELETE", ["leases", ticket], {}),
            ("DELETE", ["tickets", lease], {}),
            ("LOCK", ["terraform", f"tf{name}"], {"ID": "1", "Who": "me"}),
            ("UNLOCK", ["terraform", f"tf{name}"], {"ID": "1", "Who": "me"}),
        )
    )


def fuzzed(random: random.Random, lease: str, ticket: str) -> dict[str, Any]:
    """Return a request that is right, or with up to three mistakes."""
    method, parts, asked = valid(random, lease, ticket)
    query, body = "", b""
    headers: dict[str, str] = {}
    spoiled = False
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        mistake = random.randrange(7)
        if mistake == 0:
            method = random.choice(METHODS)
        elif mistake == 1:
            parts = [*parts[: random.randrange(3)], random.choice(WORDS)]
        elif mistake == 2:
            asked = {**asked, random.choice(KEYS): random.choice(VALUES)}
        elif mistake == 3:
            asked = {key: value for key, value in asked.items() if random.random() < 0.5}
        elif mistake == 4:
            headers |= [random.choice(HEADERS)]
        elif mistake == 5:
            query = random.choice(QUERIES)
        else:
            spoiled = True
    if isinstance(asked.get("wait"), (int, float)) and asked["wait"] > 0.1:
        asked["wait"] = 0.01 if asked["wait"] <= 60 else 61
    if asked or spoiled:
        mutable = bytearray(json.dumps(asked).encode())
        if spoiled:
            mutable[random.randrange(len(mutable))] = random.randrange(256)
        body = bytes(mutable)
    return {"method": method, "url": f"/v1/{'/'.join(parts)}{query}", "content": body, "headers": headers}


@pytest.mark.second_stage
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "requests",
    [
        100,
        pytest.param(2000, marks=[pytest.mark.second_stage]),
        pytest.param(10_000, marks=pytest.mark.nightly),
    ],
)
async def test_fuzzed_requests_are_never_answered_with_500(
    requests: int, http: Http, owner: psycopg.Connection
) -> None:
    generator = random.Random(requests)
    http.event_hooks = {"response": []}
    grant = await http.acquire("a", ttl=600)
    ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
    seen: dict[int, int] = {}
    for number in range(requests):
        request = fuzzed(generator, grant["lease"], ticket)
        try:
            response = await http.request(**request)
        except (httpx.InvalidURL, UnicodeEncodeError, httpx.LocalProtocolError):
            continue  # the client itself refuses to send it
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        assert response.status_code not in (500, 503), (number, request, response.text)
        if response.status_code >= 400 and request["method"] != "HEAD":
            media = response.headers["content-type"]
            assert media == "application/problem+json" or (response.status_code, media) == (423, "application/json")
    assert sum(seen.values()) > requests * 0.9
    assert {200, 400, 403, 404, 405, 423} <= seen.keys()
    assert seen[200] > requests / 10

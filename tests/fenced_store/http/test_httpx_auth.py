"""HTTP: the caller's side, FencingAuth."""

from __future__ import annotations

import json

import httpx
import pytest

import dblock
from fenced_store import InvalidArgument, StaleTokenError
from fenced_store.http import FencingAuth
from tests.fenced_store.http.conftest import Web, fine, shows


async def test_auth_sends_the_token_of_a_lease_and_raises_when_refused(web: Web, dsn: str) -> None:
    client = web.serve(fine)
    async with dblock.AsyncClient(dsn) as locks:
        async with locks.lock("a") as lease:
            first = (await client.put("/things/a", auth=FencingAuth(lease))).json()
            again = (await client.put("/things/a", auth=FencingAuth(lease))).json()
            assert first["token"] == again["token"] == lease.token
            assert first["write"] < again["write"]
            await client.put("/things/a", headers=shows(lease.token + 1))
            with pytest.raises(StaleTokenError) as caught:
                await client.put("/things/a", auth=FencingAuth(lease))
            assert (caught.value.resource, caught.value.offered) == ("thing:a", lease.token)
            assert caught.value.stored == lease.token + 1
            assert caught.value.stored_at is not None
        with pytest.raises(dblock.LeaseLost):
            await client.put("/things/a", auth=FencingAuth(lease))


def test_auth_works_in_threads_and_with_another_auth() -> None:
    seen: list[httpx.Request] = []
    stale = {"type": "urn:fenced-store:stale-token", "resource": "r", "offered": 7, "stored": 8, "stored_at": None}
    kind = {"content-type": "application/problem+json"}
    answers = iter(
        [
            httpx.Response(200),
            httpx.Response(409, json=stale),  # not a problem document
            httpx.Response(409, headers=kind, json={"type": "about:blank", "title": "another application's"}),
            httpx.Response(409, headers=kind, text="not even a document"),
            httpx.Response(409, headers=kind, json={"type": "urn:fenced-store:stale-token"}),
            httpx.Response(409, headers=kind, json=[1]),
            httpx.Response(409, headers=kind, text=json.dumps(stale).replace("7", "Infinity")),
            httpx.Response(409, headers=kind, json=stale | {"numbers": [1]}),
            httpx.Response(409, headers=kind, json=stale),
        ]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return next(answers)

    auth = FencingAuth(7, httpx.BasicAuth("me", "secret"))
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://service", auth=auth) as client:
        assert [client.put("/").status_code for _ in range(8)] == [200] + [409] * 7
        with pytest.raises(StaleTokenError, match="refuses token 7: token 8"):
            client.put("/")
    assert {request.headers["fencing-token"] for request in seen} == {"7"}
    assert all(request.headers["authorization"].startswith("Basic ") for request in seen)
    assert len({request.headers["fencing-write"] for request in seen}) == 9


def test_auth_lets_another_auth_repeat_requests() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if "authorization" not in request.headers:
            challenge = 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'
            return httpx.Response(401, headers={"www-authenticate": challenge})
        return httpx.Response(200, text=request.headers["fencing-token"])

    auth = FencingAuth(7, httpx.DigestAuth("me", "secret"))
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert client.put("http://service/", auth=auth).text == "7"


def test_auth_refuses_objects_without_a_token() -> None:
    for fence in (0, None, "7", object()):
        with pytest.raises(InvalidArgument):
            FencingAuth(fence)  # type: ignore[arg-type]

"""Terraform's lock protocol, spoken by a client that does what the backend `http` does."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import psycopg
import pytest

from dblock.server.access import credential
from tests.dblock.server.conftest import Http, serving
from tests.support.proxy import Proxy


class Backend:
    """Locks and unlocks as the backend does: basic authentication, its own methods, its own description of a lock."""

    def __init__(self, http: Http, path: str = "/v1/terraform/prod%2Fnetwork", token: str = "") -> None:
        self._http = http
        self._path = path
        self._auth = httpx.BasicAuth("terraform", token) if token else None
        self.info: dict[str, Any] | None = None

    async def lock(self, who: str) -> str:
        """Return the ID of the lock, or raise with the description of the holder."""
        info = {
            "ID": str(uuid.uuid4()),
            "Operation": "OperationTypeApply",
            "Info": "",
            "Who": who,
            "Version": "1.9.0",
            "Created": "2026-01-02T03:04:05.678Z",
            "Path": "",
        }
        response = await self._request("LOCK", info)
        if response.status_code in (409, 423):
            raise Locked(json.loads(response.content))
        assert response.status_code == 200, response.text
        self.info = info
        return str(info["ID"])

    async def unlock(self, identity: str) -> httpx.Response:
        """Unlock. After a lock of this process with its description, else, as force-unlock does, with the ID alone."""
        empty = dict.fromkeys(("Operation", "Info", "Who", "Version", "Path"), "")
        info = self.info or {**empty, "Created": "0001-01-01T00:00:00Z"}
        return await self._request("UNLOCK", {**info, "ID": identity})

    async def _request(self, method: str, info: dict[str, Any]) -> httpx.Response:
        content = json.dumps(info).encode()
        headers = {"Content-Type": "application/json"}
        return await self._http.request(method, self._path, content=content, headers=headers, auth=self._auth)


class Locked(Exception):
    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info


async def test_second_run_sees_the_description_of_the_first(http: Http, owner: psycopg.Connection) -> None:
    first, second = Backend(http), Backend(http)
    identity = await first.lock("alice@laptop")
    with pytest.raises(Locked) as refused:
        await second.lock("bob@ci")
    assert refused.value.info == first.info
    assert (await first.unlock(identity)).status_code == 200
    await second.lock("bob@ci")
    assert owner.execute("SELECT name, holder FROM list_locks()").fetchall() == [
        ("prod/network", "terraform bob@ci (anonymous)")
    ]


async def test_run_that_repeats_its_request_finds_its_own_lock(http: Http) -> None:
    backend = Backend(http)
    await backend.lock("alice")
    assert backend.info is not None
    assert (await backend._request("LOCK", backend.info)).status_code == 200


async def test_lock_of_terraform_lasts_for_the_ttl_in_its_address(http: Http, owner: psycopg.Connection) -> None:
    await Backend(http).lock("alice")
    await Backend(http, "/v1/terraform/b?ttl=90").lock("alice")
    ttls = "SELECT name, date_part('epoch', expires_at - granted_at) FROM list_locks() ORDER BY name"
    assert owner.execute(ttls.encode()).fetchall() == [("b", 90), ("prod/network", 86400)]
    assert (await http.request("LOCK", "/v1/terraform/c?ttl=x", json={"ID": "1"})).status_code == 400


async def test_forced_unlock_breaks_the_lock_and_is_recorded(http: Http, owner: psycopg.Connection) -> None:
    holder, operator = Backend(http), Backend(http)
    identity = await holder.lock("alice")
    assert (await operator.unlock("another ID")).status_code == 423
    assert (await operator.unlock(identity)).status_code == 200
    ((event, reason),) = owner.execute("SELECT event, reason FROM list_history()").fetchall()
    assert (event, reason) == ("forced_now", "terraform force-unlock")
    assert (await holder.unlock(identity)).status_code == 410
    await operator.lock("bob")


async def test_forced_unlock_needs_the_role_break(dsn: str) -> None:
    lock, breaks = "lock-0123456789abcdef", "break-0123456789abcdef"
    async with serving(dsn, credentials=(credential("ci", "lock", lock), credential("op", "break", breaks))) as http:
        identity = await Backend(http, token=lock).lock("alice")
        assert (await Backend(http, token=lock).unlock(identity)).status_code == 403
        assert (await Backend(http, token=breaks).unlock(identity)).status_code == 200
        assert (await Backend(http).unlock(identity)).status_code == 401


async def test_unlock_with_a_copied_description_needs_the_role_break(dsn: str, owner: psycopg.Connection) -> None:
    """A refused caller sees the whole description of the run that holds the lock."""
    tokens = {name: f"{name}-0123456789abcdef" for name in ("alice", "mallory")}
    callers = tuple(credential(name, "lock", token) for name, token in tokens.items())
    async with serving(dsn, credentials=callers) as http:
        first, second = (Backend(http, token=token) for token in tokens.values())
        identity = await first.lock("alice")
        with pytest.raises(Locked) as refused:
            await second.lock("mallory (alice)")
        second.info = refused.value.info
        assert (await second.unlock(identity)).status_code == 403
        assert owner.execute("SELECT holder FROM holder('prod/network')").fetchone() == ("terraform alice (alice)",)
        assert (await first.unlock(identity)).status_code == 200


async def test_terraform_and_the_api_share_one_lock(http: Http) -> None:
    grant = await http.acquire("prod/network", holder="a program")
    with pytest.raises(Locked) as refused:
        await Backend(http).lock("alice")
    assert refused.value.info["Who"] == "a program"
    await http.delete(f"/v1/leases/{grant['lease']}")
    await Backend(http).lock("alice")
    assert (await http.post("/v1/locks/prod%2Fnetwork", json={})).status_code == 423


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"ID": 7}', b'{"ID": ""}', b'{"ID": "' + b"x" * 9000 + b'"}'])
async def test_body_without_an_id_is_refused(body: bytes, http: Http) -> None:
    for method in ("LOCK", "UNLOCK"):
        assert (await http.request(method, "/v1/terraform/a", content=body)).status_code == 400


async def test_lock_whose_replies_were_lost_is_given_back(dsn: str, owner: psycopg.Connection) -> None:
    """The next run has another ID, and would not find the grant."""
    with Proxy(dsn) as proxy:
        async with serving(proxy.dsn) as http:
            await http.get("/v1/locks")
            proxy.lose_reply_to(b"prod/network", times=2)
            response = await Backend(http)._request("LOCK", {"ID": "the first run"})
            assert (response.status_code, proxy.lost) == (503, 2)
            await Backend(http).lock("the next run")

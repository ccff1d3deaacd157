"""Who may do what: tokens, a proxy's header, foreign sites, and the database role behind all of them."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import logging
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import conninfo

from dblock.errors import ConfigurationError, InvalidArgument
from dblock.server.access import credential, parse_credentials
from dblock.server.settings import Settings
from tests.dblock.server.conftest import Http, serving
from tests.support.shell import Shell

SEE, LOCK, BREAK = (f"{role}-token-0123456789" for role in ("see", "lock", "break"))
CREDENTIALS = tuple(
    credential(f"user-{token.split('-')[0]}", token.split("-")[0], token) for token in (SEE, LOCK, BREAK)
)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anyone:{token}".encode()).decode()}


@pytest.mark.parametrize("send", [bearer, basic])
async def test_role_of_a_token_limits_what_its_caller_may_do(send: Any, dsn: str) -> None:
    async with serving(dsn, credentials=CREDENTIALS) as http:
        token = (await http.post("/v1/locks/a", json={}, headers=send(LOCK))).json()["token"]
        breaks = {"token": token, "reason": "stuck"}
        allowed = {
            SEE: (200, 403, 403),
            LOCK: (200, 423, 403),
            BREAK: (200, 423, 200),
            "wrong-token-0123456789": (401, 401, 401),
            "": (401, 401, 401),
        }
        for sent, statuses in allowed.items():
            headers = send(sent)
            got = (
                (await http.get("/v1/locks", headers=headers)).status_code,
                (await http.post("/v1/locks/a", json={}, headers=headers)).status_code,
                (await http.post("/v1/locks/a/break", json=breaks, headers=headers)).status_code,
            )
            assert got == statuses, sent


async def test_caller_of_a_token_is_named_as_holder_and_as_actor(dsn: str, owner: psycopg.Connection) -> None:
    async with serving(dsn, credentials=CREDENTIALS) as http:
        body = {"holder": "worker (user-break)"}
        grant = (await http.post("/v1/locks/a", json=body, headers=bearer(LOCK))).json()
        assert owner.execute("SELECT holder FROM holder('a')").fetchone() == ("worker (user-break) (user-lock)",)
        breaks = {"token": grant["token"], "reason": "stuck"}
        await http.post("/v1/locks/a/break", json=breaks, headers=bearer(BREAK))
        ((actor,),) = owner.execute("SELECT actor FROM list_history('a')").fetchall()
        assert actor.startswith("user-break over HTTP as ")


async def test_requests_without_a_token_are_refused_everywhere(dsn: str) -> None:
    async with serving(dsn, credentials=CREDENTIALS) as http:
        for method, path in (
            ("GET", "/v1/locks"), ("POST", "/v1/locks/a"), ("PUT", "/v1/leases/a"), ("DELETE", "/v1/leases/a"),
            ("DELETE", "/v1/tickets/a"), ("LOCK", "/v1/terraform/a"), ("POST", "/v1/locks/a/break"),
        ):  # fmt: skip
            response = await http.request(method, path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith("Bearer")
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/v1/openapi.json")).status_code == 200


async def test_tokens_are_compared_in_constant_time(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is compared with all of them, and with a function whose time does not depend on the contents."""
    compared = []
    original = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return bool(original(one, other))

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with serving(dsn, credentials=CREDENTIALS) as http:
        for token in (SEE, BREAK, "wrong"):
            compared.clear()
            await http.get("/v1/nothing-there", headers=bearer(token))
            await http.get("/v1/leases/x", headers=bearer(token))
            assert len([one for one in compared if len(one[0]) == 32]) == len(CREDENTIALS)


@pytest.mark.parametrize(("peer", "status"), [("10.1.2.3", 200), ("::ffff:10.1.2.3", 200), ("192.168.0.1", 401)])
async def test_header_with_the_user_is_believed_only_from_the_proxy(peer: str, status: int, dsn: str) -> None:
    settings = Settings(
        dsn=dsn,
        proxy_header="X-Forwarded-User",
        proxy_networks=(ipaddress.ip_network("10.0.0.0/8"),),
        proxy_role="lock",
    )
    http = Http(settings)
    http._transport = httpx.ASGITransport(http.app, client=(peer, 1234))
    try:
        headers = {"X-Forwarded-User": "alice", "X-Forwarded-For": "10.1.2.3", "X-Real-IP": "10.1.2.3"}
        assert (await http.post("/v1/locks/a", json={}, headers=headers)).status_code == status
        assert (await http.post("/v1/locks/b", json={})).status_code == 401, "the proxy names no user"
        if status == 200:
            assert (await http.get("/v1/locks/a", headers=headers)).json()["holder"] == "alice"
            breaks = {"token": 1, "reason": "x"}
            assert (await http.post("/v1/locks/a/break", json=breaks, headers=headers)).status_code == 403
    finally:
        await http.aclose()


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:81"},
        {"Host": "evil.example"},
    ],
)
async def test_write_from_another_site_is_refused(
    headers: dict[str, str], http: Http, owner: psycopg.Connection
) -> None:
    for method, path in (("POST", "/v1/locks/a"), ("LOCK", "/v1/terraform/a"), ("PUT", "/v1/leases/a")):
        response = await http.request(method, path, headers=headers, json={"ID": "x"} if method == "LOCK" else {})
        assert (response.status_code, response.json()["type"]) == (403, "urn:dblock:problem:cross-site")
    assert owner.execute("SELECT FROM distributed_locks").fetchall() == []


async def test_write_from_the_servers_own_pages_is_accepted(http: Http) -> None:
    for headers in (
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "none"},
        {"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"},
    ):
        assert (await http.post("/v1/locks/a", json={}, headers=headers)).status_code in (200, 423)


async def test_public_host_name_is_accepted_as_origin(dsn: str) -> None:
    async with serving(dsn, credentials=CREDENTIALS, hosts=("locks.example",)) as http:
        headers = {**bearer(LOCK), "Origin": "https://locks.example", "Host": "10.0.0.1:8080"}
        assert (await http.post("/v1/locks/a", json={}, headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org", ""])
def test_server_does_not_listen_beyond_loopback_without_authentication(host: str) -> None:
    with pytest.raises(InvalidArgument, match="without authentication"):
        Settings(host=host)
    Settings(host=host, unprotected=True)
    Settings(host=host, credentials=CREDENTIALS)


def test_header_with_the_user_needs_the_addresses_of_the_proxy() -> None:
    with pytest.raises(InvalidArgument, match="Give both"):
        Settings(proxy_header="X-User")
    with pytest.raises(InvalidArgument, match="Give both"):
        Settings(proxy_networks=(ipaddress.ip_network("10.0.0.0/8"),))


def test_command_refuses_to_listen_beyond_loopback(tmp_path: Path) -> None:
    shell = Shell("postgresql://nowhere.invalid/x", tmp_path)
    done = shell.run_here("serve", "--listen", "0.0.0.0:0")
    assert done.code == 2
    assert "--i-know" in done.err


def test_command_reads_tokens_from_a_file_and_never_prints_one(tmp_path: Path) -> None:
    shell = Shell("postgresql://nowhere.invalid/x", tmp_path)
    (tmp_path / "tokens").write_text("alice lock\nbob see secret-token-0123456789\n")
    done = shell.run_here("serve", "--tokens", "tokens")
    assert done.code == 78
    assert "Line 1 of tokens" in done.err
    (tmp_path / "tokens").write_text("bob king secret-token-0123456789\n")
    assert "secret" not in shell.run_here("serve", "--tokens", "tokens").err
    assert "secret" not in shell.run_here("serve", env={"DBLOCK_SERVER_TOKENS": "bob see secret"}).err
    help_text = shell.run_here("serve", "--help").out
    assert "--token " not in help_text, "an argument would be visible in ps"


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "a see", "a see b c", "a root 0123456789abcdef", "a see short"])
def test_wrong_credentials_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_credentials(text, "the file")


def test_credentials_are_read_line_by_line() -> None:
    found = parse_credentials(f"# team\nalice see {SEE}\n\n  bob   break\t{BREAK}\n", "the file")
    assert [one.caller for one in found] == [("alice", "see"), ("bob", "break")]
    assert SEE not in repr(found)


async def test_database_role_has_the_last_word(dsn: str, role: str, owner: psycopg.Connection) -> None:
    own = conninfo.make_conninfo(dsn, user=role, password="app")
    async with serving(own) as http:
        assert (await http.post("/v1/locks/a", json={})).status_code == 403
    from dblock._runtime.target import resolve
    from dblock.admin import schema

    schema.grant(resolve(dsn), role)
    async with serving(own) as http:
        grant = await http.acquire("a")
        assert (await http.get("/v1/locks")).status_code == 403
        breaks = {"token": grant["token"], "reason": "x"}
        assert (await http.post("/v1/locks/a/break", json=breaks)).status_code == 403
        assert (await http.delete(f"/v1/leases/{grant['lease']}")).status_code == 204
        refusal = (await http.get("/v1/locks")).text
        assert role not in refusal


async def test_log_has_neither_leases_nor_tickets_nor_tokens(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(dsn, credentials=CREDENTIALS, headers=bearer(LOCK)) as http:
        grant = await http.acquire("a")
        ticket = (await http.post("/v1/locks/a", json={"wait": 0.05})).json()["ticket"]
        await http.put(f"/v1/leases/{grant['lease']}")
        await http.delete(f"/v1/tickets/{ticket}")
    # httpx logs the addresses that it asks for, and is not the server.
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("dblock", "uvicorn")))
    assert "PUT /leases/{lease} 200" in said
    for secret in (grant["lease"], ticket, LOCK, str(http.service.database.runtime.installation)):
        assert secret not in said


async def test_installation_id_that_signs_is_never_shown(http: Http) -> None:
    grant = await http.acquire("a")
    installation = http.service.database.runtime.installation
    assert len(installation) == 36
    for path in ("/v1/locks", "/v1/locks/a", "/v1/openapi.json", f"/v1/leases/{grant['lease']}", "/readyz"):
        assert installation not in (await http.get(path)).text

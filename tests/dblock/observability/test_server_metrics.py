"""/metrics of the HTTP server: the database's values, its own, and what it says when the database is away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psycopg
import pytest

import dblock
from dblock.observability import catalogue
from dblock.server import metrics
from dblock.server.access import parse_credentials
from dblock.server.api.openapi import OPERATIONS
from dblock.server.app import create_app
from dblock.server.settings import Settings
from tests.dblock.observability.test_metrics import lint, values
from tests.support.eventually import eventually_async

TOKENS = "watcher see 0123456789abcdef\nworker lock abcdef0123456789"


@asynccontextmanager
async def serving(dsn: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Settings(dsn, **options))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            yield client
    finally:
        await app.state.service.close()


async def test_metrics_show_the_database_and_the_requests(dsn: str, client: dblock.Client) -> None:
    with client.lock("order:1"):
        async with serving(dsn) as server:
            assert (await server.post("/v1/locks/order%3A2", json={"ttl": 30})).status_code == 200
            assert (await server.post("/v1/locks/order%3A1", json={"wait": 0})).status_code == 423
            assert (await server.get("/nowhere")).status_code == 404
            reply = await server.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = values(reply.text)
    assert found["dblock_database_up{}"] == 1
    assert found["dblock_held{group=order}"] == 2
    assert found["dblock_http_requests_total{code=2xx,route=/v1/locks/{name}}"] == 1
    assert found["dblock_http_requests_total{code=4xx,route=/v1/locks/{name}}"] == 1
    assert found["dblock_http_requests_total{code=4xx,route=other}"] == 1
    assert found["dblock_http_request_seconds_count{}"] == 3
    assert found["dblock_acquire_wait_seconds_count{group=order,outcome=granted}"] == 1
    assert lint(reply.text) == []


async def test_metrics_count_waits_and_handoffs_over_http(dsn: str, owner: psycopg.Connection) -> None:
    async with serving(dsn) as server:
        held = (await server.post("/v1/locks/order%3A1", json={"ttl": 30})).json()
        queued = await server.post("/v1/locks/order%3A1", json={"wait": 0.05})
        assert (await server.delete(f"/v1/tickets/{queued.json()['ticket']}")).status_code == 204
        waiting = asyncio.create_task(server.post("/v1/locks/order%3A1", json={"wait": 60}, timeout=90))
        await until_queued(owner, 1)
        leaving = asyncio.create_task(server.post("/v1/locks/order%3A1", json={"wait": 60}, timeout=90))
        await until_queued(owner, 2)
        leaving.cancel()
        await until_queued(owner, 1)
        assert (await server.delete(f"/v1/leases/{held['lease']}")).status_code == 204
        assert (await waiting).status_code == 200
        found = values((await server.get("/metrics")).text)
    for outcome, count in (("granted", 2), ("timeout", 1), ("cancelled", 1)):
        assert found[f"dblock_acquire_wait_seconds_count{{group=order,outcome={outcome}}}"] == count
    assert found["dblock_handoff_seconds_count{}"] == 1


async def until_queued(owner: psycopg.Connection, count: int) -> None:
    """Wait until so many requests wait for order:1."""
    waiters = "SELECT count(*) FROM list_waiters('order:1')"
    await eventually_async(lambda: owner.execute(waiters).fetchone() == (count,), f"{count} waiters")


async def test_metrics_count_a_hold_where_its_client_releases(dsn: str, owner: psycopg.Connection) -> None:
    """The lease may come from another server, so the database says for how long the lock was held."""
    async with serving(dsn) as first, serving(dsn) as second:
        held = (await first.post("/v1/locks/order%3A1", json={})).json()
        permit = (await first.post("/v1/locks/gpu", json={"kind": "semaphore", "permits": 2})).json()
        info = {"ID": "1", "Operation": "apply", "Who": "ann", "Created": "2026-01-02T03:04:05Z"}
        assert (await first.request("LOCK", "/v1/terraform/prod", json=info)).status_code == 200
        assert (await first.request("LOCK", "/v1/terraform/prod", json={**info, "ID": "2"})).status_code == 423
        owner.execute("UPDATE distributed_locks SET granted_at = granted_at - interval '100 s'")
        for lease in (held["lease"], permit["lease"]):
            assert (await second.delete(f"/v1/leases/{lease}")).status_code == 204
            assert (await second.delete(f"/v1/leases/{lease}")).status_code == 410, "what is over is not counted again"
        assert (await second.request("UNLOCK", "/v1/terraform/prod", json=info)).status_code == 200
        found = values((await second.get("/metrics")).text)
        tried = values((await first.get("/metrics")).text)
    for group in ("order", "gpu", "prod"):
        assert found[f"dblock_hold_seconds_count{{group={group}}}"] == 1
        assert found[f"dblock_hold_seconds_sum{{group={group}}}"] >= 100
    assert tried["dblock_acquire_wait_seconds_count{group=prod,outcome=granted}"] == 1
    assert tried["dblock_acquire_wait_seconds_count{group=prod,outcome=busy}"] == 1
    assert not [name for name in tried if name.startswith("dblock_hold_seconds_count")]


async def test_metrics_are_served_without_the_database() -> None:
    async with serving("postgresql://127.0.0.1:1/none?connect_timeout=2", patience=1.0) as server:
        reply = await server.get("/metrics")
    assert reply.status_code == 200
    found = values(reply.text)
    assert found["dblock_database_up{}"] == 0
    assert not [name for name in found if name.startswith(("dblock_held", "dblock_waiting"))]


async def test_database_is_queried_once_a_second_for_all_scrapers(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "ASK_EVERY", 3600.0)
    async with serving(dsn) as server:
        assert "dblock_held" not in "".join(values((await server.get("/metrics")).text))
        owner.execute("SELECT try_acquire('a')")
        assert "dblock_held{group=a}" not in values((await server.get("/metrics")).text)
        monkeypatch.setattr(metrics, "ASK_EVERY", 0.0)
        assert values((await server.get("/metrics")).text)["dblock_held{group=a}"] == 1


async def test_metrics_need_the_role_see_unless_they_are_open(dsn: str) -> None:
    credentials = parse_credentials(TOKENS, "test")
    async with serving(dsn, credentials=credentials) as server:
        assert (await server.get("/metrics")).status_code == 401
        headers = {"Authorization": "Bearer 0123456789abcdef"}
        assert (await server.get("/metrics", headers=headers)).status_code == 200
    async with serving(dsn, credentials=credentials, open_metrics=True) as server:
        assert (await server.get("/metrics")).status_code == 200


async def test_labels_of_requests_are_bounded_for_any_path(dsn: str) -> None:
    async with serving(dsn) as server:
        for number in range(50):
            await server.request("BREW", f"/x{number}")
            await server.get(f"/v1/x/{number}")
            await server.get(f"/v1/leases/{number}")
            await server.get(f"/{'%ff'}{number}")
        found = values((await server.get("/metrics")).text)
    routes = {name for name in found if name.startswith("dblock_http_requests_total")}
    assert len(routes) < 10


def test_series_of_a_server_stay_below_two_thousand() -> None:
    routes = {operation.path for operation in OPERATIONS} | {*metrics.PAGES, "other"}
    own = len(routes) * len(metrics.CODES) + len(metrics.REQUEST_SECONDS.buckets) + 3
    assert own + sum(metric.most_series() for metric in catalogue.METRICS) < 2_000


async def test_metrics_work_under_a_prefix(dsn: str) -> None:
    async with serving(dsn, prefix="/locks") as server:
        await server.get("/locks/v1/openapi.json")
        found = values((await server.get("/locks/metrics")).text)
    assert found["dblock_http_requests_total{code=2xx,route=/v1/openapi.json}"] == 1


def test_server_needs_no_metrics_library() -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = sys.modules['opentelemetry'] = None\n"
        "from dblock.server.app import create_app; from dblock.server.settings import Settings\n"
        "create_app(Settings('postgresql://127.0.0.1:1/none')); print('ok')"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "ok\n"

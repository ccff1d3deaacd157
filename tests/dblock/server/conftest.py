"""Servers to test: in this process, without a socket, or as the program that a user starts.

Every answer of a server in this process is compared with the OpenAPI document.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from dblock.server.api.openapi import OPERATIONS, openapi
from dblock.server.api.operations import find
from dblock.server.app import create_app
from dblock.server.problems import Problem
from dblock.server.service import Service
from dblock.server.settings import Settings
from tests.support.shell import Shell

Start = Callable[..., Any]

RECORD_GRANTS = """
CREATE TABLE public.grants (name text, token bigint);
CREATE FUNCTION public.record_grant() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO public.grants VALUES (new.name, new.token); RETURN NULL; END $$;
CREATE TRIGGER record_grant AFTER UPDATE ON distributed_locks FOR EACH ROW
WHEN (new.token <> old.token) EXECUTE FUNCTION public.record_grant();
"""
"""Records every grant. The history keeps only the newest events of each lock."""


class Http(httpx.AsyncClient):
    """A client of a server in this process, which it can also look into."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        app = create_app(settings)
        self.app = app
        self.service: Service = app.state.service
        options.setdefault("base_url", "http://localhost")
        super().__init__(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            event_hooks={"response": [check_answer]},
            timeout=90,
            **options,
        )

    async def acquire(self, name: str, **asked: Any) -> dict[str, Any]:
        """Acquire a lock that must be granted."""
        response = await self.post(f"/v1/locks/{quoted(name)}", json=asked)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def aclose(self) -> None:
        await super().aclose()
        await self.service.close()


def quoted(name: str) -> str:
    """Return a name as a part of a path."""
    return "".join(f"%{byte:02X}" for byte in name.encode())


async def check_answer(response: httpx.Response) -> None:
    """Compare an answer of the API with the OpenAPI document."""
    request = response.request
    raw = request.url.raw_path.partition(b"?")[0]
    if not raw.startswith(b"/v1/"):
        return
    await response.aread()
    assert response.headers["x-content-type-options"] == "nosniff"
    try:
        operation, _ = find(OPERATIONS, request.method, raw.removeprefix(b"/v1/").split(b"/"))
    except Problem:
        assert response.headers["content-type"] == "application/problem+json"
        return
    document = openapi()
    method = request.method.lower()
    described = document["paths"][operation.path]
    described = described.get(method) or described[f"x-{method}"]
    answer = described["responses"].get(str(response.status_code))
    assert answer is not None, f"{request.method} {operation.path} answers {response.status_code}: {response.text}"
    if "content" not in answer:
        assert response.content == b""
        return
    ((media, content),) = answer["content"].items()
    assert response.headers["content-type"] == media
    schema = {**content["schema"], "components": document["components"]}
    Draft202012Validator(schema).validate(response.json())


@pytest.fixture
async def http(dsn: str) -> AsyncIterator[Http]:
    """A server without authentication, on the test's database."""
    async with serving(dsn) as client:
        yield client


@asynccontextmanager
async def serving(dsn: str, headers: dict[str, str] | None = None, **settings: Any) -> AsyncIterator[Http]:
    """Run a server in this process. Its tickets last longer than usual, so that a slow machine loses no position."""
    settings.setdefault("ticket_ttl", 120.0)
    client = Http(Settings(dsn=dsn, **settings), headers=headers)
    try:
        yield client
    finally:
        await client.aclose()


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def client(self, **options: Any) -> httpx.AsyncClient:
        """Return a client of the server."""
        return httpx.AsyncClient(base_url=self.address, timeout=90, limits=httpx.Limits(max_connections=400), **options)


@pytest.fixture
def start_server(dsn: str, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts `dblock serve` on the test's database, at a port of its own."""
    shell = Shell(dsn, tmp_path)

    def start(*options: str, **more: Any) -> Served:
        process = shell.start("serve", "--listen", "127.0.0.1:0", *options, **more)
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving at (http://\S+)", line):
                return Served(process, found[1])
        raise AssertionError(f"the server did not start: {said}")

    yield start
    shell.close()

"""A service of four workers: one of them prepares the start, and a lock lets one request at a time close an invoice.

    DBLOCK_DSN=postgresql://… RELEASE=v42 uvicorn --workers 4 examples.fastapi_locks:app     # as a service
    python examples/fastapi_locks.py                                           # the service and its callers

Needs fastapi, uvicorn and httpx.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import httpx
from fastapi import FastAPI

import dblock
from dblock import embedded
from dblock.admin import schema
from dblock.integrations.fastapi import locked, open_client, run_at_start_up

ROOT = Path(__file__).parents[1]


def fill_cache() -> None:
    print("the cache is filled", flush=True)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with open_client(app) as client:  # $DBLOCK_DSN
        await run_at_start_up(client, "fill-cache", os.environ["RELEASE"], fill_cache)
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/invoices/{invoice_id}/close")
async def close(invoice_id: int, lease: Annotated[dblock.AsyncLease, locked("invoice:{invoice_id}")]) -> dict[str, int]:
    await asyncio.sleep(0.5)  # the work; pass lease.token to every resource that it writes to
    return {"closed": invoice_id}


async def send_requests(address: str) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=30) as caller:

        async def close_invoice(number: int) -> int:
            return (await caller.post(f"/invoices/{number}/close")).status_code

        same = await asyncio.gather(*(close_invoice(42) for _ in range(4)))
        print("four requests close invoice 42 at once:", sorted(same))
        others = await asyncio.gather(*(close_invoice(number) for number in range(4)))
        print("four requests close one invoice each:", others)
        print("after that, invoice 42 is free again:", await close_invoice(42))


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--workers", "4", "--port", str(port), "--log-level", "warning"]
    workers = subprocess.Popen(
        [*command, "examples.fastapi_locks:app"], env={**os.environ, "DBLOCK_DSN": dsn, "RELEASE": "v42"}, cwd=ROOT
    )
    try:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as caller:
            caller.get(address, timeout=30)  # once a worker listens
        asyncio.run(send_requests(address))
    finally:
        workers.terminate()
        workers.wait()


if __name__ == "__main__":
    main()

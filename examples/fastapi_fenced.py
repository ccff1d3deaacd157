"""An HTTP service that refuses requests of a stale lock holder with 409.

The caller sends its token in the header `Fencing-Token`. The middleware checks the token against the fence of the
resource, and holds the fence until the handler's transaction has committed.

    DBLOCK_DSN=postgresql://… uvicorn examples.fastapi_fenced:app      # as a service
    python examples/fastapi_fenced.py                                  # the service and its callers in one process

Needs fastapi, uvicorn and httpx.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import httpx
import psycopg
import uvicorn
from fastapi import FastAPI, Request
from sqlalchemy import text

import dblock
import fenced_store
from dblock import embedded
from dblock.admin import schema
from fenced_store.http import FencingMiddleware

DSN = os.environ.get("DBLOCK_DSN") or embedded.start().url

app = FastAPI()
app.add_middleware(FencingMiddleware, fences=DSN, rules={"PUT /ledgers/{ledger}": "example:ledger:{ledger}"})


@app.put("/ledgers/{ledger}")
async def put(ledger: str, total: int, request: Request) -> dict[str, int]:
    # Write on the connection that holds the fence: the middleware commits it, or nothing was stored.
    await request.state.fencing.connection.execute(
        text(
            "INSERT INTO example_ledgers VALUES (:ledger, :total) "
            "ON CONFLICT (ledger) DO UPDATE SET total = excluded.total"
        ),
        {"ledger": ledger, "total": total},
    )
    return {"total": total}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Run the service in a thread; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def send(http: httpx.Client, token: int, total: int) -> int:
    """Write as the holder of this token; return the HTTP status."""
    reply = http.put("/ledgers/7", params={"total": total}, headers={"Fencing-Token": str(token)})
    return reply.status_code


def main() -> None:
    schema.install(DSN)
    fenced_store.install(DSN)
    with psycopg.connect(DSN) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS example_ledgers (ledger text PRIMARY KEY, total bigint)")

    with dblock.Client(DSN) as client, serving() as address, httpx.Client(base_url=address) as http:
        with client.lock("example:ledger:7") as previous:
            print("the holder writes:", send(http, previous.token, 100))
        with client.lock("example:ledger:7") as newer:
            print("the next holder writes:", send(http, newer.token, 150))
        print("the previous holder writes late:", send(http, previous.token, 130))

    with psycopg.connect(DSN) as connection:
        connection.execute("DROP TABLE example_ledgers")


if __name__ == "__main__":
    main()

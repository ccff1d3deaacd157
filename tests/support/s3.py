"""A local S3 server in a separate process: moto, restricted to one request at a time.

S3 compares and replaces atomically. moto compares and then replaces, with one thread per request, so that two requests
could both succeed. A lock around each request makes moto atomic too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from obstore.store import S3Store

from tests.support.orphans import die_with_parent


@contextmanager
def running_s3() -> Iterator[str]:
    """Run a server, and yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3"], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def new_bucket(address: str) -> str:
    """Create a bucket, and return its name."""
    name = f"bucket-{uuid.uuid4().hex[:16]}"
    assert httpx.put(f"{address}/{name}", timeout=20).status_code == 200
    return name


def bucket(address: str, name: str) -> S3Store:
    """Return a bucket as a store of obstore."""
    return S3Store(
        name,
        endpoint=address,
        access_key_id="nobody",
        secret_access_key="nothing",
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def accepted_in_order(address: str, path: str) -> list[tuple[int, int]]:
    """Return the pairs under which an object, /bucket/path, was stored, in the order of the server."""
    accepted = httpx.get(f"{address}/accepted", timeout=20).json()
    tags = [json.loads(tag) for stored_path, tag in accepted if stored_path == path]
    return [(tag["token"], tag["write"]) for tag in tags]


def main() -> None:
    """Serve until killed."""
    die_with_parent()
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - the name it has there
            pass

    one_by_one = threading.Lock()
    moto = DomainDispatcherApplication(create_backend_app)

    accepted: list[tuple[str, str]] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] == "/accepted":
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(accepted).encode()]

        def noted(status: str, headers: Any, *more: Any) -> Any:
            tag = environ.get("HTTP_X_AMZ_META_FENCE")
            if environ["REQUEST_METHOD"] == "PUT" and status.startswith("200") and tag:
                accepted.append((environ["PATH_INFO"], tag))
            return start_response(status, headers, *more)

        with one_by_one:
            return [b"".join(moto(environ, noted))]

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

"""Serve a fake Google Cloud Storage, as far as obstore uses it: objects, generations, and conditions on them.

The fake shows which requests obstore sends, and that these requests suffice. It cannot show how Google's service
replies to them.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from obstore.store import GCSStore
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's name for it
        pass


class _Bucket:
    def __init__(self) -> None:
        self._objects: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        self._generations = itertools.count(1)
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._lock:
            return self._respond(Request(environ))(environ, start_response)

    def _respond(self, request: Request) -> Response:
        generation, body, kept = self._objects.get(request.path, (0, b"", {}))
        if request.method == "PUT":
            condition = request.headers.get("x-goog-if-generation-match")
            if condition is not None and int(condition) != generation:
                return Response("<Error><Code>PreconditionFailed</Code></Error>", 412)
            kept = {
                name: value
                for name, value in request.headers.items()
                if name.lower().startswith(("x-goog-meta-", "content-type"))
            }
            generation, body = next(self._generations), request.get_data()
            self._objects[request.path] = (generation, body, kept)
            return Response("", headers={"ETag": f'"{generation}"', "x-goog-generation": str(generation)})
        if not generation:
            return Response("<Error><Code>NoSuchKey</Code></Error>", 404)
        if request.method == "DELETE":
            del self._objects[request.path]
            return Response("", 204)
        headers = {
            "ETag": '"equal for all objects, so that only the generation tells them apart"',
            "x-goog-generation": str(generation),
            "Last-Modified": "Sun, 15 Nov 2026 12:00:00 GMT",
        }
        return Response(body, headers=headers | kept)


@contextmanager
def running_gcs() -> Iterator[GCSStore]:
    """Run the fake service in a thread, and yield its only bucket."""
    server = make_server("127.0.0.1", 0, _Bucket(), threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    account = {
        "gcs_base_url": f"http://127.0.0.1:{server.server_port}",
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    try:
        yield GCSStore("bucket", service_account_key=json.dumps(account), client_options={"allow_http": True})
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()

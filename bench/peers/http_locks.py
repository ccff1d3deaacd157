"""A pair over `dblock serve`, and the empty requests that it is compared with."""

from __future__ import annotations

import http.client
import json
import urllib.parse

from bench.harness.contender import Release


class _Requests:
    def __init__(self, where: str) -> None:
        self._web = http.client.HTTPConnection(where.removeprefix("http://"))

    def ask(self, method: str, path: str, status: int, body: bytes | None = None) -> bytes:
        self._web.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        reply = self._web.getresponse()
        content = reply.read()
        assert reply.status == status, (reply.status, content)
        return content

    def close(self) -> None:
        self._web.close()


class EmptyRequests(_Requests):
    """Two requests to /healthz, which the server answers without the database."""

    def acquire(self, name: str) -> Release:
        self.ask("GET", "/healthz", 200)
        return lambda: self.ask("GET", "/healthz", 200)


class Http(_Requests):
    """POST /v1/locks/{name} and DELETE /v1/leases/{lease}."""

    def acquire(self, name: str) -> Release:
        path = f"/v1/locks/{urllib.parse.quote(name)}"
        lease = json.loads(self.ask("POST", path, 200, b'{"ttl": 30}'))["lease"]
        return lambda: self.ask("DELETE", f"/v1/leases/{lease}", 204)

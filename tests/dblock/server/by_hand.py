"""A request to an application in this process whose client can leave at any moment."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class ByHand:
    """One request. Its client sends the body at once, or half of one for None, and is there until it leaves."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: dict[str, Any] | None,
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        raw = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in raw.items()],
            "client": ("127.0.0.1", 5),
            "server": ("localhost", 80),
        }
        self._body: bytes | None = b"{" if body is None else json.dumps(body).encode()
        self._whole = body is not None
        self._left = asyncio.Event()
        self.sent: list[Message] = []
        self.leave_after_first_message = False
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    def leave(self) -> None:
        """Disconnect."""
        self._left.set()

    @property
    def status(self) -> int | None:
        """The status of the answer, None if there is none yet."""
        return next((message["status"] for message in self.sent if "status" in message), None)

    @property
    def answer(self) -> Any:
        """The body of the answer."""
        return json.loads(b"".join(message.get("body", b"") for message in self.sent))

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": not self._whole}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if self.leave_after_first_message:
            self.leave()

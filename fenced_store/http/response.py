"""A response on its way to the client: held back until the handler's writes are stored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from fenced_store.http.problems import Refusal

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Response:
    """The messages of a response, between the application and the server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[Message] = []
        self._status = 0
        self._is_complete = False
        """Whether the last message has arrived. A response that breaks off is not successful."""
        self.started = False
        """Whether a message has been sent, so that the response can no longer be replaced."""
        self._ended = False
        self.before_end: Callable[[bool], Awaitable[None]] | None = None
        """Called before the first message is sent, with whether the response is successful."""

    async def send_held(self, message: Message) -> None:
        """Hold a message back; send all of them after the last one, once the handler's writes are stored.

        A 500 is held until the application returns or raises, because its exception may be translated to a refusal.
        """
        if self._ended:
            self.started = True
            await self._send(message)
            return
        self._status = message.get("status", self._status)
        self._waiting.append(message)
        ends = message["type"] in ("http.response.body", "http.response.zerocopysend")
        last = (ends and not message.get("more_body", False)) or message["type"] == "http.response.pathsend"
        self._is_complete = self._is_complete or last
        if last and self._status != HTTPStatus.INTERNAL_SERVER_ERROR:
            await self.finish()

    async def send_through(self, message: Message) -> None:
        """Send a message at once, unless it belongs to a 500, which is held."""
        self._status = message.get("status", self._status)
        if self._status == HTTPStatus.INTERNAL_SERVER_ERROR and not self.started:
            self._waiting.append(message)
        else:
            self.started = True
            await self._send(message)

    async def finish(self) -> None:
        """Send the messages that were held back, after `before_end`."""
        if self._ended:
            return
        self._ended = True
        if self.before_end is not None:
            await self.before_end(self._is_complete and self._status < HTTPStatus.BAD_REQUEST)
        await self._flush()

    async def flush_failure(self) -> None:
        """Send the messages of a failed request, unless they report success."""
        self._ended = True
        if self._status >= HTTPStatus.BAD_REQUEST:
            await self._flush()
        self._waiting.clear()

    async def replace(self, refusal: Refusal) -> None:
        """Send a refusal instead of the response."""
        self._ended = True
        self._waiting = list(refusal.messages())
        await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            self.started = True
            await self._send(self._waiting.pop(0))

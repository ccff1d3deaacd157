"""A response on its way: held back until it is known that it is true."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from fenced_store.http.problems import Refusal

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Answer:
    """The messages of a response, between the application and the server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[Message] = []
        self._status = 0
        self._is_complete = False
        """Whether the last message has come: an answer that broke off is no good one."""
        self.begun = False
        """Whether something has been sent, so that it can no longer be replaced."""
        self._ended = False
        self.before_end: Callable[[bool], Awaitable[None]] | None = None
        """What is to be done before anything is sent; told whether the response is a good one."""

    async def held_back(self, message: Message) -> None:
        """Take a message, and send all of them when the last is there and what they say has been stored.

        A 500 waits until the application is through with it, for what it raises then may be ours to say.
        """
        if self._ended:
            self.begun = True
            await self._send(message)
            return
        self._status = message.get("status", self._status)
        self._waiting.append(message)
        ends = message["type"] in ("http.response.body", "http.response.zerocopysend")
        last = (ends and not message.get("more_body", False)) or message["type"] == "http.response.pathsend"
        self._is_complete = self._is_complete or last
        if last and self._status != HTTPStatus.INTERNAL_SERVER_ERROR:
            await self.finish()

    async def passed_on(self, message: Message) -> None:
        """Pass a message on; but a 500 waits."""
        self._status = message.get("status", self._status)
        if self._status == HTTPStatus.INTERNAL_SERVER_ERROR and not self.begun:
            self._waiting.append(message)
        else:
            self.begun = True
            await self._send(message)

    async def finish(self) -> None:
        """Send what was held back, once it is true."""
        if self._ended:
            return
        self._ended = True
        if self.before_end is not None:
            await self.before_end(self._is_complete and self._status < HTTPStatus.BAD_REQUEST)
        await self._flush()

    async def flush_failure(self) -> None:
        """Send what was held back of a request that has failed; but nothing that says otherwise."""
        self._ended = True
        if self._status >= HTTPStatus.BAD_REQUEST:
            await self._flush()
        self._waiting.clear()

    async def replace(self, refusal: Refusal) -> None:
        """Answer with a refusal instead."""
        self._ended = True
        self._waiting = list(refusal.messages())
        await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            self.begun = True
            await self._send(self._waiting.pop(0))

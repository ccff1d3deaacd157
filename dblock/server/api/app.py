"""The API as an ASGI application: find the operation, check the caller, reply, and turn every error into a problem.

The log contains the template of the path and not the path itself, because the ID of a lease is a secret.
"""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dblock.server.access import Caller, require
from dblock.server.api.openapi import OPERATIONS
from dblock.server.api.operations import Exchange, Operation, find
from dblock.server.service import Service

logger = logging.getLogger("dblock")

_ANYONE = Caller("anonymous", "see")


class Api:
    """Handles the requests below /v1."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        request = Request(scope, receive)
        operation: Operation | None = None
        try:
            segments = scope["dblock.raw_path"].removeprefix(b"/v1/").split(b"/")
            operation, parts = find(OPERATIONS, request.method, segments)
            response = await self._answer(operation, request, parts)
        except Exception as error:
            response = self._service.refusal(error)
        await response(scope, receive, send)
        logger.info(
            "server: %s %s %d in %.0f ms",
            request.method if operation else "a request for",
            operation.path if operation else "an unknown path",
            response.status_code,
            (time.monotonic() - began) * 1000,
        )

    async def _answer(self, operation: Operation, request: Request, parts: dict[str, str]) -> Response:
        caller = _ANYONE
        if operation.role is not None:
            caller = require(request.scope, self._service.settings, operation.role)
        response = await operation.handle(Exchange(self._service, request, caller, parts))
        self._service.worked()
        return response

"""Operations: which request calls which function, which role its caller needs, and what the reply contains.

Routing and the OpenAPI document use the same table of operations, so the document lists every operation. A path is
split before it is decoded, so a lock's name may contain any character, with a slash written as %2F.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dblock.server.access import Caller
from dblock.server.bodies import read_body
from dblock.server.problems import Problem, invalid
from dblock.server.service import Service


@dataclass(frozen=True)
class Exchange:
    """A request, its caller, and the decoded parts of its path."""

    service: Service
    request: Request
    caller: Caller
    parts: Mapping[str, str]

    async def body(self, allowed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object in the request's body, empty if there is no body. Refuse members not in `allowed`."""
        limits = self.service.settings.limits
        raw = await read_body(self.request, limits.body, limits.body_within)
        if not raw.strip():
            return {}
        kind = self.request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(
                415,
                "not-json",
                "The body is not JSON",
                f"The Content-Type is {kind!a:.80}.",
                "Send JSON, with Content-Type: application/json.",
            )
        try:
            found = json.loads(raw, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise invalid("The body is not JSON.") from None
        if not isinstance(found, dict):
            raise invalid("The body must be a JSON object.")
        unknown = [] if allowed is None else sorted(set(found) - set(allowed))
        if unknown:
            raise invalid(f"The body has unknown members: {', '.join(ascii(one) for one in unknown)[:200]}.")
        return found

    async def gone(self) -> None:
        """Return when the client has disconnected. Call it only after the body was read."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


def _refuse_constant(text: str) -> None:
    raise ValueError(text)


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    """Below /v1, with {name} for a decoded part."""
    role: str | None
    """The role that the caller needs. None if no authentication is needed."""
    handle: Callable[[Exchange], Awaitable[Response]]
    summary: str
    answers: Mapping[int, str]
    """For each status that only this operation has, the name of the schema of its body. Empty for no body."""
    body: str | None = None
    """The name of the schema of its request."""
    parameters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """For each query parameter, its type and its description."""

    @property
    def segments(self) -> list[str]:
        """The parts of the path."""
        return self.path.strip("/").split("/")

    def match(self, raw: list[bytes]) -> dict[str, bytes] | None:
        """Return the parts of a raw path. None if the path does not match."""
        segments = self.segments
        if len(segments) != len(raw):
            return None
        found = {}
        for segment, given in zip(segments, raw, strict=True):
            if segment.startswith("{"):
                found[segment[1:-1]] = given
            elif segment.encode() != given:
                return None
        return found


def decoded(raw: Mapping[str, bytes]) -> dict[str, str]:
    """Decode the parts of a path."""
    try:
        return {name: unquote_to_bytes(part).decode() for name, part in raw.items()}
    except UnicodeDecodeError:
        raise invalid("The path is not UTF-8 after percent-decoding.") from None


def find(operations: list[Operation], method: str, raw: list[bytes]) -> tuple[Operation, dict[str, str]]:
    """Return the operation for a request, and the parts of its path."""
    matches = [(operation, parts) for operation in operations if (parts := operation.match(raw)) is not None]
    if not matches:
        raise Problem(
            404,
            "unknown-path",
            "There is nothing at this path",
            "The API has no such path.",
            "See /v1/openapi.json. In a lock's name, write a slash as %2F.",
        )
    wanted = "GET" if method == "HEAD" else method
    for operation, parts in matches:
        if operation.method == wanted:
            return operation, decoded(parts)
    allowed = ", ".join(sorted({operation.method for operation, _ in matches}))
    raise Problem(
        405,
        "wrong-method",
        "The path does not take this method",
        f"The path takes {allowed}.",
        "Use one of these methods.",
        {"Allow": allowed},
    )


def answer(content: Any, status: int = 200) -> Response:
    """Return a reply with a JSON body that no cache keeps."""
    return JSONResponse(content, status, {"Cache-Control": "no-store"})

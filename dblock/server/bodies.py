"""The body of a request, of bounded size and within bounded time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from dblock.server.problems import Problem, invalid


async def read_body(request: Request, most: int, within: float) -> bytes:
    """Return the body, or raise the problem of one that is larger, or that has not arrived after so many seconds."""
    try:
        return await asyncio.wait_for(_read(request, most), within)
    except asyncio.TimeoutError:
        raise Problem(
            408,
            "too-slow",
            "The body came too slowly",
            "The body did not arrive in time.",
            "Repeat the request.",
            {"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise invalid("The client disconnected before its body was complete.") from None


async def _read(request: Request, most: int) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise Problem(
                413,
                "too-large",
                "The body is too large",
                f"A body has at most {most} bytes.",
                "Send a smaller body.",
                {"Connection": "close"},
            )
    return bytes(found)

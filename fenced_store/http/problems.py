"""Refusals over HTTP, as problem documents (RFC 9457)."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fenced_store.errors import ClaimTimeout, MissingToken, OutcomeUnknown, StaleTokenError, translated

TYPE_PREFIX = "urn:fenced-store:"
"""The prefix of the `type` of each problem document."""

_log = logging.getLogger("fenced_store")


class Refusal(Exception):
    """A refused request, with the problem document for its caller."""

    def __init__(self, status: int, kind: str, title: str, detail: str, **members: Any) -> None:
        super().__init__(title)
        self.status = status
        self._problem = {"type": TYPE_PREFIX + kind, "title": title, "status": status, "detail": detail, **members}

    def messages(self) -> list[dict[str, Any]]:
        """Return the ASGI messages of the response."""
        body = json.dumps(self._problem).encode()
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.append((b"retry-after", b"1"))
        return [
            {"type": "http.response.start", "status": self.status, "headers": headers},
            {"type": "http.response.body", "body": body},
        ]


def refusal_of(error: Exception) -> Refusal | None:
    """Return the refusal for an error, or None if the error is not fenced_store's.

    The document does not name the writer that has superseded the caller.
    """
    if isinstance(error, Refusal):
        return error
    known = translated(error) or error
    if isinstance(known, StaleTokenError):
        return _stale(known)
    if isinstance(known, MissingToken):
        return Refusal(428, "token-required", "A fencing token is required", str(known), resource=known.resource)
    if isinstance(known, OutcomeUnknown):
        return Refusal(503, "outcome-unknown", "The outcome of the request is unknown", "Send the same request again.")
    if isinstance(known, ClaimTimeout):
        return Refusal(503, "busy", "Another writer is using this resource", str(known))
    return None


def _stale(error: StaleTokenError) -> Refusal:
    members: dict[str, Any] = {
        "resource": error.resource,
        "offered": error.offered,
        "stored": error.stored,
        "stored_at": error.stored_at.isoformat() if error.stored_at else None,
    }
    if error.numbers is not None and error.offered == error.stored:
        detail = (
            f"Resource {error.resource!a:.200} refuses write {error.numbers[0]} under token {error.offered}: it has "
            f"stored write {error.numbers[1]} of the same holder. The lease may still be valid: its writes have "
            "overtaken each other."
        )
        members["numbers"] = list(error.numbers)
    else:
        detail = (
            f"Resource {error.resource!a:.200} refuses token {error.offered}: it has seen token {error.stored}. "
            "Acquire the lock again and redo the work from the start."
        )
    return Refusal(409, "stale-token", "The fencing token is stale", detail, **members)


def busy(resource: str) -> Refusal:
    """Return the refusal of a request that waited too long for its turn."""
    detail = "This request waited too long for its turn. Nothing was done. Try again."
    return Refusal(503, "busy", "Another request is using this resource", detail, resource=resource)


def too_late(resource: str) -> Refusal:
    """Return the refusal of a request whose handler took too long."""
    detail = (
        "The request was cancelled, and its writes on the fence's connection were rolled back. Its other effects were "
        "not, and a handler in a thread is still running. Check the resource and decide again."
    )
    return Refusal(503, "too-late", "The request took too long", detail, resource=resource)


def undone(resource: str) -> Refusal:
    """Return the refusal of a request whose handler reported success although one of its statements had failed."""
    detail = "A statement of the handler failed, so none of its writes was stored."
    return Refusal(500, "undone", "The request was not done", detail, resource=resource)


def lost(resource: str) -> Refusal:
    """Return the refusal of a request whose work is done, and may or may not have been stored."""
    detail = "The outcome of the request is unknown. Check the resource and decide again."
    return Refusal(503, "fence-lost", "The fence was lost while the request was served", detail, resource=resource)


def unreachable(error: Exception) -> Refusal:
    """Return the refusal of a request whose fence is unreachable."""
    _log.warning("request refused: its fence cannot be reached: %s", error)
    detail = "Nothing was done, because the request could not be protected. Try again."
    return Refusal(503, "unreachable", "The fence cannot be reached", detail)

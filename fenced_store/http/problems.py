"""What a caller over HTTP is told instead of an answer: problem documents, after RFC 9457."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fenced_store.errors import ClaimTimeout, MissingToken, OutcomeUnknown, StaleTokenError, translated

PROBLEM = "urn:fenced-store:"
"""What the types of our problem documents begin with."""

_log = logging.getLogger("fenced_store")


class Refusal(Exception):
    """A request that is refused, with how its caller is told."""

    def __init__(self, status: int, kind: str, title: str, detail: str, **members: Any) -> None:
        super().__init__(title)
        self.status = status
        self._problem = {"type": PROBLEM + kind, "title": title, "status": status, "detail": detail, **members}

    def messages(self) -> list[dict[str, Any]]:
        """Return it as ASGI sends it."""
        body = json.dumps(self._problem).encode()
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.append((b"retry-after", b"1"))
        return [
            {"type": "http.response.start", "status": self.status, "headers": headers},
            {"type": "http.response.body", "body": body},
        ]


def refusal_of(error: Exception) -> Refusal | None:
    """Return how a caller is told of an error, where that is for us to say.

    Who has superseded it is not for everybody to know.
    """
    if isinstance(error, Refusal):
        return error
    ours = translated(error) or error
    if isinstance(ours, StaleTokenError):
        return _stale(ours)
    if isinstance(ours, MissingToken):
        return Refusal(428, "token-required", "A fencing token is required", str(ours), resource=ours.resource)
    if isinstance(ours, OutcomeUnknown):
        return Refusal(503, "outcome-unknown", "Whether it was done is not known", "Send the same again.")
    if isinstance(ours, ClaimTimeout):
        return Refusal(503, "busy", "Another is at work on this", str(ours))
    return None


def _stale(error: StaleTokenError) -> Refusal:
    said: dict[str, Any] = {
        "resource": error.resource,
        "offered": error.offered,
        "stored": error.stored,
        "stored_at": error.stored_at.isoformat() if error.stored_at else None,
    }
    if error.numbers is not None and error.offered == error.stored:
        detail = (
            f"Resource {error.resource!a:.200} refuses write {error.numbers[0]} under token {error.offered}: it has "
            f"stored write {error.numbers[1]} of the same holder. The lease may be as good as ever; its writes have "
            "overtaken each other."
        )
        said["numbers"] = list(error.numbers)
    else:
        detail = (
            f"Resource {error.resource!a:.200} refuses token {error.offered}: it has seen token {error.stored}. "
            f"Acquire "
            "the lock anew, and do the work again from the start."
        )
    return Refusal(409, "stale-token", "The fencing token is stale", detail, **said)


def busy(resource: str) -> Refusal:
    """Return the refusal of a request that has waited for too long."""
    detail = "It has kept this one waiting for too long; nothing was done. Try again."
    return Refusal(503, "busy", "Another request is at work on this", detail, resource=resource)


def too_late(resource: str) -> Refusal:
    """Return the refusal of a request whose handler took too long."""
    detail = (
        "It was given up, and what it wrote on the connection of its fence was undone. What it did elsewhere was not, "
        "and if "
        "it runs in a thread it goes on. Look, and decide anew."
    )
    return Refusal(503, "too-late", "The request took too long", detail, resource=resource)


def undone(resource: str) -> Refusal:
    """Return the refusal of a request whose handler answered well though a statement of its had failed."""
    detail = "A statement failed on the way, so that nothing of what was written with it was stored."
    return Refusal(500, "undone", "The request was not done", detail, resource=resource)


def lost(resource: str) -> Refusal:
    """Return the refusal of a request that did its work, and of which it is not known whether it was stored."""
    detail = "Whether it was done is not known. Look, and decide anew."
    return Refusal(503, "fence-lost", "The fence was lost while the request was served", detail, resource=resource)


def unreachable(error: Exception) -> Refusal:
    """Return the refusal of a request whose fence cannot be asked."""
    _log.warning("A request was refused, because its fence cannot be reached: %s", error)
    detail = "Nothing was done, for it could not be protected. Try again."
    return Refusal(503, "unreachable", "The fence cannot be reached", detail)

"""Every error of the server, as a problem document (application/problem+json).

A problem says what happened, and in `next` what the client should do. Only this module turns an error of the database
into a problem. If the database does not reply, the status is 503 for every request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dblock.errors import (
    AccessDenied,
    DblockError,
    DeadlockDetected,
    InvalidArgument,
    PermitsDiffer,
    WrongKind,
)

PREFIX = "urn:dblock:problem:"

RETRY_AFTER = 1
"""Seconds after which a client should try again if the database does not reply."""


class Problem(Exception):
    """An error that is the reply to a request."""

    def __init__(
        self,
        status: int,
        kind: str,
        title: str,
        detail: str,
        then: str,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """`kind` is the end of the problem's type, `then` what the client should do, `more` further members."""
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.headers = dict(headers or {})
        self.document = {
            "type": PREFIX + kind,
            "title": title,
            "status": status,
            "detail": detail,
            "next": then,
            **more,
        }

    def response(self) -> Response:
        """Return the problem as a reply."""
        return Response(json.dumps(self.document), self.status, self.headers, media_type="application/problem+json")


def problem_of(error: Exception) -> Problem:
    """Return the problem for an error of dblock."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, InvalidArgument):
        return invalid(str(error))
    if isinstance(error, AccessDenied):
        return Problem(
            403,
            "database-role",
            "The database role may not do this",
            "The role with which the server connects to the database lacks a privilege.",
            "Ask the operator to run: dblock grant ROLE, with --may see or --may force-release where needed.",
        )
    if isinstance(error, (WrongKind, PermitsDiffer)):
        return Problem(
            409,
            "wrong-kind",
            "The lock has another kind",
            str(error),
            "Use the kind that the lock has, or another name.",
        )
    if isinstance(error, DeadlockDetected):
        return Problem(
            409, "deadlock", "The wait was part of a deadlock", str(error), "Release the locks you hold, and try again."
        )
    if isinstance(error, DblockError):
        return unavailable()
    return Problem(
        500,
        "bug",
        "An unexpected error",
        f"The server met an unexpected {type(error).__name__}.",
        "Report it with the server's log. The request may have taken effect.",
    )


def invalid(detail: str) -> Problem:
    """Return the problem of a request that can never succeed."""
    return Problem(400, "invalid-request", "The request is invalid", detail, "Correct the request. Nothing was done.")


def unavailable() -> Problem:
    """Return the problem of a database that does not reply. The error stays in the log, because it may name hosts."""
    return Problem(
        503,
        "database-away",
        "The database is not available",
        "The database does not reply, does not accept writes, or has no schema that fits this server.",
        "The request may have taken effect. Repeat it with the same Idempotency-Key or lease.",
        {"Retry-After": str(RETRY_AFTER)},
    )

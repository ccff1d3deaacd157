"""The schemas of the OpenAPI document: the bodies of requests and replies."""

from __future__ import annotations

from typing import Any

_SECONDS = {"type": "number", "minimum": 0}
_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_TOKEN = {"type": "integer", "minimum": 1, "description": "The fencing token, higher than that of every earlier grant."}
_MAYBE_TOKEN = {"type": ["integer", "null"], "minimum": 1}
_MAYBE_COUNT = {"type": ["integer", "null"]}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, more: bool = False) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": more,
    }


_LEASE = {
    "lease": {**_TEXT, "description": "The ID to renew, release and show the lease with. Keep it secret."},
    "token": _TOKEN,
    "expires_in": {**_SECONDS, "description": "Seconds left, counted from before you sent the request."},
    "deadline": {**_TEXT, "format": "date-time", "description": "The end of the lease by the database's clock."},
}
_HOLDER = _object(
    {
        "token": _MAYBE_TOKEN,
        "holder": _MAYBE_TEXT,
        "meta": {},
        "granted_at": _MAYBE_TEXT,
        "expires_at": _MAYBE_TEXT,
        "remaining": {"type": "number"},
    }
)
_PROBLEM = {"type": _TEXT, "title": _TEXT, "status": {"type": "integer"}, "detail": _TEXT, "next": _TEXT}
_LOCK = {
    "name": _TEXT,
    "token": _MAYBE_TOKEN,
    "state": {"enum": ["held", "forced", "free"]},
    "holder": _MAYBE_TEXT,
    "meta": {},
    "granted_at": _MAYBE_TEXT,
    "expires_at": _MAYBE_TEXT,
    "released_at": _MAYBE_TEXT,
    "forced_at": _MAYBE_TEXT,
    "remaining": _SECONDS,
    "waiting": {"type": "integer", "minimum": 0},
    "kind": _TEXT,
    "head": _MAYBE_TEXT,
    "permits": _MAYBE_COUNT,
    "held": _MAYBE_COUNT,
}
_WAITER = _object(
    {
        "position": {"type": "integer"},
        "holder": _TEXT,
        "since": _TEXT,
        "seconds": {"type": "number"},
        "mode": _MAYBE_TEXT,
    }
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "Acquire": _object(
        {},
        {
            "name": {**_TEXT, "description": "The lock, if the path does not name it."},
            "ttl": {"type": "number", "minimum": 0.1, "maximum": 86400, "default": 30},
            "wait": {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
            "holder": {**_TEXT, "description": "A label for people, which others see."},
            "meta": {"description": "Any JSON, up to 8192 bytes."},
            "kind": {"enum": ["mutex", "read", "write", "semaphore"], "default": "mutex"},
            "permits": {"type": ["integer", "null"], "minimum": 1},
            "ticket": {**_TEXT, "description": "What a 202 returned. Send it with the same request again."},
        },
    ),
    "Renew": _object({}, {"ttl": {"type": "number", "minimum": 0.1, "maximum": 86400}}),
    "Break": _object({"token": _TOKEN, "reason": _TEXT}, {"now": {"type": "boolean", "default": False}}),
    "Grant": _object({"lock": _TEXT, **_LEASE}, {"share": _TEXT}),
    "Lease": _object(_LEASE, {"holder": _MAYBE_TEXT}),
    "Ticket": _object(
        {"lock": _TEXT, "ticket": _TEXT, "keep_for": _SECONDS, "requeued": {"type": "boolean"}, "next": _TEXT}
    ),
    "Lock": _object({**_LOCK, "shares": {"type": "array", "items": _object(_LOCK)}}),
    "Locks": _object({"locks": {"type": "array", "items": _object(_LOCK)}, "after": _MAYBE_TEXT}),
    "Queue": _object({"lock": _TEXT, "waiters": {"type": "array", "items": _WAITER}}),
    "Broken": _object({"lock": _TEXT, "token": _TOKEN, "free_within": _SECONDS}),
    "TerraformInfo": _object({"ID": _TEXT}, more=True),
    "Problem": _object(_PROBLEM, more=True),
    "Locked": _object(
        {**_PROBLEM, "lock": _TEXT, "holder": {"anyOf": [_HOLDER, {"type": "null"}]}, "holders": {"type": "array"}}
    ),
    "Lost": _object({**_PROBLEM, "reason": _TEXT, "token": _MAYBE_TOKEN}),
    "OpenApi": _object({"openapi": _TEXT}, more=True),
}

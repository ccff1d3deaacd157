"""The API's table of operations, and the OpenAPI document that is made from it."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import Response

from dblock.server.api import leases, locks, terraform
from dblock.server.api.operations import Exchange, Operation, answer
from dblock.server.api.schemas import SCHEMAS

COMMON = (400, 401, 403, 404, 405, 408, 413, 415, 500, 503)
"""The statuses that every operation may have, each with a problem."""

_MEANINGS = {
    200: "Done.",
    202: "Not granted yet. The ticket keeps the position in the queue.",
    204: "Done, without a body.",
    409: "The request conflicts with the state of the lock, or a newer request took over.",
    410: "The lease is lost. The member `reason` says why.",
    423: "The lock is not free.",
    429: "Too many requests wait at this server.",
}


async def document(exchange: Exchange) -> Response:
    """Return the OpenAPI document."""
    return answer(openapi(exchange.service.settings.prefix))


OPERATIONS = [
    Operation(
        "POST",
        "/locks/{name}",
        "lock",
        locks.acquire,
        "Acquire a lock, or wait for it",
        {200: "Grant", 202: "Ticket", 409: "Problem", 423: "Locked", 429: "Problem"},
        "Acquire",
    ),
    Operation(
        "POST",
        "/locks",
        "lock",
        locks.acquire,
        "Acquire a lock whose name is in the body",
        {200: "Grant", 202: "Ticket", 409: "Problem", 423: "Locked", 429: "Problem"},
        "Acquire",
    ),
    Operation(
        "GET",
        "/locks",
        "see",
        locks.list_all,
        "List the locks that are held or waited for",
        {200: "Locks"},
        parameters={
            "pattern": ("string", "Only names that match, with * and ?."),
            "name": ("string", "Only this lock and its shares."),
            "after": ("string", "Only names after this one: the member `after` of the page before."),
            "limit": ("integer", "How many locks a page has at most, 100 by default."),
            "free": ("boolean", "With true, also the locks that are free."),
        },
    ),
    Operation("GET", "/locks/{name}", "see", locks.show, "Show a lock", {200: "Lock"}),
    Operation("GET", "/locks/{name}/queue", "see", locks.queue, "List the waiters of a lock in order", {200: "Queue"}),
    Operation(
        "POST",
        "/locks/{name}/break",
        "break",
        locks.break_lock,
        "Take a lock from the holder with this token",
        {200: "Broken", 409: "Problem"},
        "Break",
    ),
    Operation("GET", "/leases/{lease}", "lock", leases.show, "Show a lease", {200: "Lease", 410: "Lost"}),
    Operation("PUT", "/leases/{lease}", "lock", leases.renew, "Renew a lease", {200: "Lease", 410: "Lost"}, "Renew"),
    Operation("DELETE", "/leases/{lease}", "lock", leases.release, "Release a lease", {204: "", 410: "Lost"}),
    Operation("DELETE", "/tickets/{ticket}", "lock", leases.give_up, "Give up a position in a queue", {204: ""}),
    Operation(
        "LOCK",
        "/terraform/{name}",
        "lock",
        terraform.lock,
        "Lock for Terraform's backend http",
        {200: "TerraformInfo", 423: "TerraformInfo", 409: "Problem"},
        "TerraformInfo",
        {"ttl": ("number", "Seconds that the lock lasts, a day by default.")},
    ),
    Operation(
        "UNLOCK",
        "/terraform/{name}",
        "lock",
        terraform.unlock,
        "Unlock for Terraform's backend http",
        {200: "TerraformInfo", 410: "Lost", 423: "TerraformInfo"},
        "TerraformInfo",
        {"ttl": ("number", "Ignored here.")},
    ),
    Operation("GET", "/openapi.json", None, document, "This document", {200: "OpenApi"}),
]
"""Every operation of the API."""


def openapi(prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI document. OpenAPI does not know LOCK and UNLOCK, so these are under x-lock and x-unlock."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        method = operation.method.lower()
        known = method in ("get", "put", "post", "delete")
        paths.setdefault(operation.path, {})[method if known else f"x-{method}"] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dblock", "version": "1", "summary": "Locks with fencing tokens over HTTP."},
        "servers": [{"url": f"{prefix}/v1"}],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    parts = re.findall(r"{(\w+)}", operation.path)
    parameters: list[dict[str, Any]] = [
        {"name": part, "in": "path", "required": True, "schema": {"type": "string"}} for part in parts
    ]
    for name, (kind, text) in operation.parameters.items():
        parameters.append({"name": name, "in": "query", "description": text, "schema": {"type": kind}})
    if operation.handle is locks.acquire:
        about = "Requests with the same key, caller and lock find the same grant."
        header = {"name": "Idempotency-Key", "in": "header", "description": about, "schema": {"type": "string"}}
        parameters.append(header)
    answers = {**dict.fromkeys(COMMON, "Problem"), **operation.answers}
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}_{'_'.join(re.findall('[a-z]+', operation.path))}",
        "summary": operation.summary,
        "x-role": operation.role,
        "parameters": parameters,
        "responses": {str(status): _answer(status, schema) for status, schema in sorted(answers.items())},
    }
    if operation.body is not None:
        described["requestBody"] = {"content": {"application/json": {"schema": _reference(operation.body)}}}
    return described


def _answer(status: int, schema: str) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _MEANINGS.get(status, "The request was refused.")}
    if schema:
        problem = status >= 400 and schema != "TerraformInfo"
        found["content"] = {
            "application/problem+json" if problem else "application/json": {"schema": _reference(schema)}
        }
    return found


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}

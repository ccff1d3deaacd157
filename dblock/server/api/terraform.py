"""The lock protocol of Terraform's and OpenTofu's backend `http`: LOCK and UNLOCK.

The backend sends a description of itself with an ID, and expects the holder's description in the body of a 423. The
grant keeps the description as its meta, so every server can reply. The backend renews nothing: the lease lasts for the
ttl in the address, by default as long as a lease can. A forced unlock sends the ID alone, and takes the lock from its
holder at once, which needs the role `break`. Every caller that is refused sees the description, so it proves nothing by
itself: an unlock counts as that of the holder only if the caller is the one that locked.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse, Response

from dblock._core.options import TTL_MAX, is_text, lock_options
from dblock._core.replies import Grant
from dblock.errors import DatabaseError
from dblock.server.access import require
from dblock.server.api.locks import force_release, holders_of
from dblock.server.api.operations import Exchange, answer
from dblock.server.database import holder_label
from dblock.server.problems import Problem, invalid
from dblock.server.waits import Disconnected

ID_LENGTH = 128

_IDENTITY = ("ID", "Operation", "Who", "Created")
"""The members by which an unlock of the holder itself is told from a forced one, which knows the ID alone."""


async def lock(exchange: Exchange) -> Response:
    """Grant the lock to a run of Terraform, or answer with the description of the run that holds it."""
    info = await _info(exchange)
    name = exchange.parts["name"]
    options = lock_options(name, _ttl(exchange), None, info, keep_alive=False)
    who = info.get("Who")
    label = f"terraform {who if is_text(who) else ''}".strip()
    holder_label.set(label.encode()[:300].decode(errors="ignore") + _by(exchange))
    signer = await exchange.service.signer()
    attempt = signer.attempt(exchange.caller.name, name, f"terraform {info['ID']}")
    database = exchange.service.database
    flows = database.flows
    try:
        grant = await database.run(flows.observed(name, flows.try_acquire(options, attempt), "busy"))
    except Disconnected:
        return Response(status_code=499)
    except DatabaseError as error:
        if error.may_be_done:  # the next run has another ID, and would not find the grant
            with database.runtime.deferring(name, attempt):
                await database.run_last(flows.abandon(name, attempt))
        raise
    if isinstance(grant, Grant):
        return answer({"token": grant.token, **info})
    return await _held(exchange, name)


async def unlock(exchange: Exchange) -> Response:
    """Release the lock of the run with this ID, or take it from that run."""
    info = await _info(exchange)
    name = exchange.parts["name"]
    holders = await holders_of(exchange, name)
    if not holders:
        raise Problem(
            410,
            "lease-lost",
            "The lock is not held",
            "The lock is free: it was released, or its ttl has passed.",
            "Check the state that was written last: another run may have held the lock since.",
            reason="over",
            token=None,
        )
    held = holders[0]
    meta = held["meta"] if isinstance(held["meta"], dict) else {}
    if meta.get("ID") != info["ID"]:
        return await _held(exchange, name)
    database = exchange.service.database
    own = all(meta.get(member) == info.get(member) for member in _IDENTITY)
    if own and str(held["holder"]).endswith(_by(exchange)):
        released = await database.run(database.flows.end(name, held["token"]))
    else:
        require(exchange.request.scope, exchange.service.settings, "break")
        released = await force_release(exchange, name, held["token"], "terraform force-unlock", True)
    return answer({"released": released, "ID": info["ID"]})


def _by(exchange: Exchange) -> str:
    """Return the end of the label of a holder that this caller is: no part of the label that a caller chooses."""
    return f" ({exchange.caller.name})"


async def _info(exchange: Exchange) -> dict[str, Any]:
    info = await exchange.body()
    identity = info.get("ID")
    if not isinstance(identity, str) or not 1 <= len(identity) <= ID_LENGTH:
        raise invalid(f"The body needs the member ID, text of 1 to {ID_LENGTH} characters.")
    return info


def _ttl(exchange: Exchange) -> float:
    try:
        return float(exchange.request.query_params.get("ttl", TTL_MAX))
    except ValueError:
        raise invalid("ttl is a number of seconds.") from None


async def _held(exchange: Exchange, name: str) -> Response:
    """Return who holds the lock, in the form that Terraform prints."""
    holders = await holders_of(exchange, name)
    held: dict[str, Any] = holders[0] if holders else {"holder": "", "meta": None, "token": None, "granted_at": ""}
    info = held["meta"] if isinstance(held["meta"], dict) and "ID" in held["meta"] else {}
    shown = {
        "ID": f"token {held['token']}",
        "Operation": "",
        "Info": "",
        "Who": held["holder"],
        "Version": "",
        "Created": held["granted_at"],
        "Path": name,
        **info,
    }
    return JSONResponse(json.loads(json.dumps(shown)), 423, {"Cache-Control": "no-store"})

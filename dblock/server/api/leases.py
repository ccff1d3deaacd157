"""Leases over HTTP: renew, release and show one exact grant, and give a ticket up."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from dblock._core import clock
from dblock._core.options import check_ttl
from dblock.server.api.locks import check_number, holders_of, moment
from dblock.server.api.operations import Exchange, answer
from dblock.server.ids import LeaseId
from dblock.server.problems import Problem

RENEW = ("ttl",)

BUSY_RETRIES = 20
BUSY_PAUSE = 0.05
"""While another transaction locks the row, a renewal is tried so often, with this pause in seconds."""

_WHY = {
    "expired": "it expired before it was renewed",
    "superseded": "the lock was granted to another client",
    "released": "it was released, or freed by force at once",
    "forced": "an operator took the lock, and it stays reserved for this lease until its deadline",
    "over": "it was released, it expired, or an operator took the lock",
}


async def renew(exchange: Exchange) -> Response:
    """Renew the lease for its ttl, counted from now."""
    asked = await exchange.body(dict.fromkeys(RENEW))
    lease = await _lease(exchange)
    if "ttl" in asked:
        check_number(asked["ttl"])
    ttl = check_ttl(lease.name, asked["ttl"]) if "ttl" in asked else lease.ttl
    database = exchange.service.database
    for _ in range(BUSY_RETRIES):
        renewal = await database.run(database.flows.renew([(lease.name, lease.token, ttl)]))
        reason = renewal.missed.get(0)
        if reason is None:
            signer = await exchange.service.signer()
            return answer(
                {
                    "lease": signer.lease(LeaseId(lease.name, lease.token, ttl)),
                    "token": lease.token,
                    "expires_in": round(max(ttl - (clock.now() - renewal.sent_at), 0.0), 3),
                    "deadline": moment(renewal.moment + ttl),
                }
            )
        if reason != "busy":
            raise _lost(lease, reason)
        await asyncio.sleep(BUSY_PAUSE)
    raise Problem(
        503,
        "lock-busy",
        "The lock is in use by a transaction",
        "Another transaction keeps the lock's row locked, so the lease was not renewed.",
        "Renew again at once. If it is not renewed before its deadline, stop writing.",
        {"Retry-After": "1"},
    )


async def release(exchange: Exchange) -> Response:
    """Release the lease."""
    await exchange.body({})
    lease = await _lease(exchange)
    database = exchange.service.database
    if not await database.run(database.flows.end(lease.name, lease.token)):
        raise _lost(lease, "over")
    return Response(status_code=204)


async def show(exchange: Exchange) -> Response:
    """Return how long the lease lasts."""
    lease = await _lease(exchange)
    asked_at = clock.now()
    for held in await holders_of(exchange, lease.name):
        if held["token"] == lease.token:
            left = held["remaining"] - (clock.now() - asked_at)
            return answer(
                {
                    "lease": exchange.parts["lease"],
                    "token": lease.token,
                    "expires_in": round(max(left, 0.0), 3),
                    "deadline": held["expires_at"],
                    "holder": held["holder"],
                }
            )
        raise _lost(lease, "superseded")
    raise _lost(lease, "over")


async def give_up(exchange: Exchange) -> Response:
    """Give up the position of a ticket, and a grant that the ticket may have got."""
    await exchange.body({})
    ticket = (await exchange.service.signer()).read_ticket(exchange.parts["ticket"])
    database = exchange.service.database
    await database.run(database.flows.abandon(ticket.name, ticket.attempt))
    return Response(status_code=204)


async def _lease(exchange: Exchange) -> LeaseId:
    return (await exchange.service.signer()).read_lease(exchange.parts["lease"])


def _lost(lease: LeaseId, reason: str) -> Problem:
    return Problem(
        410,
        "lease-lost",
        "The lease is lost",
        f"The lease of lock {lease.name!a:.80} under token {lease.token} is lost: {_WHY.get(reason, reason)}.",
        "Stop writing. If you still need the lock, acquire it again.",
        reason=reason,
        token=lease.token,
    )

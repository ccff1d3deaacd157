"""Locks over HTTP: acquire, list, show, and take a lock from its holder."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dblock._core import clock
from dblock._core.effects import Flow
from dblock._core.options import LockOptions, brief, check_name, is_text, lock_options
from dblock._core.replies import Grant, new_attempt
from dblock._core.shared_acquire import read_write_options, semaphore_options
from dblock.errors import DblockError
from dblock.server.api.operations import Exchange, answer
from dblock.server.database import holder_label, seconds_left
from dblock.server.ids import LeaseId, TicketId
from dblock.server.problems import Problem, invalid
from dblock.server.waits import Disconnected

LEAST_WAIT = 0.05
"""Seconds that a request with a ticket waits at least. A try without a wait would ignore its ticket."""

LABEL_BYTES = 300
"""The longest label of a holder: the server adds the caller's name to it."""

KEY_LENGTH = 255

ACQUIRE = ("name", "ttl", "wait", "holder", "meta", "kind", "permits", "ticket")
BREAK = ("token", "reason", "now")


async def acquire(exchange: Exchange) -> Response:
    """Grant the lock, or let the request wait for it."""
    asked = await exchange.body(dict.fromkeys(ACQUIRE))
    name = exchange.parts.get("name", asked.get("name"))
    if "name" in asked and asked["name"] != name:
        raise invalid("The name in the body is not the one in the path.")
    limit = exchange.service.settings.limits.wait
    wait = asked.get("wait", 0)
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait <= limit:
        raise invalid(f"wait is a number of seconds from 0 to {limit:g}; got {brief(wait)}.")
    options = _options(name, asked)
    if "ticket" in asked:
        wait = max(wait, LEAST_WAIT)
    holder_label.set(_label(exchange, asked.get("holder")))
    attempt, resumed = await _attempt(exchange, options.name, asked.get("ticket"))
    waits = exchange.service.waits
    try:
        outcome = await waits.acquire(options, float(wait), attempt, resumed, exchange.gone)
    except Disconnected:
        return Response(status_code=499)  # not delivered
    if isinstance(outcome, Grant):
        return await _granted(exchange, options, outcome, resumed)
    if outcome == "held":
        raise await locked(exchange, options.name)
    return await _queued(exchange, options, attempt, resumed, outcome == "requeued")


def check_number(ttl: Any) -> None:
    """Refuse a ttl that is not a number, in the terms of JSON."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise invalid(f"ttl is a number of seconds; got {brief(ttl)}.")


def _options(name: Any, asked: dict[str, Any]) -> LockOptions:
    kind, ttl, meta = asked.get("kind", "mutex"), asked.get("ttl", 30.0), asked.get("meta")
    check_number(ttl)
    if "permits" in asked and kind != "semaphore":
        raise invalid("Only a semaphore has permits.")
    if kind == "mutex":
        return lock_options(name, ttl, None, meta, keep_alive=False)
    if kind in ("read", "write"):
        return read_write_options(kind, name, ttl, None, meta, False)
    if kind == "semaphore":
        return semaphore_options(asked.get("permits"), name, ttl, None, meta, False)
    raise invalid(f"kind is one of mutex, read, write and semaphore; got {brief(kind)}.")


def _label(exchange: Exchange, label: Any) -> str:
    caller = exchange.caller.name
    if label is None:
        return caller
    if not is_text(label) or not 1 <= len(label.encode()) <= LABEL_BYTES:
        raise invalid(f"holder is text of 1 to {LABEL_BYTES} bytes without NUL.")
    # The caller cannot choose its own name. The name comes last, where no label can imitate it.
    return f"{label} ({caller})" if exchange.service.settings.authenticates else str(label)


async def _attempt(exchange: Exchange, name: str, ticket: Any) -> tuple[str, bool]:
    """Return the attempt of a request, and whether an earlier request may have had it."""
    signer = await exchange.service.signer()
    if ticket is not None:
        if not isinstance(ticket, str):
            raise invalid("ticket must be the text that the server returned.")
        found = signer.read_ticket(ticket)
        if found.name != name:
            raise invalid("The ticket belongs to another lock.")
        return found.attempt, True
    key = exchange.request.headers.get("idempotency-key")
    if key is None:
        return new_attempt(), False
    if not 1 <= len(key) <= KEY_LENGTH:
        raise invalid(f"An Idempotency-Key has 1 to {KEY_LENGTH} characters.")
    return signer.attempt(exchange.caller.name, name, key), True


async def _granted(exchange: Exchange, options: LockOptions, grant: Grant, resumed: bool) -> Response:
    signer = await exchange.service.signer()
    content = {
        "lock": options.name,
        "lease": signer.lease(LeaseId(grant.name, grant.token, options.ttl)),
        "token": grant.token,
        "expires_in": round(seconds_left(grant, clock.now()), 3),
        "deadline": moment(grant.expires_at),
    }
    if grant.name != options.name:
        content["share"] = grant.name
    give_back = exchange.service.database.flows.release(grant.name, grant.token, grant.trusted_until)
    return _News(exchange, content, 200, None if resumed else give_back)


class _News(Response):
    """The reply with a grant or a ticket. If the client disconnects before the reply is sent, these are given back."""

    def __init__(self, exchange: Exchange, content: dict[str, Any], status: int, give_back: Flow[Any] | None) -> None:
        """With an Idempotency-Key or a ticket, the client can repeat the request, and there is nothing to give back."""
        self._exchange = exchange
        self._give_back = give_back
        plain = answer(content)
        super().__init__(plain.body, status, plain.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._check_connection()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await self._check_connection()
        except OSError:
            if self._give_back is not None:
                with suppress(DblockError):  # then the lease or the ticket expires
                    await self._exchange.service.database.run_last(self._give_back)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _check_connection(self) -> None:
        # The event loop notices a closed connection in its next turn.
        await asyncio.sleep(0)
        if await self._exchange.request.is_disconnected():
            raise OSError("the client has disconnected")


async def _queued(exchange: Exchange, options: LockOptions, attempt: str, resumed: bool, requeued: bool) -> Response:
    service = exchange.service
    signer = await service.signer()
    content = {
        "lock": options.name,
        "ticket": signer.ticket(TicketId(options.name, attempt)),
        "keep_for": service.settings.ticket_ttl,
        "requeued": requeued,
        "next": "Send the same request with this ticket within keep_for seconds to keep the position.",
    }
    give_back = service.database.flows.abandon(options.name, attempt)
    return _News(exchange, content, 202, None if resumed else give_back)


async def locked(exchange: Exchange, name: str) -> Problem:
    """Return the problem of a lock that is not free."""
    holders = await holders_of(exchange, name)
    shown = f"is held by {holders[0]['holder']!a:.80}" if holders else "has waiters, or was held until now"
    return Problem(
        423,
        "locked",
        "The lock is not free",
        f"Lock {name!a:.80} {shown}.",
        "Try again later, or send `wait` with the seconds that you want to wait in the queue.",
        lock=name,
        holder=holders[0] if holders else None,
        holders=holders,
    )


async def holders_of(exchange: Exchange, name: str) -> list[dict[str, Any]]:
    """Return the holders of a lock, in the order of their grants."""
    return await exchange.service.database.read("holder", name)


async def list_all(exchange: Exchange) -> Response:
    """Return one page of the locks, in the order of their names."""
    query = exchange.request.query_params
    limits = exchange.service.settings.limits
    unknown = set(query) - {"pattern", "after", "limit", "free", "name"}
    if unknown:
        raise invalid("The list takes the parameters pattern, name, after, limit and free.")
    try:
        limit = int(query.get("limit", "100"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= limits.page:
        raise invalid(f"limit is a number from 1 to {limits.page}.")
    from dblock.admin.inspect import like

    pattern, name, after = query.get("pattern", "*"), query.get("name"), query.get("after", "")
    if not all(is_text(one) and len(one.encode()) <= 1024 for one in (pattern, name or "", after)):
        raise invalid("A pattern or a name is text of at most 1024 bytes without NUL.")
    rows = await exchange.service.database.read(
        "list_locks($1, $2, $3, $4, $5)",
        like(pattern),
        name,
        "t" if query.get("free") in ("1", "true") else "f",
        str(limit + 1),
        after,
    )
    page = rows[:limit]
    return answer({"locks": [_shown(row) for row in page], "after": page[-1]["name"] if len(rows) > limit else None})


async def show(exchange: Exchange) -> Response:
    """Return one lock with its holders."""
    name = check_name(exchange.parts["name"])
    rows = await exchange.service.database.read("list_locks($1, $2, $3, $4)", "%", name, "t", "1000")
    mine = [row for row in rows if row["name"] == name]
    if not mine:
        raise Problem(
            404,
            "unknown-lock",
            "There is no such lock",
            f"Lock {name!a:.80} was never acquired, or its row has been deleted.",
            "Acquire it: a lock needs no preparation.",
        )
    found = _shown(mine[0])
    shares = [_shown(row) for row in rows if row["head"] == name]
    return answer({**found, "shares": [share for share in shares if share["state"] != "free"]})


async def queue(exchange: Exchange) -> Response:
    """Return the waiters of a lock, in order."""
    name = check_name(exchange.parts["name"])
    rows = await exchange.service.database.read("list_waiters($1, $2)", name, "1000")
    return answer({"lock": name, "waiters": [{key: row[key] for key in _WAITER} for row in rows]})


_WAITER = ("position", "holder", "since", "seconds", "mode")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of list_locks() as the API shows it. An efficiency lock has no token."""
    token = row["token"]
    held = row["remaining"] > 0 or bool(row["held"])
    return {
        **row,
        "token": token if token > 0 else None,
        "kind": row["kind"] or "mutex",
        "state": "free" if not held else "held" if row["forced_at"] is None else "forced",
    }


async def break_lock(exchange: Exchange) -> Response:
    """Take a lock from the holder with this token."""
    asked = await exchange.body(dict.fromkeys(BREAK))
    name, token, reason = check_name(exchange.parts["name"]), asked.get("token"), asked.get("reason")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 < token < 1 << 63:
        raise invalid("token is the holder's token, as the lock shows it.")
    if not is_text(reason) or not 1 <= len(str(reason).encode()) <= 2048:
        raise invalid("reason is text of 1 to 2048 bytes, for the history.")
    now = asked.get("now", False)
    if not isinstance(now, bool):
        raise invalid("now is true or false.")
    share = await _share_with(exchange, name, token)
    taken = await force_release(exchange, share, token, str(reason), now)
    if not taken:
        raise Problem(
            409,
            "not-held",
            "The lock is not held under this token",
            f"Lock {name!a:.80} is not held under token {token}; nothing was done.",
            "Read the lock again: it may have another holder by now.",
            holders=await holders_of(exchange, name),
        )
    holders = [one for one in await holders_of(exchange, name) if one["token"] == token]
    return answer({"lock": share, "token": token, "free_within": holders[0]["remaining"] if holders else 0.0})


async def _share_with(exchange: Exchange, name: str, token: int) -> str:
    """Return the name of the row that is held under a token: that of the lock, or of a share of it."""
    rows = await exchange.service.database.read("list_locks($1, $2)", "%", name)
    return next((row["name"] for row in rows if row["token"] == token and row["remaining"] > 0), name)


async def force_release(exchange: Exchange, name: str, token: int, reason: str, now: bool) -> bool:
    """Take the lock from one exact grant, in the caller's name. The database records the caller and the reason."""
    database = exchange.service.database
    actor = f"{exchange.caller.name} over HTTP"
    taken = await database.force_release(name, token, actor, reason, now)
    if taken and now:
        with suppress(DblockError):  # the first waiter also polls
            await database.read("wake_queue", name)
    return taken


def moment(epoch: float) -> str:
    """Return a moment of the database's clock as ISO 8601."""
    return datetime.fromtimestamp(epoch, timezone.utc).isoformat()

"""Execute a client's statements on the store: statements, arguments and rows as text.

The statements are those of dblock's own code. An unknown statement is an error, so that a new one cannot go unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache

from dblock._core.effects import Row
from dblock._core.replies import array
from dblock._core.statements import ARE_YOU_THERE, KEEP_SESSION, NOTIFY_SELF, STOP_LISTENING, WHICH_ENDPOINTS
from dblock.testing.database.barriers import statements as barriers
from dblock.testing.database.columns import UnknownStatement, boolean, items, number, seconds, text
from dblock.testing.database.deadlocks import execute_look
from dblock.testing.database.elections import statements as elections
from dblock.testing.database.fence import Fence
from dblock.testing.database.recipes import RecipeStore
from dblock.testing.database.schedules import statements as schedules
from dblock.testing.database.several import statements as several
from dblock.testing.database.shared_locks import statements as shared_locks
from dblock.testing.database.store import Asked, Store, Tried

Args = tuple["str | None", ...]

_FUNCTION = re.compile(rb'"dblock"\.(\w+)\(')


INSTALLATION = "simulated"
"""The ID of the only installation."""


class Listens(Exception):
    """The session listens to this client's channel, or stops listening."""

    def __init__(self, client: str | None) -> None:
        super().__init__(client)
        self.client = client


def perform(store: RecipeStore, fence: Fence, sql: bytes, args: Args) -> Row | None:
    """Execute a statement, and return its row."""
    return performer(sql)(store, fence, args)


ENDPOINTS: Row = ("1", None, None, None, None)
"""The ends of every connection, as a server describes those of a Unix socket."""


@lru_cache(maxsize=256)
def performer(sql: bytes) -> Callable[[RecipeStore, Fence, Args], Row | None]:
    found = _FUNCTION.search(sql)
    if found is None:
        return _plain(sql)
    name = found.group(1).decode()
    again = b"nullif" in sql
    if name in elections.FUNCTIONS:
        recipe = elections.FUNCTIONS[name]
        return lambda store, fence, args: recipe(store.elections, args, again)
    if name in schedules.FUNCTIONS:
        slots = schedules.FUNCTIONS[name]
        return lambda store, fence, args: slots(store.schedules, args)
    if name in barriers.FUNCTIONS:
        waits = barriers.FUNCTIONS[name]
        return lambda store, fence, args: waits(store.barriers, args, sql)
    if name in shared_locks.FUNCTIONS:
        shared, retried, raises = shared_locks.FUNCTIONS[name], b"undecided" in sql, b".claim(" in sql
        return lambda store, fence, args: shared(store, fence if raises else None, args, retried)
    if name in several.FUNCTIONS or name == "look_for_deadlock":
        joint = several.FUNCTIONS.get(name)
        return lambda store, fence, args: joint(store, args, sql) if joint else execute_look(store, args, sql)
    if name == "release" and again:
        name = "release_again"
    elif name == "release_all" and b"released" in sql:
        name = "release_set"
    elif name == "release_all" and b"NULL" in sql:
        name = "release_set_again"
    elif name == "leave_queue" and b"keep =>" in sql:
        name = "leave_queue_but"
    elif name == "abandon" and b"only_ticket" in sql:
        name = "abandon_ticket"
    claims = b".claim(" in sql
    if name not in _FUNCTIONS:
        raise UnknownStatement(f"function {name}()")
    act = _FUNCTIONS[name]
    return lambda store, fence, args: act(store, fence if claims else None, args)


def _plain(sql: bytes) -> Callable[[Store, Fence, Args], Row | None]:
    if sql == ARE_YOU_THERE.sql:
        return lambda store, fence, args: ("1",)
    if sql == WHICH_ENDPOINTS.sql:
        return lambda store, fence, args: ENDPOINTS
    if sql == KEEP_SESSION.sql:
        return lambda store, fence, args: ("",)
    if sql.startswith(b"LISTEN "):
        raise_for: str | None = sql.split(b"dblock_")[1].strip(b'"').decode()
    elif sql == STOP_LISTENING.sql:
        raise_for = None
    elif sql == NOTIFY_SELF:
        return _probe
    else:
        raise UnknownStatement(f"statement {sql.decode()}")

    def listens(store: Store, fence: Fence, args: Args) -> Row | None:
        raise Listens(raise_for)

    return listens


def _probe(store: Store, fence: Fence, args: Args) -> Row | None:
    store.notify(text(args[0]).removeprefix("dblock_"), "probe")
    return "off", ""


def _try_acquire(store: Store, fence: Fence | None, args: Args) -> Row:
    name, ttl, holder, meta, attempt, durable, presence, fair, ticket, *claims = args
    own = None if ticket is None else int(ticket)
    answer = store.try_acquire(text(name), seconds(ttl), attempt, durable == "t", presence, fair == "t", own)
    _granted(store, answer, name, holder, meta)
    if fence is not None:
        _claim(fence, answer, claims)
    return (
        boolean(answer.granted),
        number(answer.token),
        number(answer.expires_at),
        number(answer.remaining),
        boolean(answer.waiting),
    )


def _acquire(store: Store, fence: Fence | None, args: Args) -> Row:
    name, ttl, holder, meta, attempt, client, durable, fair, presence, had_ticket, _, *claims = args
    answer = store.acquire(
        text(name),
        seconds(ttl),
        text(attempt),
        text(client),
        durable == "t",
        fair == "t",
        presence,
        had_ticket == "t",
    )
    _granted(store, answer, name, holder, meta)
    if answer.fresh:
        for ticket in store.tickets_of(text(name), text(attempt)):
            ticket.holder = holder
    if fence is not None:
        _claim(fence, answer, claims)
    return (
        boolean(answer.granted),
        number(answer.token),
        number(answer.expires_at),
        number(answer.remaining),
        number(answer.ticket),
        boolean(answer.first),
        boolean(answer.watched),
        boolean(answer.fresh),
    )


def _granted(store: Store, answer: Tried | Asked, name: str | None, holder: str | None, meta: str | None) -> None:
    row = store.tables.rows[text(name)]
    if answer.granted and row.holder is None:
        row.holder, row.meta = holder, meta


def _claim(fence: Fence, answer: Tried | Asked, claims: list[str | None]) -> None:
    if answer.granted and answer.token is not None:
        for resource in items(claims[0]):
            fence.claim(resource, answer.token)


def _renew_all(store: Store, fence: Fence | None, args: Args) -> Row:
    names, tokens, ttls, presence = args
    grants = zip(items(names), map(int, items(tokens)), map(seconds, items(ttls)), strict=True)
    moment, missed = store.renew_all(grants, presence)
    return (
        repr(moment),
        array(str(place) for place, _ in missed).replace('"', "") if missed else None,
        array(why for _, why in missed).replace('"', "") if missed else None,
    )


def _release(store: Store, fence: Fence | None, args: Args) -> Row:
    return (boolean(store.release(text(args[0]), int(text(args[1])))),)


def _release_again(store: Store, fence: Fence | None, args: Args) -> Row:
    return ("t" if store.release(text(args[0]), int(text(args[1]))) else None,)


def _release_all(store: Store, fence: Fence | None, args: Args) -> Row:
    store.release_all(list(zip(items(args[0]), map(int, items(args[1])), strict=True)))
    return (None,)


def _release_set(store: Store, fence: Fence | None, args: Args) -> Row:
    return str(store.release_all(list(zip(items(args[0]), map(int, items(args[1])), strict=True)))), None


def _release_set_again(store: Store, fence: Fence | None, args: Args) -> Row:
    return None, _release_set(store, fence, args)[1]


def _abandon(store: Store, fence: Fence | None, args: Args) -> Row:
    return (boolean(store.abandon(text(args[0]), text(args[1]))),)


def _abandon_ticket(store: Store, fence: Fence | None, args: Args) -> Row:
    return (boolean(store.abandon(text(args[0]), text(args[1]), only_ticket=True)),)


def _heartbeat(store: Store, fence: Fence | None, args: Args) -> Row:
    places, firsts = store.heartbeat(text(args[0]), items(args[1]))
    if not firsts:
        return str(places), None, None, None
    columns = zip(*((attempt, repr(wait), boolean(watched)) for attempt, wait, watched in firsts), strict=True)
    return (str(places), *("{" + ",".join(text(one) for one in column) + "}" for column in columns))


def _leave_queue(store: Store, fence: Fence | None, args: Args) -> Row:
    store.leave_queue(text(args[0]), args[1])
    return ("",)


def _leave_queue_but(store: Store, fence: Fence | None, args: Args) -> Row:
    store.leave_queue(text(args[0]), keep=frozenset(items(args[1])))
    return ("",)


def _register_presence(store: Store, fence: Fence | None, args: Args) -> Row:
    store.register_presence(text(args[0]), seconds(args[1]))
    return (*ENDPOINTS, "")


def _withdraw_presence(store: Store, fence: Fence | None, args: Args) -> Row:
    lost = store.withdraw_presence(text(args[0]), list(zip(items(args[1]), map(int, items(args[2])), strict=True)))
    return ("{" + ",".join(map(str, lost)) + "}" if lost else None,)


def _holder(store: Store, fence: Fence | None, args: Args) -> Row | None:
    row = store.holder(text(args[0]))
    if row is None:
        return None
    left = row.expires_at - store.now()
    token = number(row.token) if row.token > 0 else None
    return token, row.holder, row.meta, number(row.granted_at), number(row.expires_at), number(left)


def _queue(store: Store, fence: Fence | None, args: Args) -> Row:
    waiters = store.live_queue(text(args[0]))
    return (json.dumps([{"holder": ticket.holder, "since": ticket.since} for ticket in waiters]),)


def _installation(store: Store, fence: Fence | None, args: Args) -> Row:
    return (INSTALLATION,)


_FUNCTIONS: dict[str, Callable[[Store, Fence | None, Args], Row | None]] = {
    "try_acquire": _try_acquire,
    "acquire": _acquire,
    "renew_all": _renew_all,
    "release": _release,
    "release_again": _release_again,
    "release_all": _release_all,
    "release_set": _release_set,
    "release_set_again": _release_set_again,
    "abandon": _abandon,
    "abandon_ticket": _abandon_ticket,
    "heartbeat": _heartbeat,
    "holder": _holder,
    "queue": _queue,
    "installation": _installation,
    "leave_queue": _leave_queue,
    "leave_queue_but": _leave_queue_but,
    "register_presence": _register_presence,
    "withdraw_presence": _withdraw_presence,
}

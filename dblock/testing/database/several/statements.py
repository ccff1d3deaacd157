"""Execute the statements for several locks on the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dblock._core.effects import Row
from dblock.testing.database.columns import boolean, items, number, seconds, text
from dblock.testing.database.several.store import SeveralStore

Args = tuple["str | None", ...]


def _array(values: Iterable[str | None]) -> str:
    return "{" + ",".join("NULL" if value is None else value for value in values) + "}"


def _note(store: SeveralStore, names: Iterable[str], attempt: str, holder: str | None, meta: str | None) -> None:
    """Write down the holder of what an attempt has of these locks."""
    for name in names:
        row = store.tables.rows.get(name)
        if row is not None and row.attempt == attempt and row.holder is None:
            row.holder, row.meta = holder, meta
        for ticket in store.tickets_of(name, attempt):
            ticket.holder = holder


def _acquire_all(store: SeveralStore, args: Args, sql: bytes) -> Row:
    names, ttl, holder, meta, attempt, client, presence, redeem, held, ordered, places, _ = args
    wanted = items(names)
    numbers = [None if place == "NULL" else int(place) for place in items(places)]
    own = None if redeem is None else int(redeem)
    reply = store.acquire_all(
        wanted, seconds(ttl), text(attempt), client, presence, own, items(held), ordered == "t", numbers
    )
    _note(store, wanted, text(attempt), holder, meta)
    queued = reply.queued
    return (
        _array(number(one.token) for one in reply.granted),
        _array(number(one.expires_at) for one in reply.granted),
        _array(number(one.remaining) for one in reply.granted),
        number(reply.refused),
        number(reply.remaining),
        number(reply.ticket),
        boolean(queued.first) if queued else None,
        boolean(queued.watched) if queued else None,
        boolean(queued.fresh) if queued else None,
        number(reply.cycle),
        reply.waiter,
        number(reply.wanted),
    )


def _acquire_any(store: SeveralStore, args: Args, sql: bytes) -> Row:
    names, ttl, holder, meta, attempt, client, presence, had_tickets, _ = args
    wanted = items(names)
    reply = store.acquire_any(wanted, seconds(ttl), text(attempt), client, presence, had_tickets == "t")
    _note(store, wanted, text(attempt), holder, meta)
    granted, queued = reply.granted, reply.queued
    return (
        reply.name,
        number(granted.token) if granted else None,
        number(granted.expires_at) if granted else None,
        number(reply.remaining),
        str(reply.left_queues),
        "f",
        _array(number(one.ticket) for one in queued) if queued else None,
        _array(number(one.remaining) for one in queued) if queued else None,
        _array(boolean(one.first) for one in queued) if queued else None,
        _array(boolean(one.watched) for one in queued) if queued else None,
        _array(boolean(one.fresh) for one in queued) if queued else None,
    )


def _abandon_all(store: SeveralStore, args: Args, sql: bytes) -> Row:
    return (str(store.abandon_all(items(args[0]), text(args[1]), b"only_tickets" in sql)),)


def _give_way(store: SeveralStore, args: Args, sql: bytes) -> Row:
    names, attempt, waiter, client, presence, holder, ordered = args
    own = store.give_way(items(names), text(attempt), text(waiter), text(client), presence, ordered == "t")
    _note(store, items(names), text(attempt), holder, None)
    return (number(own),)


def _wake_set(store: SeveralStore, args: Args, sql: bytes) -> Row:
    return (boolean(store.wake_set(text(args[0]))),)


FUNCTIONS: dict[str, Callable[[SeveralStore, Args, bytes], Row]] = {
    "acquire_all": _acquire_all,
    "acquire_any": _acquire_any,
    "abandon_all": _abandon_all,
    "give_way": _give_way,
    "wake_set": _wake_set,
}

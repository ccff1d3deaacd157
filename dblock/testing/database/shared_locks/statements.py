"""Execute the statements of shared locks on the store."""

from __future__ import annotations

import json
from collections.abc import Callable

from dblock._core.effects import Row
from dblock.testing.database.columns import boolean, items, number, seconds, text
from dblock.testing.database.fence import Fence
from dblock.testing.database.shared_locks.store import SharedStore
from dblock.testing.database.tables import Row as Share

Args = tuple["str | None", ...]


def _acquire(store: SharedStore, fence: Fence | None, args: Args, again: bool) -> Row:
    name, kind, mode, permits, ttl, holder, meta, attempt, client, presence, had_ticket, _, *claims = args
    answer = store.acquire_shared(
        text(name),
        text(kind),
        mode,
        None if permits is None else int(permits),
        seconds(ttl),
        text(attempt),
        client,
        presence,
        had_ticket == "t",
    )
    if answer.granted:
        share = store.tables.rows[text(answer.share)]
        if share.holder is None:
            share.holder, share.meta = holder, meta
        if fence is not None and answer.token is not None:
            for resource in items(claims[0]):
                fence.claim(resource.replace("{permit}", str(answer.permit)), answer.token)
    elif answer.fresh:
        for ticket in store.tickets_of(text(name), text(attempt)):
            ticket.holder = holder
    return (
        boolean(answer.granted),
        number(answer.token),
        number(answer.expires_at),
        number(answer.remaining),
        number(answer.ticket),
        boolean(answer.first),
        boolean(answer.watched),
        _told_again(answer.fresh) if again else boolean(answer.fresh),
        answer.share,
    )


def _told_again(fresh: bool | None) -> str:
    return boolean(fresh) or "undecided"


def _downgrade(store: SharedStore, fence: Fence | None, args: Args, again: bool) -> Row:
    name, token, attempt, ttl, presence = args
    answer = store.downgrade(text(name), int(text(token)), text(attempt), seconds(ttl), presence)
    if not answer.granted:
        return "f", None, None, None, None
    return "t", number(answer.token), number(answer.expires_at), number(answer.remaining), answer.share


def _resize(store: SharedStore, fence: Fence | None, args: Args, again: bool) -> Row:
    return (number(store.resize_semaphore(text(args[0]), int(text(args[1])))),)


def _state(store: SharedStore, fence: Fence | None, args: Args, again: bool) -> Row:
    kind, permits, available, shares = store.shared_state(text(args[0]))
    return kind, number(permits), number(available), json.dumps([_holder(store, share) for share in shares])


def _holder(store: SharedStore, share: Share) -> dict[str, object]:
    return {
        "share": share.name,
        "permit": share.permit,
        "token": share.token,
        "holder": share.holder,
        "meta": None if share.meta is None else json.loads(share.meta),
        "granted_at": share.granted_at,
        "expires_at": share.expires_at,
        "remaining": share.expires_at - store.now(),
    }


def _wake(store: SharedStore, fence: Fence | None, args: Args, again: bool) -> Row:
    store.wake_if_free(text(args[0]))
    return ("",)


FUNCTIONS: dict[str, Callable[[SharedStore, Fence | None, Args, bool], Row]] = {
    "acquire_shared": _acquire,
    "downgrade": _downgrade,
    "resize_semaphore": _resize,
    "shared_state": _state,
    "wake_queue": _wake,
}

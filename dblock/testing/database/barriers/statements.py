"""Execute the statements of dblock.recipes.barriers on the store."""

from __future__ import annotations

from collections.abc import Callable

from dblock._core.effects import Row
from dblock.testing.database.barriers.store import Barriers
from dblock.testing.database.columns import boolean, number, text

Args = tuple["str | None", ...]


def _arrive(barriers: Barriers, args: Args, sql: bytes) -> Row:
    name, parties, attempt, client, _, presence = args
    reply = barriers.arrive_barrier(text(name), int(text(parties)), text(attempt), text(client), presence)
    wake = reply.tripped if b"(r).tripped" in sql else reply.wake
    return number(reply.number), boolean(wake), boolean(reply.fresh), number(reply.next_check)


def _leave(barriers: Barriers, args: Args, sql: bytes) -> Row:
    return (number(barriers.leave_barrier(text(args[0]), text(args[1]))),)


def _wake(barriers: Barriers, args: Args, sql: bytes) -> Row:
    return (number(barriers.wake_waiters(text(args[0]), text(args[1]))),)


def _count_down(barriers: Barriers, args: Args, sql: bytes) -> Row:
    name, count, by, attempt = args
    remaining, opened = barriers.count_down(text(name), int(text(count)), int(text(by)), text(attempt))
    return number(remaining), boolean(remaining == 0 if b"remaining = 0" in sql else opened)


def _await(barriers: Barriers, args: Args, sql: bytes) -> Row:
    name, count, attempt, client, _, presence = args
    remaining, fresh = barriers.await_latch(text(name), int(text(count)), text(attempt), text(client), presence)
    return number(remaining), boolean(fresh)


def _remaining(barriers: Barriers, args: Args, sql: bytes) -> Row:
    return (number(barriers.latch_remaining(text(args[0]), int(text(args[1])))),)


FUNCTIONS: dict[str, Callable[[Barriers, Args, bytes], Row]] = {
    "arrive_barrier": _arrive,
    "leave_barrier": _leave,
    "wake_waiters": _wake,
    "count_down": _count_down,
    "await_latch": _await,
    "latch_remaining": _remaining,
}

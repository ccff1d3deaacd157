"""Bugs to put into a run, one at a time. The checks must find each of them.

Most are mistakes that locks of this kind have really had. Some are put into the store, instead of what the SQL does,
the others into dblock's own code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import psycopg

import dblock._core.acquire
import dblock._core.presence
import dblock._core.renewal
import dblock._runtime.call_retry
from dblock._core.acquire import LockFlows
from dblock._core.doubtful_presences import DoubtfulPresences
from dblock._core.effects import Flow
from dblock._core.lease_state import LeaseState
from dblock._core.listener_failures import ServerState
from dblock._core.listener_flow import ListenerFlow
from dblock._core.presence import Presence
from dblock._core.replies import Grant
from dblock._core.timings import Timings
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import is_overdue
from dblock.errors import Unavailable
from dblock.testing.database.tables import Row, Ticket
from tests.robustness.simulation.process import Process
from tests.robustness.simulation.run import Run

R = TypeVar("R", bound=Run)

Bug = Callable[[R], Iterator[None]]
"""Puts a bug into a run, and yields while the run lasts."""

BUGS: dict[str, Bug[Run]] = {}


def _bug(put: Bug[Run]) -> Bug[Run]:
    BUGS[put.__name__] = put
    return put


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute. The result is the original."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


@_bug
def token_minted_early(run: Run) -> Iterator[None]:
    """Mint the token when the request comes, before the lock is granted."""
    store = run.store
    minted: dict[str, int] = {}

    def early(act: Callable[..., Any], name: str, ttl: float, attempt: str, *args: Any, **options: Any) -> Any:
        if attempt not in minted:
            minted[attempt] = store.tables.sequence = store.tables.sequence + 1
        return act(name, ttl, attempt, *args, **options)

    def grant(row: Row, ttl: float, attempt: str, *args: Any) -> None:
        with instead(store, "mint", lambda row: minted[attempt]):
            granted(row, ttl, attempt, *args)

    granted = store.grant
    store.try_acquire = functools.partial(early, store.try_acquire)  # type: ignore[method-assign]
    store.acquire = functools.partial(early, store.acquire)  # type: ignore[method-assign]
    store.grant = grant  # type: ignore[method-assign,assignment]
    yield


@_bug
def release_by_name(run: Run) -> Iterator[None]:
    """Release the lock of any holder."""
    store = run.store

    def release(name: str, token: int) -> bool:
        row = store.tables.rows.get(name)
        if row is None or row.expires_at <= store.now():
            return False
        store.free(row, "released", token)
        store.wake_next(name)
        return True

    store.release = release  # type: ignore[method-assign]
    yield


@_bug
def renewal_revives(run: Run) -> Iterator[None]:
    """Renew a lease that has expired or was released, as long as the lock is free."""
    store = run.store
    renew_all = store.renew_all

    def renew(grants: Any, presence: str | None = None) -> Any:
        grants = list(grants)
        moment, missed = renew_all(grants, presence)
        for place, why in list(missed):
            if why in ("expired", "released"):
                name, token, ttl = grants[place - 1]
                row = store.tables.rows[name]
                store.extend(row, token, ttl)
                missed.remove((place, why))
        return moment, missed

    store.renew_all = renew  # type: ignore[method-assign]
    yield


@_bug
def renewal_of_the_forced(run: Run) -> Iterator[None]:
    """Keep renewing for a holder that was told to release, so that it never has to."""
    store = run.store
    extend, renew_all = store.extend, store.renew_all

    def renew(grants: Any, presence: str | None = None) -> Any:
        grants = list(grants)
        moment, missed = renew_all(grants, presence)
        for place, why in [one for one in missed if one[1] == "forced"]:
            name, token, ttl = grants[place - 1]
            extend(store.tables.rows[name], token, ttl)
            missed.remove((place, why))
        return moment, missed

    store.renew_all = renew  # type: ignore[method-assign]
    yield


@_bug
def keep_alive_outlives_release(run: Run) -> Iterator[None]:
    """Do not mark a lease as being released, and keep renewing it."""
    with instead(LeaseState, "let_go", lambda state: None):
        yield


@_bug
def trust_from_the_reply(run: Run) -> Iterator[None]:
    """Count the trust window from when the reply came."""

    def in_time(flows: LockFlows, grant: Grant) -> Flow[Grant | None]:
        until = flows.clock() + grant.trusted_until - grant.sent_at
        kept: Grant | None = yield from before(flows, grant._replace(trusted_until=until))
        return kept

    with instead(LockFlows, "_in_time", in_time) as before:
        yield


@_bug
def whole_ttl_when_sent_again(run: Run) -> Iterator[None]:
    """Reply to a retried request as if its grant were new."""
    run.store.left_of_own = lambda row, ttl, remaining: ttl  # type: ignore[method-assign]
    yield


@_bug
def no_margin(run: Run) -> Iterator[None]:
    """Trust a lease to its very end, whatever the speed of the clock."""
    with instead(dblock._core.acquire, "TRUST", 1.0), instead(dblock._core.renewal, "TRUST", 1.0):
        yield


@_bug
def lost_wake_up(run: Run) -> Iterator[None]:
    """Wake no waiter."""
    notify = run.store.notify
    run.store.notify = lambda client, payload: notify(client, payload) if payload == "probe" else None
    yield


@_bug
def grant_past_the_queue(run: Run) -> Iterator[None]:
    """Grant a free lock to the first attempt that asks, past the queue."""
    try_acquire: Any = run.store.try_acquire

    def unfair(*args: Any, **options: Any) -> Any:
        if len(args) > 5:
            return try_acquire(*args[:5], False, *args[6:])
        return try_acquire(*args, **options)

    run.store.try_acquire = unfair  # type: ignore[method-assign]
    yield


@_bug
def lost_ticket_redeemed(run: Run) -> Iterator[None]:
    """Accept a ticket that is gone."""
    redeem = run.store.redeem

    def always(row: Row, attempt: str | None, number: int) -> bool:
        return redeem(row, attempt, number) or all(
            ticket.attempt != attempt for ticket in run.store.tables.tickets.get(row.name, ())
        )

    run.store.redeem = always  # type: ignore[method-assign]
    yield


@_bug
def tickets_by_length(run: Run) -> Iterator[None]:
    """Number a ticket by the length of the queue, so that a number may come twice."""
    store = run.store

    def line_up(row: Row, attempt: str, client: str, presence: str | None) -> Ticket:
        line = store.tables.tickets.setdefault(row.name, [])
        made = Ticket(row.name, len(line) + 1, attempt, client, presence, store.now())
        line.append(made)
        line.sort(key=lambda ticket: ticket.number)
        return made

    store.line_up = line_up  # type: ignore[method-assign]
    yield


@_bug
def dead_never_passed_over(run: Run) -> Iterator[None]:
    """Wait for dead waiters."""
    run.store.first_in_queue = lambda name, prune: next(  # type: ignore[method-assign]
        iter(run.store.tables.tickets.get(name, ())), None
    )
    yield


@_bug
def living_passed_over(run: Run) -> Iterator[None]:
    """Take a client for dead after a second without a heartbeat."""
    store = run.store
    touch_client = store.touch_client

    def barely(client: str) -> None:
        touch_client(client)
        store.tables.clients[client] = store.now() + 1.0

    store.touch_client = barely  # type: ignore[method-assign]
    yield


@_bug
def reaper_takes_the_living(run: Run) -> Iterator[None]:
    """Take a lock for idle if it was not renewed for a while."""
    run.store.is_idle = lambda row, since: row.expires_at - row.ttl / 2 <= since  # type: ignore[method-assign]
    yield


@_bug
def force_frees_without_telling(run: Run) -> Iterator[None]:
    """Free a lock at once where its holder should be told to release it."""
    store = run.store
    force_release = store.force_release

    def force(name: str, token: int, now: bool = False) -> bool:
        row = store.tables.rows.get(name)
        if not now and row is not None and row.token == token and row.expires_at > store.now():
            store.free(row, "released", token)
            return True
        return force_release(name, token, now)

    store.force_release = force  # type: ignore[method-assign]
    yield


@_bug
def no_jump_after_promotion(run: Run) -> Iterator[None]:
    """Mint tokens a second time after a promotion."""
    yield from _ignore_the_clock(run, 0)


@_bug
def leap_after_promotion(run: Run) -> Iterator[None]:
    """Leap by 2^40 at each start of a server, instead of following its clock."""
    yield from _ignore_the_clock(run, 1 << 40)


def _ignore_the_clock(run: Run, leap: int) -> Iterator[None]:
    store = run.store

    def catch_up_tokens(above: int) -> None:
        if store.tables.server_start != store.incarnation:
            store.tables.sequence += leap
            store.tables.server_start = store.incarnation

    store.follows_the_clock = lambda token: True  # type: ignore[method-assign]
    store.catch_up_tokens = catch_up_tokens  # type: ignore[method-assign]
    yield


@_bug
def grant_not_on_disk(run: Run) -> Iterator[None]:
    """Reply before a grant is on disk."""
    store = run.store
    grant = store.grant

    def quick(*args: Any) -> None:
        durable = store.durable
        grant(*args)
        store.durable = durable

    store.grant = quick  # type: ignore[method-assign,assignment]
    yield


@_bug
def withdrawal_ignored(run: Run) -> Iterator[None]:
    """Take the locks of a process that has reported that it is alive."""
    store = run.store
    withdraw_presence = store.withdraw_presence

    def deaf(presence: str, grants: Any) -> list[int]:
        mark = store.marks.get(presence)
        lost = withdraw_presence(presence, grants)
        if mark is not None:
            store.marks[presence] = mark
        return lost

    store.withdraw_presence = deaf  # type: ignore[method-assign]
    yield


@_bug
def doubtful_presence_forgotten(run: Run) -> Iterator[None]:
    """Make the listener forget a presence whose connection is gone: neither withdraw it nor give its leases up."""
    with (
        instead(DoubtfulPresences, "add", lambda doubtful, presence, terminated=False: presence.end()),
        instead(DoubtfulPresences, "_remove", lambda doubtful, presence: None),
    ):
        yield


@_bug
def termination_taken_for_a_restart(run: Run) -> Iterator[None]:
    """Make the listener take the end of its own session for the end of the server."""

    def add(doubtful: DoubtfulPresences, presence: Presence, terminated: bool = False) -> None:
        before(doubtful, presence, terminated)
        if terminated:
            doubtful.end(presence)

    with instead(DoubtfulPresences, "add", add) as before:
        yield


@_bug
def shutdown_taken_for_its_end(run: Run) -> Iterator[None]:
    """Make the listener take a server that is shutting down for one that has ended all sessions."""

    def servers_are(doubtful: DoubtfulPresences, states: Mapping[str, ServerState], at: float) -> None:
        before(doubtful, dict.fromkeys(states, ServerState.STARTING), at)

    with instead(DoubtfulPresences, "servers_are", servers_are) as before:
        yield


@_bug
def failed_connection_kept(run: Run) -> Iterator[None]:
    """Make the listener keep a connection that has failed, so that it never opens another."""

    def failed(flow: ListenerFlow, connection: Any, error: Any) -> Iterator[Any]:
        flow._replied_at = flow._now()
        return iter(())

    with instead(ListenerFlow, "_failed", failed):
        yield


@_bug
def grace_overstayed(run: Run) -> Iterator[None]:
    """Trust a presence that is gone for longer than its grace."""
    with instead(Process, "timings", Timings(own_part=3.0)):
        yield


@_bug
def grace_too_short(run: Run) -> Iterator[None]:
    """Take the locks of a process at once when its connection is closed."""
    store = run.store
    remaining_grace = store.remaining_grace

    def at_once(presence: str) -> float | None:
        return None if remaining_grace(presence) is None else 0.0

    store.remaining_grace = at_once  # type: ignore[method-assign]
    yield


@_bug
def second_break_is_a_refusal(run: Run) -> Iterator[None]:
    """Tell a caller whose retry breaks too that nothing was done."""
    raise_or_retry = CallRetry.raise_or_retry

    def raise_or_refuse(retry: CallRetry, error: psycopg.Error, raw: RawConnection | None) -> bool:
        try:
            return raise_or_retry(retry, error, raw)
        except Unavailable as refused:
            refused.may_be_done = is_overdue(error)
            raise

    with instead(CallRetry, "raise_or_retry", raise_or_refuse):
        yield


@_bug
def broken_pooler_is_a_refusal(run: Run) -> Iterator[None]:
    """Take the message of a pooler whose connection to the server has broken for that of the function."""

    def is_broken(error: psycopg.Error) -> bool:
        return error.sqlstate is None

    with instead(dblock._runtime.call_retry, "is_broken", is_broken):
        yield


@_bug
def fence_without_write_numbers(run: Run) -> Iterator[None]:
    """Accept every write under the highest token, in whatever order."""
    fence = run.fence
    fence.passes = lambda resource, token, number: (  # type: ignore[method-assign]
        token >= fence.stands.get(resource, (0, 0))[0]
    )
    yield


@_bug
def fence_without_claim(run: Run) -> Iterator[None]:
    """Do not raise the fence with the grant, but with the first write."""
    fence = run.fence
    fence.claim = lambda resource, token: fence.claimed.append((resource, token))  # type: ignore[method-assign]
    yield

"""Bugs of shared locks to put into a run, one at a time. The checks must find each of them.

Most are mistakes that read-write locks and semaphores of other libraries have really had.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock._core.lease_state import LeaseState
from dblock._core.replies import Grant
from dblock._core.shared_acquire import SharedFlows, read_write_options
from dblock.testing.database.shared_locks.store import EXCLUDING
from dblock.testing.database.tables import Row, Ticket
from tests.robustness.simulation.mutations import Bug, instead
from tests.robustness.simulation.shared_locks.run import SharedRun
from tests.robustness.simulation.shared_locks.worker import WriteLease

BUGS: dict[str, Bug[SharedRun]] = {}


def _bug(put: Bug[SharedRun]) -> Bug[SharedRun]:
    BUGS[put.__name__] = put
    return put


# In the place of the SQL functions.


@_bug
def reader_beside_a_writer(run: SharedRun) -> Iterator[None]:
    """Grant a reader its share whatever is held."""
    run.store.excluding = lambda mode: () if mode == "read" else EXCLUDING[mode]  # type: ignore[method-assign]
    yield


@_bug
def writer_beside_readers(run: SharedRun) -> Iterator[None]:
    """Let only the writer's share exclude a writer."""
    run.store.excluding = lambda mode: ("writer",) if mode else ("permit",)  # type: ignore[method-assign]
    yield


@_bug
def readers_past_a_writer(run: SharedRun) -> Iterator[None]:
    """Let readers enter past a waiting writer, which a stream of them starves."""
    store = run.store
    live_tickets = store.live_tickets

    def without_writers(name: str, enough: int, wanted: str | None = None, *args: Any, **options: Any) -> list[Ticket]:
        return [] if wanted == "write" else live_tickets(name, enough, wanted, *args, **options)

    store.live_tickets = without_writers  # type: ignore[method-assign]
    yield


@_bug
def reader_behind_a_later_writer(run: SharedRun) -> Iterator[None]:
    """Let a reader wait for every writer in the queue, also for one that came later and waits for the reader."""
    run.store.limit = lambda mode, own: None if mode == "read" or own is None else own.number  # type: ignore[method-assign]
    yield


@_bug
def try_past_the_waiters(run: SharedRun) -> Iterator[None]:
    """Let a try without a ticket take what waiters at the front are about to take."""
    store = run.store
    acquire_shared = store.acquire_shared

    def unfair(*args: Any) -> Any:
        if args[6] is not None:
            return acquire_shared(*args)
        with instead(store, "live_tickets", lambda *args, **options: []):
            return acquire_shared(*args)

    store.acquire_shared = unfair  # type: ignore[method-assign,assignment]
    yield


@_bug
def try_beyond_the_permits(run: SharedRun) -> Iterator[None]:
    """Let a try without a ticket have one permit more than there are."""
    free_shares = run.store.free_shares

    def more(head: Row, mode: str | None, held: int, tries: bool) -> int:
        return free_shares(head, mode, held, tries) + (mode is None and tries)

    run.store.free_shares = more  # type: ignore[method-assign]
    run.store.share_number = lambda head, mode: run.store.lowest_free_share(  # type: ignore[method-assign]
        head.name, "permit" if mode is None else "reader", 1 << 31
    )
    yield


@_bug
def permit_numbered_by_count(run: SharedRun) -> Iterator[None]:
    """Number a permit by how many are held, so that it may be one of these."""
    store = run.store
    share_number = store.share_number

    def by_count(head: Row, mode: str | None) -> int | None:
        return len(store.held_shares(head.name, ["permit"])) if mode is None else share_number(head, mode)

    store.share_number = by_count  # type: ignore[method-assign]
    yield


@_bug
def stored_count_of_permits(run: SharedRun) -> Iterator[None]:
    """Keep the number of held permits in a counter, which a holder whose lease expires never gives back."""
    store = run.store
    taken = 0
    grant_share, free = store.grant_share, store.free

    def grant(head: Row, *args: Any) -> None:
        nonlocal taken
        taken += head.kind == "semaphore"
        grant_share(head, *args)

    def give_back(row: Row, *args: Any) -> None:
        nonlocal taken
        taken -= row.kind == "permit"
        free(row, *args)

    def counted(head: Row, mode: str | None, held: int, tries: bool) -> int:
        return max((head.permits or 0) - taken, 0) if mode is None else int(held == 0)

    store.grant_share, store.free = grant, give_back  # type: ignore[method-assign,assignment]
    store.free_shares = counted  # type: ignore[method-assign]
    yield


@_bug
def smaller_semaphore_ignored(run: SharedRun) -> Iterator[None]:
    """Keep granting the number of permits that a semaphore had before it was made smaller."""
    store = run.store
    resize, most = store.resize_semaphore, 0

    def resized(name: str, permits: int) -> int | None:
        nonlocal most
        before = resize(name, permits)
        most = max(most, before or 0, permits)
        return before

    free_shares = store.free_shares
    store.resize_semaphore = resized  # type: ignore[method-assign]
    store.free_shares = lambda head, mode, held, tries: (  # type: ignore[method-assign]
        max(max(head.permits or 0, most) - held, 0) if mode is None else free_shares(head, mode, held, tries)
    )
    store.share_number = lambda head, mode: store.lowest_free_share(  # type: ignore[method-assign]
        head.name, "permit" if mode is None else "reader", 1 << 31
    )
    yield


@_bug
def release_wakes_no_waiter(run: SharedRun) -> Iterator[None]:
    """Leave it to the waiters to find out that a share was released."""
    run.store.wake_shared = lambda head: None  # type: ignore[method-assign]
    yield


@_bug
def only_one_reader_woken(run: SharedRun) -> Iterator[None]:
    """Wake the first of the readers that can enter together."""
    notify_each = run.store.notify_each
    run.store.notify_each = lambda tickets: notify_each(tickets[:1])  # type: ignore[method-assign]
    yield


@_bug
def resize_unseen(run: SharedRun) -> Iterator[None]:
    """Wake no waiter when a semaphore is made larger."""
    store = run.store
    resize = store.resize_semaphore

    def silent(name: str, permits: int) -> int | None:
        with instead(store, "notify_shared", lambda name: None):
            return resize(name, permits)

    store.resize_semaphore = silent  # type: ignore[method-assign]
    yield


@_bug
def one_reader_renews_all(run: SharedRun) -> Iterator[None]:
    """Let the renewal of one share keep all shares of the lock, also those of the dead."""
    store = run.store
    renew_all = store.renew_all

    def renew(grants: Any, presence: str | None = None) -> Any:
        grants = list(grants)
        reply = renew_all(grants, presence)
        for name, _, ttl in grants:
            row = store.tables.rows.get(name)
            if row is not None and row.kind == "reader" and row.head is not None:
                for other in store.held_shares(row.head, ["reader"]):
                    if other.forced_at is None:
                        store.extend(other, other.token, ttl)
        return reply

    store.renew_all = renew  # type: ignore[method-assign]
    yield


@_bug
def share_token_minted_early(run: SharedRun) -> Iterator[None]:
    """Mint the token when the request comes, before a share is granted."""
    store = run.store
    minted: dict[str, int] = {}
    acquire_shared, mint = store.acquire_shared, store.mint_shared

    def early(*args: Any) -> Any:
        head = store.tables.rows.get(args[0])
        if head is not None and args[5] not in minted:
            minted[args[5]] = store.mint(head)
        return acquire_shared(*args)

    store.acquire_shared = early  # type: ignore[method-assign,assignment]
    store.mint_shared = lambda head, attempt: (  # type: ignore[method-assign]
        minted.pop(attempt or "", None) or mint(head, attempt)
    )
    yield


@_bug
def retry_granted_again(run: SharedRun) -> Iterator[None]:
    """Grant a retry a second share, because the first one is not recognized."""
    run.store.share_of = lambda name, kind, attempt: None  # type: ignore[method-assign]
    yield


@_bug
def share_kept_after_giving_up(run: SharedRun) -> Iterator[None]:
    """Give back the ticket of a caller that leaves, but not its share."""
    run.store.shares_of = lambda name, attempt: []  # type: ignore[method-assign]
    yield


@_bug
def dead_waiters_block_the_queue(run: SharedRun) -> Iterator[None]:
    """Count the tickets of dead clients as waiters that are ahead."""
    store = run.store

    def all_of_them(
        name: str, enough: int, wanted: str | None = None, before: int | None = None, prune: bool = False
    ) -> list[Ticket]:
        line = store.tables.tickets.get(name, [])
        last = math.inf if before is None else before
        return [one for one in line if wanted in (None, one.mode) and one.number < last][: max(enough, 0)]

    store.live_tickets = all_of_them  # type: ignore[method-assign]
    yield


@_bug
def share_taken_from_the_living(run: SharedRun) -> Iterator[None]:
    """Take the shares of a process at once when its connection is closed."""
    store = run.store
    look, remaining_grace = store.look_at_shares, store.remaining_grace

    def at_once(presence: str) -> float | None:
        return None if remaining_grace(presence) is None else 0.0

    def hasty(*args: Any) -> Any:
        with instead(store, "remaining_grace", at_once):
            return look(*args)

    store.look_at_shares = hasty  # type: ignore[method-assign,assignment]
    yield


@_bug
def downgrade_of_a_lost_lease(run: SharedRun) -> Iterator[None]:
    """Turn a writer whose lease has expired into a reader, or one that was told to release."""
    run.store.may_downgrade = lambda writer, token: writer.token == token  # type: ignore[method-assign]
    yield


# In dblock's own code.


@_bug
def write_lease_believed_after_a_lost_reply(run: SharedRun) -> Iterator[None]:
    """Go on believing in the write lease, and keep the read lease, when the reply to a downgrade was lost."""
    leave = LeaseState._leave

    @contextlib.contextmanager
    def leaving(state: LeaseState) -> Iterator[bool]:
        leave(state, math.inf)
        try:
            yield True
        except BaseException:
            leave(state, None)
            raise
        leave(state, state.now())

    def give_back(writer: WriteLease, attempt: str) -> Flow[None]:
        yield from ()

    with instead(LeaseState, "leaving", leaving), instead(WriteLease, "_give_back", give_back):
        yield


@_bug
def downgrade_in_two_steps(run: SharedRun) -> Iterator[None]:
    """Release the write lock, and then acquire the read lock."""

    def downgrade(flows: SharedFlows, state: LeaseState, attempt: str) -> Flow[Grant | None]:
        state.let_go()
        yield from flows.release(state.name, state.token, state.trusted_until)
        state.release_confirmed()
        yield Sleep(0.01)
        options = read_write_options("read", state.lock, state.ttl, None, None, True)
        return (yield from flows.acquire(options, None, attempt))

    with instead(SharedFlows, "downgrade", downgrade):
        yield

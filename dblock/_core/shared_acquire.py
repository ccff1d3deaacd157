"""The flows of shared locks: read-write locks and semaphores.

Guarantee: a reader, a writer and the holder of a permit each have a grant of their own, with its own token, deadline
and presence. The database decides, one request after another for each lock, which of them may hold it together. A share
is a row like that of any lock, under a name of its own, so the keep-alive renews and releases it like any other grant.

Waiting is the same as for a plain lock: the ticket, the wake-up, the heartbeat, the trust window, the cleanup of an
attempt that is given up. Only the request and its reply differ. One request does it all: it grants the share, or it
keeps the waiter's ticket.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dblock._core.acquire import POLL_FIRST, TRUST, LockFlows, NotGranted
from dblock._core.effects import Call, Flow, Sleep
from dblock._core.lease_state import LeaseState
from dblock._core.options import Claimer, LockOptions, Seconds, brief, check_name, interval, lock_options
from dblock._core.replies import Grant, Holder, TicketStatus, moment
from dblock.errors import (
    ClaimBusy,
    DatabaseError,
    DblockError,
    InvalidArgument,
    PermitsDiffer,
    Unavailable,
    WrongKind,
)

READ_WRITE = "read-write"
SEMAPHORE = "semaphore"
PLAIN = "plain"

PERMITS_MAX = 100_000
NAME_BYTES = 480
"""The longest name of a shared lock: the names of its shares are longer."""

PERMIT = "{permit}"
"""What stands for the number of the permit in the claims of a semaphore."""


@dataclass(frozen=True)
class SharedOptions(LockOptions):
    """The name and options of a read-write lock or a semaphore, checked."""

    kind: str = READ_WRITE
    mode: str | None = None
    """`read` or `write`, for a read-write lock."""
    permits: int | None = None
    """How many permits the semaphore has; None takes the number that it has already."""


def check_permits(name: str, permits: int | None) -> int | None:
    """Return the number of permits of a semaphore if it is within its limits."""
    if permits is not None and (
        isinstance(permits, bool) or not isinstance(permits, int) or not 1 <= permits <= PERMITS_MAX
    ):
        raise InvalidArgument(
            f"The permits of semaphore {name!a:.80} are a whole number from 1 to {PERMITS_MAX}; got {permits!r:.80}."
        )
    return permits


def _shared_name(name: str) -> str:
    return check_name(name, "The name of a read-write lock or a semaphore", NAME_BYTES)


def read_write_options(
    mode: str,
    name: str,
    ttl: Seconds,
    timeout: Seconds | None,
    meta: Any,
    keep_alive: bool,
    claims: Sequence[str | Claimer] = (),
) -> SharedOptions:
    """Check the options of one side of a read-write lock."""
    plain = lock_options(_shared_name(name), ttl, timeout, meta, True, keep_alive, True, claims)
    return SharedOptions(**vars(plain), kind=READ_WRITE, mode=mode)


def semaphore_options(
    permits: int | None,
    name: str,
    ttl: Seconds,
    timeout: Seconds | None,
    meta: Any,
    keep_alive: bool,
    claims: Sequence[str] = (),
) -> SharedOptions:
    """Check the options of a semaphore. Each claim must be a resource of one permit alone.

    Two holders would otherwise raise the fence of the same resource, and the second would shut out the first.
    """
    plain = lock_options(_shared_name(name), ttl, timeout, meta, True, keep_alive, True, claims)
    for claim in (*plain.claims, *plain.claimers):
        if not isinstance(claim, str) or PERMIT not in claim:
            raise InvalidArgument(
                f"A claim of semaphore {name!a:.80} is the name of a resource with {PERMIT} in it, such as "
                f"'gpu:{PERMIT}'. Holders of different permits would shut each other out of a resource that both "
                f"claim; got {brief(claim)}."
            )
    return SharedOptions(**vars(plain), kind=SEMAPHORE, permits=check_permits(name, permits))


def is_reader(state: LeaseState) -> bool:
    """Return whether a lease of a read-write lock is a reader's, by the name of its share."""
    return state.name.startswith(f"{state.lock}#reader-")


class SharedFlows(LockFlows):
    """The flows of one client, for plain and for shared locks."""

    def _try(
        self, options: LockOptions, attempt: str, within: float = math.inf, ticket: int | None = None
    ) -> Flow[Grant | NotGranted]:
        if isinstance(options, SharedOptions):
            return self._try_share(options, attempt, within, ticket is not None)
        return LockFlows._try(self, options, attempt, within, ticket)  # cheaper than super(), on each attempt

    def _enqueue(
        self, options: LockOptions, attempt: str, within: float, had_ticket: bool, wait: bool = True
    ) -> Flow[Grant | TicketStatus | None]:
        if isinstance(options, SharedOptions):
            return self._ask(options, attempt, within, self.client, had_ticket, wait)
        return super()._enqueue(options, attempt, within, had_ticket, wait)

    def _try_share(
        self, options: SharedOptions, attempt: str, within: float, had_ticket: bool
    ) -> Flow[Grant | NotGranted]:
        """Ask once; with a ticket, redeem it if it is this waiter's turn."""
        reply = yield from self._ask(options, attempt, within, self.client if had_ticket else None, had_ticket)
        if isinstance(reply, TicketStatus):
            return NotGranted(others_wait=True)
        return NotGranted() if reply is None else reply

    def _ask(
        self,
        options: SharedOptions,
        attempt: str,
        within: float,
        client: str | None,
        had_ticket: bool,
        wait: bool = True,
    ) -> Flow[Grant | TicketStatus | None]:
        """Ask for a share, and with a `client` take or keep a ticket unless it is granted.

        The result is None if it was not decided, because another transaction has locked the lock's row.
        """
        sql, again = self.statements.acquire_shared, self.statements.acquire_shared_again
        give_up_at = self.clock() + self._give_up_within
        while True:
            sent_at = self.clock()
            presence = self._valid_presence(sent_at)
            args = (
                options.name,
                options.kind,
                options.mode,
                None if options.permits is None else str(options.permits),
                options.interval,
                self.holder_name(),
                options.meta,
                attempt,
                client,
                presence.name if presence else None,
                "t" if had_ticket else "f",
                "t" if wait else "f",
            )
            try:
                row = yield self._call(options, sql, args, again, within)
            except ClaimBusy:
                return None
            granted, token, expires_at, remaining, ticket, first, watched, fresh, share, *_ = row
            if granted == "t" or fresh != "undecided":
                break
            # The first request got no reply, and its transaction may be what has locked the row.
            if self.clock() >= give_up_at:
                error = Unavailable(f"The database did not decide a request for lock {options.name!a:.80} in time.")
                error.may_be_done = True
                raise error
            sql = again
            yield Sleep(self.uniform(POLL_FIRST / 2, POLL_FIRST))
        left = float(remaining)
        if granted == "t":
            trusted_until = sent_at + left * TRUST
            grant = Grant(share, int(token), float(expires_at), trusted_until, sent_at, presence, options.name)
            return (yield from self._in_time(grant))
        if fresh is None:
            return None
        next_check = min(left, self._holder_check_interval) if watched == "t" else left
        return TicketStatus(int(ticket or 0), fresh == "t", first == "t", next_check)

    def downgrade(self, state: LeaseState, attempt: str) -> Flow[Grant | None]:
        """Turn a writer's grant into a reader's. The result is None if the writer does not hold the lock any more.

        While the request is under way, the write lease is not believed, and the keep-alive does not take it for lost.
        If the request fails, the write lease is as it was before, unless it may be done: no reply says that it is not.
        """
        with state.leaving():
            reply = yield from self._ask_to_downgrade(state, attempt)
        if reply is None:
            return None
        presence, sent_at, (token, expires_at, remaining, share) = reply
        state.let_go()
        state.release_confirmed()
        trusted_until = sent_at + float(remaining) * TRUST
        tie = presence or state.presence
        grant = Grant(share, int(token), float(expires_at), trusted_until, sent_at, tie, state.lock)
        if (yield from self._in_time(grant)) is None:
            state.leave_refused()
            raise Unavailable(f"The database's reply came too late for the lease of lock {state.lock!a:.80}.")
        with contextlib.suppress(DatabaseError):  # readers that wait would also find out by themselves
            yield Call(self.statements.wake_queue, (state.lock,), within=self._give_up_within)
        return grant

    def _ask_to_downgrade(self, state: LeaseState, attempt: str) -> Flow[Any]:
        """Ask until it is decided. The result is None if the writer does not hold the lock any more."""
        give_up_at = self.clock() + self._give_up_within
        sql, again = self.statements.downgrade, self.statements.downgrade_again
        may_be_done = False
        while True:
            sent_at = self.clock()
            presence = self._valid_presence(sent_at)
            name = presence.name if presence else None
            args = (state.lock, str(state.token), attempt, interval(state.ttl), name)
            try:
                granted, *grant = yield Call(again if may_be_done else sql, args, again)
                # The first request got no reply, and its transaction may be what has locked the row.
                may_be_done = may_be_done or granted == "undecided"
                if granted in ("t", "f"):
                    return (presence, sent_at, grant) if granted == "t" else None
                if self.clock() >= give_up_at:
                    proved = "held: an open transaction has proved it with assert_held(). End that transaction first."
                    raise DatabaseError(
                        f"The write lease of lock {state.lock!a:.80} was not downgraded, and is "
                        + ("given back: the database has not decided in time." if may_be_done else f"still {proved}")
                    )
            except DblockError as error:
                error.may_be_done = error.may_be_done or may_be_done
                raise
            yield Sleep(self.uniform(POLL_FIRST / 2, POLL_FIRST))

    def resize(self, name: str, permits: int) -> Flow[None]:
        """Change the number of permits of a semaphore."""
        yield Call(self.statements.resize_semaphore, (name, str(permits)))

    def available(self, name: str, asked: int | None) -> Flow[int]:
        """Ask how many permits are free. A semaphore that does not exist yet has as many as this client asks for."""
        kind, permits, available, _ = yield Call(self.statements.shared_state, (name,))
        if kind is None and asked is not None:
            return asked
        if kind != SEMAPHORE:
            raise (
                WrongKind(f"Lock {name!r} is a {kind} lock and no semaphore")
                if kind
                else InvalidArgument(f"There is no semaphore {name!a:.80} yet. Give its number of permits.")
            )
        if asked is not None and asked != int(permits):
            raise PermitsDiffer(name, int(permits), asked)
        return int(available)

    def holders(self, name: str) -> Flow[list[Holder]]:
        """Ask for the holders of a shared lock, in the order of their grants."""
        kind, _, _, holders = yield Call(self.statements.shared_state, (name,))
        if kind == PLAIN:
            raise WrongKind(f"Lock {name!r} is a plain lock")
        return [
            Holder(
                one["token"],
                one["holder"],
                one["meta"],
                moment(one["granted_at"]),
                moment(one["expires_at"]),
                one["remaining"],
                one["permit"] if kind == SEMAPHORE else None,
            )
            for one in json.loads(holders)
        ]

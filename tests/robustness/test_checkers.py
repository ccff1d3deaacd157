"""Each checker accepts every good history, and finds the violation in every bad one."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
import random
from typing import Any

import pytest

from tests.robustness import checkers
from tests.robustness.checkers import (
    Checker,
    bank,
    durability,
    fence,
    forced,
    free_locks,
    hand_over,
    kept_leases,
    linearizability,
    loss,
    observers,
    permits_back,
    queue_order,
    recovery,
    releases,
    sets,
    shared_holds,
    slots,
    takeover,
    term_fence,
    term_log,
    token_order,
    wake_ups,
    writers_in_turn,
)
from tests.robustness.history.models import FencedMutex, Mutex, linearize
from tests.robustness.history.record import History, Operation


def op(kind: str, called: float, returned: float, process: str = "a", key: str = "k", **details: Any) -> Operation:
    """Return an operation with this `outcome`; by default unknown if it never returned, and ok otherwise."""
    outcome = details.pop("outcome", "unknown" if math.isinf(returned) else "ok")
    return Operation(process, kind, key, called, returned, outcome, details)


NEVER = math.inf
GRANT = op("acquire", 0, 1, token=1, ttl=10)
FREED = op("release", 2, 2.5, token=1, freed=True)


def granted_next(at: float) -> Operation:
    return op("acquire", 1.5, at, "b", token=2, ttl=10)


NEXT = granted_next(3)


def killed(victim: str, at: float) -> Operation:
    return op("fault", at, at + 0.1, "runner", "kill", victim=victim)


def stopped(victim: str, at: float, seconds: float) -> Operation:
    return op("fault", at, at + seconds, "runner", "freeze", victim=victim, seconds=seconds)


def forcing(called: float, returned: float, token: int = 1, **details: Any) -> Operation:
    return op("force", called, returned, "operator", token=token, **details)


def witnessed(kind: str, order: int, **details: Any) -> Operation:
    return op(kind, 100 + order, 100 + order, "runner", order=order, **details)


def queued(order: int, who: str, ticket: int) -> Operation:
    return witnessed("queued", order, attempt=who, ticket=ticket, act=f"in {order}", token=None)


def left(order: int, who: str, ticket: int, act: str) -> Operation:
    return witnessed("left", order, attempt=who, ticket=ticket, act=act, token=None)


def served(order: int, who: str, token: int, act: str) -> Operation:
    return witnessed("served", order, attempt=who, token=token, act=act, ticket=None)


def write(called: float, returned: float, token: int, **details: Any) -> Operation:
    return op("write", called, returned, token=token, **details)


def final(*elements: str) -> Operation:
    return op("final", 99, 99, "runner", elements=list(elements))


def transfer(called: float, returned: float, token: int, name: str, **details: Any) -> Operation:
    return op("write", called, returned, token=token, transfer=name, **details)


def entry(order: int, token: int, name: str, amount: int = 10) -> Operation:
    return op("entry", 99, 99, "runner", order=order, token=token, transfer=name, source=1, target=2, amount=amount)


def balance(account: int, amount: int) -> Operation:
    return op("balance", 99, 99, "runner", str(account), balance=amount, before=100)


def summed(called: float, returned: float, total: int, entries: int) -> Operation:
    return op("sum", called, returned, total=total, should_be=200, entries=entries)


def began(token: int, slot: int, nth: int = 1, key: str = "most") -> Operation:
    return op("began", token, token, key=key, token=token, slot=f"slot {slot}", nth=nth)


def row(token: int, slot: int, recorded: str | None = "succeeded", nth: int = 1, **details: Any) -> Operation:
    """Return a row of the ledger: claimed at the time of its slot, and ended half a second later."""
    whole: dict[str, Any] = {
        "last_slot": slot,
        "claimed_at": slot,
        "ended_at": None if recorded is None else slot + 0.5,
    } | details
    key = whole.pop("key", "most")
    return op("ledger", 99, 99, "runner", key, token=token, slot=slot, nth=nth, recorded=recorded, **whole)


def stored(order: int, token: int) -> Operation:
    return op("stored", 99, 99, "runner", "most", order=order, token=token)


QUEUED = [queued(1, "x", 1), queued(2, "y", 2)]
BOOKS = [transfer(0, 1, 1, "t1"), entry(1, 1, "t1"), balance(1, 90), balance(2, 110)]
RECORDED = [op("newest", 99, 99, token=2), *(op("granted", 99, 99, order=token, token=token) for token in (1, 2))]

STUCK = op("fault", 1, 4, "runner", "foreign-queues")

KEPT = op("acquire", 0, 1, token=1, ttl=2, keep_alive=True)
REFUSED = op("acquire", 5, 5.1, "b", timeout=0, outcome="failed")


def term(token: int, number: int, began: float, ended: float | None) -> Operation:
    return witnessed("term", number, token=token, number=number, began=began, ended=ended)


def led(order: int, token: int) -> Operation:
    return witnessed("led", order, token=token)


def observed(at: float, token: int, what: str) -> Operation:
    return op("observed", at, at, token=token, what=what, worker="a.0")


TERMS = [term(1, 1, 0, 5), term(4, 2, 5, None)]
FORGOTTEN = op("fault", 1, 2, "runner", "promotion-async", loses_state=True)
AFTERWARDS = op("acquire", 2.5, 3.2, token=1)


def held(token: int, since: float, until: float, mode: str, permit: int = 0, **details: Any) -> list[Operation]:
    """Return a grant of a share, and the last moment at which its holder believed in it."""
    if mode == "permit":
        details |= {"permit": permit, "permits": 2}
    grant = op("acquire", since - 0.5, since, f"p{token}", token=token, mode=mode, **details)
    return [grant, op("believe", until, until, f"p{token}", token=token)]


GOOD: list[tuple[str, Checker, list[Operation]]] = [
    ("terms one after another", term_log.check, [GRANT, *TERMS]),
    ("a candidate that may not have led", term_log.check, [op("acquire", 0, NEVER), *TERMS]),
    ("terms while the server's clock was set back", term_log.check, [
        term(1, 1, 0, 6), term(4, 2, 5, None), op("fault", 1, 2, "runner", "clock-back"),
    ]),
    ("a term that a failover has lost", term_log.check, [op("acquire", 0, 1, token=3), *TERMS, FORGOTTEN]),
    ("an observer of a term that a failover has lost", observers.check, [
        *TERMS, FORGOTTEN, observed(1, 1, "began"), observed(2, 1, "ended"), observed(3, 3, "began"),
        observed(4, 4, "began"),
    ]),
    ("an end that an observer of another primary's term passes over", observers.check, [
        *TERMS, FORGOTTEN, observed(1, 1, "began"), observed(3, 3, "began"), observed(4, 4, "began"),
    ]),
    ("a slot again after a failover that lost its run", slots.check, [
        began(1, 1), began(2, 1), row(2, 1), FORGOTTEN, op("call", 1, 2, key="most", token=1),
    ]),
    ("runs while the server's clock was set back", slots.check, [
        began(1, 1), row(1, 1, ended_at=9), began(2, 2), row(2, 2), op("fault", 1, 2, "runner", "clock-back"),
    ]),
    ("a call that was cancelled", recovery.check, [
        op("fault", 1, 2, "runner", "cancel"), op("acquire", 1, NEVER, error="Interrupted: "), AFTERWARDS,
    ]),
    ("a child that tried its parent's lease", recovery.check, [
        op("fault", 1, 2, "runner", "fork"), op("child", 2, 2, leases=1), AFTERWARDS,
    ]),
    ("a lock beside the election", term_log.check, [op("acquire", 0, 1, key="other", token=9), *TERMS]),
    ("writes in the order of the terms", term_fence.check, [*TERMS, led(1, 1), led(2, 1), led(3, 4)]),
    ("an observer that is behind", observers.check, [*TERMS, observed(1, 1, "began"), observed(2, 1, "ended")]),
    ("each slot once", slots.check, [
        began(1, 1), began(2, 2), row(1, 1), row(2, 2), stored(1, 1), stored(2, 2),
        op("call", 1, 2, key="most", token=1),
    ]),
    ("a slot again after a death", slots.check, [
        began(1, 1, key="least"), began(2, 1, 2, "least"),
        row(1, 1, "died", key="least"), row(2, 1, nth=2, claimed_at=3, ended_at=4, key="least"),
    ]),
    ("slots that are caught up", slots.check, [row(1, 1, key="all"), row(2, 2, key="all"), row(3, 3, key="all")]),
    ("a result whose row is not kept any more", slots.check, [
        op("call", 0, 1, key="most", token=1), began(2, 2), row(2, 2),
    ]),
    ("slots that were skipped", slots.check, [began(1, 1), row(1, 1), row(0, 2, "skipped", 0, last_slot=4)]),
    ("a free lock that is granted", free_locks.check, [
        GRANT, FREED, op("acquire", 5, 5.1, "b", timeout=0, token=2, ttl=10),
    ]),
    ("a try beside one of unknown outcome", free_locks.check, [
        op("acquire", 4, NEVER, "c", timeout=0), REFUSED, op("acquire", 0, 0.1, timeout=0, key="j", token=1),
    ]),
    ("a try of a lock that is held", free_locks.check, [
        GRANT, REFUSED, op("acquire", 0, 0.1, timeout=0, key="j", token=1),
    ]),
    ("a try just after a release", free_locks.check, [
        GRANT, op("release", 4, 4.7, token=1, freed=True), REFUSED, op("acquire", 0, 0.1, timeout=0, key="j", token=1),
    ]),
    ("a try behind a waiter that has just left", free_locks.check, [
        op("acquire", 1, 3, "c", timeout=2, outcome="failed"), REFUSED,
        op("acquire", 0, 0.1, timeout=0, key="j", token=1),
    ]),
    ("a lease that is kept alive", kept_leases.check, [KEPT, op("release", 4, 5, token=1, freed=True)]),
    ("a lost lease that was not to be kept alive", kept_leases.check, [
        KEPT, op("acquire", 6, 7, token=2, keep_alive=False), op("loss", 9, 9, token=2, reason="expired"),
    ]),
    ("released while the queue is locked", releases.check, [STUCK, op("release", 2, 2.1, token=1, freed=True)]),
    ("interrupted", releases.check, [
        STUCK, op("release", 1.5, 1.6, token=1), op("release", 2, NEVER, token=2, error="Killed: "),
    ]),
    ("handed over", linearizability.check, [GRANT, op("believe", 1.2, 1.3, token=1), FREED, NEXT]),
    ("an unknown release that was done", linearizability.check, [GRANT, op("release", 2, NEVER, token=1), NEXT]),
    ("an unknown release that was not", linearizability.check, [
        GRANT, op("release", 2, NEVER, token=1), op("believe", 4, 4.1, token=1),
    ]),
    ("a lease that expired", linearizability.check, [GRANT, op("acquire", 2, 11, "b", token=2, ttl=10)]),
    ("a lost lease that was released", linearizability.check, [
        GRANT, op("release", 2, 2.5, token=1, freed=False), NEXT,
    ]),
    ("the lock of a dead holder", linearizability.check, [GRANT, killed("a", 1.1), NEXT]),
    ("a cut connection, after which nothing is certain", linearizability.check, [
        GRANT, op("fault", 1.1, 1.2, "runner", "cut"), NEXT,
    ]),
    ("force-released at once, without notice to the holder", linearizability.check, [
        GRANT, forcing(1.1, 1.2, now=True, freed=True), NEXT, op("believe", 4, 4.1, token=1),
    ]),
    ("a grant reported to no client, force-released at once", linearizability.check, [
        op("granted", 99, 99, "runner", order=1, token=1), forcing(1.1, 1.2, now=True, freed=True), NEXT,
    ]),
    ("grants that overlap", token_order.check, [op("acquire", 0, 3, token=2), op("acquire", 1, 2, "b", token=1)]),
    ("a belief that ends with the next grant", loss.check, [GRANT, NEXT, op("believe", 2.9, 4, token=1)]),
    ("force-released at once", loss.check, [
        GRANT, forcing(1.1, 1.2, now=True, freed=True), NEXT, op("believe", 4, 4.1, token=1),
    ]),
    ("taken over in time", takeover.check, [GRANT, stopped("a", 2, 15), granted_next(13)]),
    ("a waiter is stopped too", takeover.check, [
        GRANT, stopped("a", 2, 15), stopped("b", 3, 15), granted_next(20),
    ]),
    ("another waiter of the same process is first in the queue", takeover.check, [
        GRANT, stopped("a", 2, 15), op("acquire", 1.2, 18, outcome="failed"), granted_next(20),
    ]),
    ("a holder that resumes in time", takeover.check, [GRANT, stopped("a", 2, 5), granted_next(20)]),
    ("granted again after the last strike", recovery.check, [
        op("fault", 1, 2, "runner", "cut"), op("fault", 3, 3.1, "runner", "cut", no_effect=True),
        op("acquire", 2.5, 3.2, token=1),
    ]),
    ("handed over at once", hand_over.check, [GRANT, FREED, NEXT]),
    ("known to the server", durability.check, [GRANT, NEXT, *RECORDED]),
    ("a row that the reaper has deleted", durability.check, [
        op("acquire", 0, 1, key="l", token=3), op("fault", 2, 2.1, "runner", "reap"),
        *RECORDED, op("granted", 99, 99, key="l", order=3, token=3),
    ]),
    ("a wake-up for a release", wake_ups.check, [GRANT, FREED, op("woken", 2.2, 2.2, "b")]),
    ("a wake-up of a waiter that left", wake_ups.check, [
        op("acquire", 0, 1, outcome="failed", timeout=1), op("woken", 2, 2, "b"),
    ]),
    ("a wake-up for a grant that no client knows of", wake_ups.check, [
        op("granted", 99, 99, "runner", token=9, order=1), op("woken", 2, 2, "b"),
    ]),
    ("tokens and numbers rise", fence.check, [
        write(0, 1, 1, number=1), write(2, 3, 1, number=2), write(4, 5, 2, number=1),
    ]),
    ("the stale write is refused", fence.check, [write(0, 1, 2), write(2, 3, 1, outcome="failed")]),
    ("refused after a claim with a grant", fence.check, [
        op("acquire", 0, 1, token=5, claims=["k"], key="lock"), write(2, 3, 4, outcome="failed"), write(2, 3, 5),
    ]),
    ("refused because of a grant that was not reported", fence.check, [
        op("acquire", 0, NEVER, claims=["k"], key="lock"), write(2, 3, 4, outcome="failed"),
    ]),
    ("writes that overlap", fence.check, [write(0, 3, 2), write(1, 2, 1)]),
    ("a set with all elements", sets.check, [
        write(0, 1, 1, element="x"), write(2, NEVER, 2, element="y"), write(4, 5, 3, element="z"), final("x", "z"),
    ]),
    ("books that add up", bank.check, [
        *BOOKS, summed(2, 3, 200, 1), transfer(4, NEVER, 2, "t2"), summed(5, 6, 200, 1),
    ]),
    ("served in order", queue_order.check, [
        *QUEUED, left(3, "x", 1, "g"), served(4, "x", 1, "g"), served(5, "y", 2, "h"), left(6, "y", 2, "h"),
    ]),
    ("a waiter that left is passed over", queue_order.check, [
        *QUEUED, left(3, "x", 1, "away"), left(4, "y", 2, "h"), served(5, "y", 1, "h"),
    ]),
    ("a dead waiter is passed over, and then removed", queue_order.check, [
        killed("a", 0), *QUEUED, left(3, "y", 2, "h"), served(4, "y", 1, "h"), left(5, "x", 1, "tidy"),
    ]),
    ("a renewal before the force-release", forced.check, [
        GRANT, op("renew", 2, 3, token=1), forcing(2.5, 4, now=False, taken=True, freed=False),
    ]),
    ("readers together, then a writer alone", shared_holds.check, [
        *held(1, 0, 4, "read"), *held(2, 1, 5, "read"), *held(3, 6, 8, "write"),
    ]),
    ("permits beside each other", shared_holds.check, [*held(1, 0, 4, "permit", 0), *held(2, 1, 5, "permit", 1)]),
    ("a reader that was a writer", shared_holds.check, [
        *held(1, 0, 4, "write"), *held(3, 5, 8, "read", writer=1), witnessed("granted", 1, key="k#writer", token=1),
    ]),
    ("a writer behind the readers before it", writers_in_turn.check, [
        op("acquire", 0, 5, token=3, mode="write"), op("acquire", 0.5, 1, "b", token=2, mode="read"),
        op("acquire", 2, 6, "c", token=4, mode="read"),
    ]),
    ("a writer that a fault may have put back", writers_in_turn.check, [
        op("acquire", 0, 5, token=3, mode="write"), op("acquire", 2, 3, "b", token=2, mode="read"), killed("a", 4),
    ]),
    ("all permits available", permits_back.check, [op("available", 9, 9, permits=3, available=3)]),
]  # fmt: skip

BAD: list[tuple[str, Checker, list[Operation]]] = [
    ("terms that overlap", term_log.check, [term(1, 1, 0, 6), term(4, 2, 5, None)]),
    ("a term without an end before the next", term_log.check, [term(1, 1, 0, None), term(4, 2, 5, None)]),
    ("a gap between two terms", term_log.check, [term(1, 1, 0, 5), term(4, 3, 5, None)]),
    ("a leader without a term", term_log.check, [GRANT, term(4, 1, 5, None)]),
    ("a stale term that is accepted", term_fence.check, [*TERMS, led(1, 4), led(2, 1)]),
    ("a candidate that never led and is accepted", term_fence.check, [*TERMS, led(1, 3)]),
    ("an observer that misses a vacancy", observers.check, [*TERMS, observed(1, 1, "began"), observed(2, 4, "began")]),
    ("an observer that misses the first term", observers.check, [*TERMS, observed(1, 4, "began")]),
    ("an observer that sees a beginning twice", observers.check, [
        *TERMS, *(observed(at, token, what) for at, (token, what) in enumerate(
            [(1, "began"), (1, "ended"), (4, "began"), (4, "began")]
        )),
    ]),
    ("a slot that runs twice", slots.check, [began(1, 1), began(2, 1, 2)]),
    ("two runs under one token", slots.check, [began(1, 1), began(1, 2)]),
    ("a later run without the higher number", slots.check, [began(1, 1, key="least"), began(2, 1, key="least")]),
    ("a slot that is decided twice", slots.check, [began(1, 1), row(1, 1), row(0, 1, "missed", 0)]),
    ("a slot that runs again after a success", slots.check, [
        began(1, 1), row(1, 1), row(2, 1, nth=2, claimed_at=3, ended_at=4),
    ]),
    ("a run before the outcome of the one before", slots.check, [began(1, 1), row(1, 1, None), row(2, 2)]),
    ("a run before the end of the one before", slots.check, [began(1, 1), row(1, 1, ended_at=5), row(2, 2)]),
    ("a result that was not recorded", slots.check, [
        op("call", 1, 2, key="most", token=1), row(1, 1, "died"), row(2, 2),
    ]),
    ("a run without a row", slots.check, [began(2, 2), row(1, 1), row(3, 3)]),
    ("an effect of a stale run", slots.check, [began(1, 1), stored(1, 2), stored(2, 1)]),
    ("a free lock that is refused", free_locks.check, [GRANT, FREED, REFUSED]),
    ("a lock that was never used and is refused", free_locks.check, [REFUSED]),
    ("a lease that is not kept alive", kept_leases.check, [KEPT, op("loss", 3, 3, token=1, reason="expired")]),
    ("a release that waits for a queue", releases.check, [STUCK, op("release", 2, 3.5, token=1, freed=True)]),
    ("a release that fails because of a queue", releases.check, [
        STUCK, op("release", 2, NEVER, token=1, error="Unavailable: too many notifications"),
    ]),
    ("two holders", linearizability.check, [GRANT, NEXT, op("believe", 4, 4.1, token=1)]),
    ("a lease superseded before its ttl", linearizability.check, [GRANT, NEXT]),
    ("a renewed lease superseded before its ttl", linearizability.check, [
        GRANT, op("renew", 9, 9.5, token=1), op("acquire", 2, 12, "b", token=2, ttl=10),
    ]),
    ("a survivor's lease superseded before its ttl", linearizability.check, [GRANT, killed("c", 1.1), NEXT]),
    ("a lease superseded before its ttl while another process was stopped for long", linearizability.check, [
        GRANT, op("fault", 1.1, 2.3, "runner", "freeze-past", victim="c", seconds=1.2), NEXT,
    ]),
    ("a lease force-released with notice and superseded before its ttl", linearizability.check, [
        GRANT, forcing(1.1, 1.2, now=False, taken=True, freed=False), NEXT,
    ]),
    ("a belief after the next grant, before a force-release at once", linearizability.check, [
        GRANT, NEXT, op("believe", 4, 4.1, token=1), forcing(5, 6, now=True, freed=True),
    ]),
    ("a token granted again", linearizability.check, [GRANT, FREED, op("acquire", 3, 4, "b", token=1, ttl=10)]),
    ("freed, but never granted", linearizability.check, [forcing(1.1, 1.2, now=True, freed=True), NEXT]),
    ("freed twice", linearizability.check, [GRANT, FREED, op("release", 3, 4, token=1, freed=True)]),
    ("a renewal of a released lease", linearizability.check, [GRANT, FREED, op("renew", 3, 4, token=1)]),
    ("a release that frees the next holder's lock", linearizability.check, [
        GRANT, FREED, NEXT, op("release", 4, 5, token=1, freed=True),
    ]),
    ("tokens that fall", token_order.check, [op("acquire", 0, 1, token=2), op("acquire", 2, 3, token=1)]),
    ("a token granted twice", token_order.check, [
        op("acquire", 0, 1, token=2), op("acquire", 0, 1, key="l", token=2),
    ]),
    ("tokens that fall in the server's records", token_order.check, [
        op("granted", 9, 9, order=1, token=2), op("granted", 9, 9, order=2, token=1),
    ]),
    ("a belief past the next grant", loss.check, [GRANT, NEXT, op("believe", 3.1, 4, token=1)]),
    ("another lock was force-released at once", loss.check, [
        GRANT, forcing(1.1, 1.2, token=9, now=True, freed=True), NEXT, op("believe", 4, 4.1, token=1),
    ]),
    ("force-released with notice, but not noticed", loss.check, [
        GRANT, forcing(1.1, 1.2, now=False, taken=True, freed=False), NEXT, op("believe", 4, 4.1, token=1),
    ]),
    ("taken over too late", takeover.check, [GRANT, stopped("a", 2, 15), granted_next(14)]),
    ("a dead holder's lock, too late", takeover.check, [GRANT, killed("a", 2), granted_next(14)]),
    ("nothing is granted after the last strike", recovery.check, [
        op("acquire", 0, 2.9, token=1), op("fault", 1, 3, "runner", "cut"), op("acquire", 2, 6, outcome="failed"),
    ]),
    ("no call was cancelled", recovery.check, [op("fault", 1, 2, "runner", "cancel"), AFTERWARDS]),
    ("no child had a lease of its parent", recovery.check, [
        op("fault", 1, 2, "runner", "fork"), op("child", 2, 2, leases=0), AFTERWARDS,
    ]),
    ("an end that is skipped, and a failover", observers.check, [
        *TERMS, FORGOTTEN, observed(1, 1, "began"), observed(4, 4, "began"),
    ]),
    ("a term that is seen again after a failover", observers.check, [
        *TERMS, FORGOTTEN, observed(1, 1, "began"), observed(3, 3, "began"), observed(4, 1, "ended"),
        observed(5, 1, "ended"),
    ]),
    ("terms that overlap after a failover", term_log.check, [term(1, 1, 0, 6), term(4, 2, 5, None), FORGOTTEN]),
    ("a slot that did not run again after a death", slots.check, [
        began(1, 1, key="least"), row(1, 1, "died", key="least"), began(2, 2, key="least"), row(2, 2, key="least"),
    ]),
    ("a slot that was passed over", slots.check, [row(1, 1, key="all"), row(2, 3, key="all")]),
    ("a slot decided twice after a failover", slots.check, [row(1, 1), row(2, 1, claimed_at=2), FORGOTTEN]),
    ("a token given twice after a failover", slots.check, [began(1, 1), began(1, 2), row(1, 2), FORGOTTEN]),
    ("a slot decided twice while the server's clock was set back", slots.check, [
        row(1, 1), row(2, 1), op("fault", 1, 2, "runner", "clock-back"),
    ]),
    ("strikes without effect", recovery.check, [
        op("fault", 1, 2, "runner", "cut", no_effect=True), op("acquire", 2.5, 3.2, token=1),
    ]),
    ("free, but waited for", hand_over.check, [GRANT, FREED, granted_next(5)]),
    ("a lost grant", durability.check, [op("acquire", 0, 1, token=3), *RECORDED]),
    ("a lost lock", durability.check, [
        op("acquire", 0, 1, key="l", token=3), *RECORDED, op("granted", 99, 99, key="l", order=3, token=3),
    ]),
    ("a grant never recorded", durability.check, [
        op("acquire", 0, 1, key="l", token=2), op("newest", 9, 9, key="l", token=2), *RECORDED,
    ]),
    ("two wake-ups for a release", wake_ups.check, [
        GRANT, FREED, op("woken", 2.2, 2.2, "b"), op("woken", 2.2, 2.2, "c"),
    ]),
    ("a wake-up before its cause", wake_ups.check, [GRANT, FREED, op("woken", 1.5, 1.5, "b")]),
    ("a wake-up for another lock", wake_ups.check, [GRANT, FREED, op("woken", 2.2, 2.2, "b", "other")]),
    ("a wake-up for a try", wake_ups.check, [
        op("acquire", 0, 1, outcome="failed", timeout=0), op("woken", 2, 2, "b"),
    ]),
    ("a stale write accepted", fence.check, [write(0, 1, 2), write(2, 3, 1)]),
    ("an older number accepted", fence.check, [write(0, 1, 1, number=2), write(2, 3, 1, number=1)]),
    ("a number accepted twice", fence.check, [write(0, 1, 1, number=1), write(2, 3, 1, number=1)]),
    ("accepted below a claim", fence.check, [op("claim", 0, 1, token=5), write(2, 3, 4)]),
    ("accepted below a claim with a grant", fence.check, [
        op("acquire", 0, 1, token=5, claims=["k"], key="lock"), write(2, 3, 4),
    ]),
    ("refused without reason", fence.check, [write(0, 1, 1), write(2, 3, 2, outcome="failed"), write(4, 5, 3)]),
    ("a lost element", sets.check, [write(0, 1, 1, element="x"), write(2, 3, 2, element="y"), final("y")]),
    ("a lost set", sets.check, [write(0, 1, 1, element="x"), op("final", 9, 9, key="other", elements=[])]),
    ("an element twice", sets.check, [write(0, 1, 1, element="x"), final("x", "x")]),
    ("an element that no worker added", sets.check, [write(0, 1, 1, element="x"), final("x", "y")]),
    ("an element that was refused", sets.check, [write(0, 1, 1, element="x", outcome="failed"), final("x")]),
    ("elements out of order", sets.check, [write(0, 9, 2, element="x"), write(0, 9, 1, element="y"), final("x", "y")]),
    ("a sum that is wrong", bank.check, [*BOOKS, summed(2, 3, 190, 1)]),
    ("a snapshot of the past", bank.check, [*BOOKS, summed(2, 3, 200, 0)]),
    ("a snapshot of what was not begun", bank.check, [*BOOKS, summed(2, 3, 200, 2), transfer(4, NEVER, 2, "t2")]),
    ("a transfer lost", bank.check, [transfer(0, 1, 1, "t1"), balance(1, 100), balance(2, 100)]),
    ("a transfer twice", bank.check, [*BOOKS[:2], entry(2, 1, "t1"), balance(1, 80), balance(2, 120)]),
    ("a refused transfer", bank.check, [transfer(0, 1, 1, "t1", outcome="failed"), *BOOKS[1:]]),
    ("a transfer that no worker made", bank.check, BOOKS[1:]),
    ("a balance that is not the journal's", bank.check, [*BOOKS[:2], balance(1, 100), balance(2, 110)]),
    ("a journal in which tokens fall", bank.check, [
        transfer(0, 9, 2, "t2"), transfer(0, 9, 1, "t1"), entry(1, 2, "t2", 0), entry(2, 1, "t1", 0), balance(1, 100),
    ]),
    ("served out of turn", queue_order.check, [
        *QUEUED, left(3, "y", 2, "g"), served(4, "y", 1, "g"), left(5, "x", 1, "h"), served(6, "x", 2, "h"),
    ]),
    ("served out of turn where another process died", queue_order.check, [
        killed("z", 0), *QUEUED,
        left(3, "y", 2, "g"), served(4, "y", 1, "g"), left(5, "x", 1, "h"), served(6, "x", 2, "h"),
    ]),
    ("overtaken, then gave up", queue_order.check, [
        *QUEUED, left(3, "y", 2, "g"), served(4, "y", 1, "g"), left(5, "x", 1, "away"),
    ]),
    ("served without a ticket, ahead of the queue", queue_order.check, [
        *QUEUED, served(3, "z", 1, "g"), left(4, "x", 1, "h"), served(5, "x", 2, "h"),
    ]),
    ("an orphaned ticket in the queue", queue_order.check, [op("orphan", 9, 9, ticket=1)]),
    ("a lock that is stuck", queue_order.check, [op("stuck", 9, 9)]),
    ("renewed after a force-release", forced.check, [
        GRANT, forcing(2, 3, now=False, taken=True, freed=False), op("renew", 4, 5, token=1),
    ]),
    ("force-released twice", forced.check, [
        GRANT, forcing(2, 3, now=True, taken=True, freed=True), forcing(4, 5, now=True, taken=True, freed=True),
    ]),
    ("a reader beside a writer", shared_holds.check, [*held(1, 0, 4, "write"), *held(2, 1, 5, "read")]),
    ("a writer beside a reader", shared_holds.check, [*held(1, 0, 4, "read"), *held(2, 1, 5, "write")]),
    ("two writers", shared_holds.check, [*held(1, 0, 4, "write"), *held(2, 1, 5, "write")]),
    ("two holders of one permit", shared_holds.check, [*held(1, 0, 4, "permit", 1), *held(2, 1, 5, "permit", 1)]),
    ("more holders than permits", shared_holds.check, [
        *held(1, 0, 4, "permit", 0), *held(2, 1, 5, "permit", 1), *held(3, 2, 6, "permit", 1),
    ]),
    ("a permit that there is not", shared_holds.check, held(1, 0, 4, "permit", 2)),
    ("a writer in the middle of a downgrade", shared_holds.check, [
        *held(1, 0, 4, "write"), *held(3, 5, 8, "read", writer=1), witnessed("granted", 1, key="k#writer", token=2),
    ]),
    ("a writer that a later reader has passed", writers_in_turn.check, [
        op("acquire", 0, 5, token=3, mode="write"), op("acquire", 2, 3, "b", token=2, mode="read"),
    ]),
    ("a permit that is missing", permits_back.check, [op("available", 9, 9, permits=3, available=2)]),
]  # fmt: skip


def named(cases: list[tuple[str, Checker, list[Operation]]]) -> list[Any]:
    return [
        pytest.param(check, operations, id=f"{check.__module__.split('.')[-1]}: {name}")
        for name, check, operations in cases
    ]


@pytest.mark.parametrize(("check", "operations"), named(GOOD))
def test_checker_accepts_a_good_history(check: Checker, operations: list[Operation]) -> None:
    assert check(History(operations)).violations == []


@pytest.mark.parametrize(("check", "operations"), named(BAD))
def test_checker_finds_the_violation_in_a_bad_history(check: Checker, operations: list[Operation]) -> None:
    finding = check(History(operations))
    assert finding.violations
    assert finding.after is not None


def test_usual_hand_over_is_judged_more_strictly_without_faults() -> None:
    operations = []
    for number in range(20):
        # The holder of token `number` frees the lock. The next has waited since before, and gets it 0.1 s later.
        operations.append(op("release", number, number + 0.1, token=number, freed=True))
        operations.append(op("acquire", number - 0.5, number + 0.2, "b", token=number + 1, ttl=10))
    (violation,) = hand_over.check(History(operations)).violations
    assert "20 hand-overs took 0.100 s at the median" in str(violation)
    far_away = op("fault", 100, 101, "runner", "cut")
    assert hand_over.check(History([*operations, far_away])).violations == []


def test_every_checker_has_good_and_bad_histories() -> None:
    modules = [
        importlib.import_module(f"{checkers.__name__}.{one.name}") for one in pkgutil.iter_modules(checkers.__path__)
    ]
    every = {module.check for module in modules if hasattr(module, "check")}
    assert {check for _, check, _ in GOOD} == {check for _, check, _ in BAD} == every


def by_brute_force(model: FencedMutex, operations: list[Operation]) -> bool:
    """Return whether a linearization exists, by trying every order of every choice of the unknown operations."""
    certain = [one for one in operations if not math.isinf(one.returned)]
    doubtful = [one for one in operations if math.isinf(one.returned)]
    choices = itertools.chain.from_iterable(
        itertools.combinations(doubtful, count) for count in range(len(doubtful) + 1)
    )
    return any(
        _is_possible(model, order) for chosen in choices for order in itertools.permutations([*certain, *chosen])
    )


def _is_possible(model: FencedMutex, order: tuple[Operation, ...]) -> bool:
    state = Mutex()
    for index, one in enumerate(order):
        after = model.apply(state, one)
        if after is None or any(later.returned < one.called for later in order[index + 1 :]):
            return False
        state = after
    return True


def random_history(rng: random.Random) -> list[Operation]:
    """Make a few operations that overlap in any way and are mostly plausible."""
    count = rng.randrange(2, 6)
    times = rng.sample(range(100), 2 * count)
    found = []
    for number in range(count):
        called, returned = sorted(times[2 * number : 2 * number + 2])
        kind = rng.choice(["acquire", "acquire", "acquire", "believe", "release", "release", "renew", "force"])
        # If tokens roughly follow time, more of the histories are linearizable.
        token = min(3, max(1, called // 34 + 1 + rng.choice([0, 0, 0, 0, -1, 1])))
        details: dict[str, Any] = {"token": token}
        if kind in ("release", "force") and rng.random() < 0.8:
            details["freed"] = rng.random() < 0.8
        end = NEVER if kind not in ("believe", "renew") and rng.random() < 0.25 else float(returned)
        found.append(op(kind, float(called), end, **details))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_linearizability_search_agrees_with_trying_every_order(seed: int) -> None:
    rng = random.Random(seed)
    details = {True: 0, False: 0}
    for _ in range(200):
        operations = random_history(rng)
        model = FencedMutex({token: rng.uniform(0, 120) for token in (1, 2, 3)} if rng.random() < 0.5 else None)
        expected = by_brute_force(model, operations)
        assert (linearize(model, History(operations)) is None) == expected, "\n".join(map(str, operations))
        details[expected] += 1
    assert min(details.values()) > 20, "too few histories of one kind for this to prove anything"


def test_linearizability_search_stays_fast_with_many_waiters() -> None:
    operations = []
    for token in range(1, 101):
        operations += [op("acquire", max(0, token - 48) + token / 1000, token + 0.5, token=token)]
        operations += [op("release", token + 0.6, token + 0.7, token=token, freed=True)]
    assert linearize(FencedMutex(), History(operations)) is None
    assert linearize(FencedMutex(), History([*operations, op("believe", 90, 91, token=80)])) is not None

"""The checks of the promise. Each opens a backend and raises AssertionError if the backend breaks the promise."""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from fenced_store.conformance.backend import Backend, Open
from fenced_store.errors import StaleTokenError

WRITERS = 16
WRITES = 160
STORM_SECONDS = 0.1
"""Seconds for which concurrent writes are repeated, if a resource finishes one round sooner."""


def accepts_rising_pairs(opens: Open) -> None:
    """Writes under rising pairs are accepted and read back in full."""
    with _opened(opens) as backend:
        name = _name()
        _expect(backend.read(name), None, "A resource without any write holds nothing")
        for pair, data in [((5, 1), b"a"), ((5, 2), b""), ((6, 1), bytes(range(256))), ((2**63 - 1, 1), b"z")]:
            _expect(
                _accept(backend.write, name, data, *pair),
                False,
                f"The write {pair} is new, so it is not reported as repeated",
            )
            _expect(backend.read(name), data, f"The value written under {pair} is read back")


def refuses_a_lower_token(opens: Open) -> None:
    """A write with a lower token than the one seen is refused, whatever its write number, and changes nothing."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _accept(backend.write, name, b"new", 8, 1)
        for one in (backend, another):
            for number in (1, 2, 2**63 - 1):
                error = _refuse((8, 1), one.write, name, b"old", 7, number)
                _expect((error.offered, error.stored), (7, 8), "The refusal names the offered token and the stored one")
        _expect(another.read(name), b"new", "A refused write changes nothing")


def refuses_a_lower_write_number(opens: Open) -> None:
    """Under one token, writes are accepted in the order of their write numbers."""
    with _opened(opens) as backend:
        name = _name()
        _accept(backend.write, name, b"2", 8, 2)
        _refuse((8, 2), backend.write, name, b"1", 8, 1)
        _expect(_accept(backend.write, name, b"3", 8, 3), False, "A higher number under the same token is accepted")
        _expect(backend.read(name), b"3", "The latest write is what is read")


def recognises_a_repeated_write(opens: Open) -> None:
    """The latest write, sent again, is reported as repeated. A different write with its number is refused."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _accept(backend.write, name, b"once", 8, 5)
        _expect(_accept(another.write, name, b"once", 8, 5), True, "The same write sent twice is reported as repeated")
        _refuse((8, 5), another.write, name, b"other", 8, 5)
        _refuse((8, 5), another.write, name, None, 8, 5)
        _expect(backend.read(name), b"once", "A repeated write and a refused write change nothing")
        _refuse((8, 5), another.write, name, b"cone", 8, 5)
        _accept(backend.write, name, None, 8, 6)
        _expect(_accept(another.write, name, None, 8, 6), True, "The same deletion sent twice is reported as repeated")
        _refuse((8, 6), another.write, name, b"", 8, 6)


def a_late_repeat_changes_nothing(opens: Open) -> None:
    """A write that was superseded since is, when sent again, reported as repeated or refused. The value stays."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _accept(backend.write, name, b"1", 8, 1)
        _accept(backend.write, name, b"2", 8, 2)
        _accepted(another.write, name, b"1", 8, 1)
        _expect(backend.read(name), b"2", "A write sent again after a later one changes nothing")
        _refuse((8, 2), another.write, name, b"3", 8, 1)
        _accept(backend.claim, name, 9)
        _accepted(another.write, name, b"2", 8, 2)
        _refuse((9, 0), another.write, name, b"4", 8, 3)
        _accept(backend.write, name, None, 9, 1)
        _accepted(another.write, name, b"2", 8, 2)
        _expect(backend.read(name), None, "A write sent again after a deletion brings nothing back")


def compares_tokens_as_integers(opens: Open) -> None:
    """Tokens and write numbers are compared as 64-bit integers: not as text, 32-bit integers or floats."""
    with _opened(opens) as backend:
        for least in (9, 99, 2**31 - 1, 2**32 - 1, 2**53, 1_800_000_000_123_456_789, 2**63 - 2):
            by_number, by_token = _name(), _name()
            _accept(backend.write, by_number, b"lower", 1, least)
            _expect(_accept(backend.write, by_number, b"higher", 1, least + 1), False, f"{least + 1} follows {least}")
            _refuse((1, least + 1), backend.write, by_number, b"late", 1, least)
            _accept(backend.write, by_token, b"lower", least, 5)
            _accept(backend.claim, by_token, least + 1)
            _refuse((least + 1, 0), backend.write, by_token, b"late", least, 6)
            _expect(_accept(backend.write, by_token, b"higher", least + 1, 1), False, f"{least + 1} follows {least}")
            _refuse((least + 1, 1), backend.claim, by_token, least)
            for name in (by_number, by_token):
                _expect(backend.read(name), b"higher", f"The value under {least + 1} stays")


def a_deletion_keeps_the_fence(opens: Open) -> None:
    """A deletion is refused like any other write, and the fence outlives the value."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _accept(backend.write, name, b"there", 8, 1)
        _refuse((8, 1), backend.write, name, None, 7, 9)
        _expect(backend.read(name), b"there", "A refused deletion deletes nothing")
        _accept(backend.write, name, None, 9, 1)
        _expect(another.read(name), None, "A deleted resource has no value")
        _refuse((9, 1), another.write, name, b"back", 8, 2)
        _accept(another.write, name, b"new", 9, 2)
        _expect(backend.read(name), b"new", "A newer write stores a value again")


def a_claim_refuses_lower_tokens_at_once(opens: Open) -> None:
    """After a claim, lower tokens are refused, and the value is unchanged."""
    with _opened(opens) as backend, _opened(opens) as another:
        name, empty = _name(), _name()
        _accept(backend.write, name, b"before", 7, 1)
        for one in (name, empty):
            _accept(backend.claim, one, 8)
            _accept(backend.claim, one, 8)
            _refuse((8, 0), another.write, one, b"late", 7, 2)
            _refuse((8, 0), another.claim, one, 7)
        _expect(another.read(name), b"before", "A claim keeps the value")
        _expect(another.read(empty), None, "A claim of a resource without a value creates none")
        for one in (name, empty):
            _expect(
                _accept(another.write, one, b"after", 8, 1),
                False,
                "The token that has claimed a resource may write to it",
            )
            _accept(another.claim, one, 8)
            _refuse((8, 1), another.write, one, b"x", 8, 1)
            _expect(backend.read(one), b"after", "A claim under the token of the latest write changes nothing")


def keeps_resources_separate(opens: Open) -> None:
    """Each resource has its own fence, whatever its name."""
    with _opened(opens) as backend:
        stem = _name()
        names = [f"{stem}{suffix}" for suffix in ("", "x", "/x", ".x", "-x", " x", "%2Fx", "ü", "X")]
        for number, name in enumerate(names, 1):
            _accept(backend.write, name, str(number).encode(), 100 - number, 1)
        for number, name in enumerate(names, 1):
            _expect(backend.read(name), str(number).encode(), f"{name!a} is a resource of its own")


def concurrent_writes_are_accepted_in_order(opens: Open) -> None:
    """Of concurrent writes, the accepted pairs rise, and the value of the highest pair remains."""
    _storm(opens, lambda pair: f"{pair[0]}.{pair[1]}".encode())


def concurrent_writes_of_the_same_bytes_are_accepted_in_order(opens: Open) -> None:
    """As above, with equal values: a fence that compares the value would not notice a change."""
    _storm(opens, lambda pair: b"the same")


def concurrent_claims_and_deletions_are_accepted_in_order(opens: Open) -> None:
    """As above, with claims and deletions among the writes."""
    _storm(opens, lambda pair: None if pair[1] == 3 else f"{pair[0]}.{pair[1]}".encode(), claims=True)


def a_claim_holds_against_a_write_in_flight(opens: Open) -> None:
    """A write in flight during a claim of a higher token is refused, or was stored before the claim."""
    with _opened(opens) as holder, _opened(opens) as stale, ThreadPoolExecutor(1) as thread:
        for number in range(1, 41):
            name = _name()
            _accept(holder.write, name, b"first", 1, 1)
            sent = thread.submit(_accepted, stale.write, name, b"stale", 2, 1)
            time.sleep(random.uniform(0, 0.003))
            _accept(holder.claim, name, 3)
            there = holder.read(name)
            accepted = sent.result()
            after = holder.read(name)
            _expect(after, there, f"In round {number}: the value that a claimant reads stays until the claimant writes")
            _expect(
                after == b"stale", accepted, f"In round {number}: an accepted write is stored, and a refused one is not"
            )


CHECKS: list[Callable[[Open], None]] = [
    accepts_rising_pairs,
    refuses_a_lower_token,
    refuses_a_lower_write_number,
    recognises_a_repeated_write,
    a_late_repeat_changes_nothing,
    compares_tokens_as_integers,
    a_deletion_keeps_the_fence,
    a_claim_refuses_lower_tokens_at_once,
    keeps_resources_separate,
    concurrent_writes_are_accepted_in_order,
    concurrent_writes_of_the_same_bytes_are_accepted_in_order,
    concurrent_claims_and_deletions_are_accepted_in_order,
    a_claim_holds_against_a_write_in_flight,
]
"""All checks. Each takes a function that opens a backend."""


class _Sent(NamedTuple):
    pair: tuple[int, int]
    began: float
    ended: float


def _storm(opens: Open, data_of: Callable[[tuple[int, int]], bytes | None], claims: bool = False) -> None:
    """Run concurrent writes; repeat them on a quick resource, because a race may not show in one short round."""
    until = time.monotonic() + STORM_SECONDS
    while True:
        _storm_once(opens, data_of, claims)
        if time.monotonic() >= until:
            return


def _storm_once(opens: Open, data_of: Callable[[tuple[int, int]], bytes | None], claims: bool) -> None:
    """Run concurrent writes once, with pairs that rise on the whole and are shuffled locally."""
    name = _name()
    pairs = [(token, number) for token in range(1, WRITES // 4 + 1) for number in range(1, 5)]
    pairs.sort(key=lambda pair: pair[0] + random.gauss(0, 2))
    accepted: list[_Sent] = []
    ready = threading.Barrier(WRITERS)

    def write(writer: int) -> None:
        try:
            with _opened(opens) as backend:
                ready.wait(60)
                for token, number in pairs[writer::WRITERS]:
                    if claims and random.random() < 0.3:
                        _send(accepted, (token, 0), backend.claim, name, token)
                    pair = (token, number)
                    _send(accepted, pair, backend.write, name, data_of(pair), token, number)
        except BaseException:
            ready.abort()  # the other writers wait for this one, which has failed
            raise

    # Switch threads as often as possible.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(WRITERS) as pool:
            threads = [pool.submit(write, number) for number in range(WRITERS)]
        errors = [error for error in (thread.exception() for thread in threads) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
    finally:
        sys.setswitchinterval(before)
    writes = [sent for sent in accepted if sent.pair[1]]
    if not writes:
        raise AssertionError("Of many writes on a new resource, some must be accepted; none was")
    highest = max(sent.pair for sent in writes)
    _expect(highest, max(pairs), "The highest pair is accepted")
    _check_order(accepted)
    with _opened(opens) as backend:
        _expect(backend.read(name), data_of(highest), "In the end the value is that of the highest pair")
        _refuse(highest, backend.write, name, b"late", highest[0], highest[1] - 1)


def _send(accepted: list[_Sent], pair: tuple[int, int], act: Callable[..., Any], *args: Any) -> None:
    began = time.monotonic()
    if _accepted(act, *args):
        accepted.append(_Sent(pair, began, time.monotonic()))


def _check_order(accepted: list[_Sent]) -> None:
    """Check that a write sent after an accepted one, and accepted too, has a higher pair; a claim, no lower token."""
    done: tuple[int, int] = (0, 0)
    ends = sorted((sent.ended, sent.pair) for sent in accepted)
    for sent in sorted(accepted, key=lambda sent: sent.began):
        while ends and ends[0][0] < sent.began:
            done = max(done, ends.pop(0)[1])
        token, number = sent.pair
        if sent.pair <= done if number else token < done[0]:
            raise AssertionError(
                f"{sent.pair} was accepted, although it was sent after {done} was accepted: accepted pairs must rise"
            )


def _accepted(act: Callable[..., Any], *args: Any) -> bool:
    try:
        act(*args)
    except (StaleTokenError, TimeoutError):
        return False
    return True


def _accept(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except StaleTokenError as error:
        raise AssertionError(f"{act.__name__}{args!r:.200} was refused, although it is not stale: {error}") from error


def _refuse(fence: tuple[int, int], act: Callable[..., object], *args: Any) -> StaleTokenError:
    try:
        act(*args)
    except StaleTokenError as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"{act.__name__}{args!r:.200} raised {type(error).__name__}: {error}; it must raise StaleTokenError"
        ) from error
    raise AssertionError(
        f"{act.__name__}{args!r:.200} was accepted, although the fence stands at {fence}; it must raise StaleTokenError"
    )


def _expect(found: object, wanted: object, promise: str) -> None:
    if found != wanted:
        raise AssertionError(f"{promise}; expected {wanted!r:.200}, got {found!r:.200}")


def _name() -> str:
    return f"conformance-{uuid.uuid4().hex}"


@contextmanager
def _opened(opens: Open) -> Iterator[Backend]:
    if not callable(opens):
        raise TypeError("A check takes a function that opens a backend, such as its class; got a backend.")
    backend = opens()
    try:
        yield backend
    finally:
        close = getattr(backend, "close", None)
        if close is not None:
            close()

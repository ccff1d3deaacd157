"""The checks of the promise: each opens a backend, uses it, and raises AssertionError if it breaks the promise."""

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
STORMY = 0.1
"""Seconds for which many write at once, over and over, where a resource is quicker than that."""


def accepts_what_rises(opens: Open) -> None:
    """Writes under rising pairs are accepted, and read back whole."""
    with _opened(opens) as backend:
        name = _name()
        _same(backend.read(name), None, "A resource that nobody has written to holds nothing")
        for pair, data in [((5, 1), b"a"), ((5, 2), b""), ((6, 1), bytes(range(256))), ((2**63 - 1, 1), b"z")]:
            _same(
                _let_by(backend.write, name, data, *pair),
                False,
                f"The write {pair} is new, and not answered as repeated",
            )
            _same(backend.read(name), data, f"What was written under {pair} is read back")


def refuses_a_lower_token(opens: Open) -> None:
    """A token lower than the one seen is refused, whatever its number, and changes nothing."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _let_by(backend.write, name, b"new", 8, 1)
        for one in (backend, another):
            for number in (1, 2, 2**63 - 1):
                error = _refused((8, 1), one.write, name, b"old", 7, number)
                _same((error.offered, error.stored), (7, 8), "The refusal says which token came, and which was seen")
        _same(another.read(name), b"new", "A refused write changes nothing")


def refuses_a_lower_number_of_the_same_token(opens: Open) -> None:
    """Under one token, writes are accepted in the order of their numbers."""
    with _opened(opens) as backend:
        name = _name()
        _let_by(backend.write, name, b"2", 8, 2)
        _refused((8, 2), backend.write, name, b"1", 8, 1)
        _same(_let_by(backend.write, name, b"3", 8, 3), False, "A higher number under the same token is accepted")
        _same(backend.read(name), b"3", "The latest write is what is read")


def knows_the_same_write_sent_twice(opens: Open) -> None:
    """The latest write sent again is answered as done; another one under its number is refused."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _let_by(backend.write, name, b"once", 8, 5)
        _same(_let_by(another.write, name, b"once", 8, 5), True, "The same write sent twice is answered as repeated")
        _refused((8, 5), another.write, name, b"other", 8, 5)
        _refused((8, 5), another.write, name, None, 8, 5)
        _same(backend.read(name), b"once", "Neither changed anything")
        _refused((8, 5), another.write, name, b"cone", 8, 5)
        _let_by(backend.write, name, None, 8, 6)
        _same(_let_by(another.write, name, None, 8, 6), True, "The same deletion sent twice is answered as repeated")
        _refused((8, 6), another.write, name, b"", 8, 6)


def a_write_that_comes_again_later_changes_nothing(opens: Open) -> None:
    """A write that was accepted, and superseded since, is answered as done or refused; the value stays."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _let_by(backend.write, name, b"1", 8, 1)
        _let_by(backend.write, name, b"2", 8, 2)
        _accepted(another.write, name, b"1", 8, 1)
        _same(backend.read(name), b"2", "A write sent again after a later one changes nothing")
        _refused((8, 2), another.write, name, b"3", 8, 1)
        _let_by(backend.claim, name, 9)
        _accepted(another.write, name, b"2", 8, 2)
        _refused((9, 0), another.write, name, b"4", 8, 3)
        _let_by(backend.write, name, None, 9, 1)
        _accepted(another.write, name, b"2", 8, 2)
        _same(backend.read(name), None, "A write sent again after a deletion brings nothing back")


def compares_whole_numbers(opens: Open) -> None:
    """Tokens and numbers are compared as the whole numbers that they are: not as text, nor as 32 bits or floating."""
    with _opened(opens) as backend:
        for least in (9, 99, 2**31 - 1, 2**32 - 1, 2**53, 1_800_000_000_123_456_789, 2**63 - 2):
            by_number, by_token = _name(), _name()
            _let_by(backend.write, by_number, b"lower", 1, least)
            _same(_let_by(backend.write, by_number, b"higher", 1, least + 1), False, f"{least + 1} follows {least}")
            _refused((1, least + 1), backend.write, by_number, b"late", 1, least)
            _let_by(backend.write, by_token, b"lower", least, 5)
            _let_by(backend.claim, by_token, least + 1)
            _refused((least + 1, 0), backend.write, by_token, b"late", least, 6)
            _same(_let_by(backend.write, by_token, b"higher", least + 1, 1), False, f"{least + 1} follows {least}")
            _refused((least + 1, 1), backend.claim, by_token, least)
            for name in (by_number, by_token):
                _same(backend.read(name), b"higher", f"The value under {least + 1} stays")


def keeps_its_fence_when_deleted(opens: Open) -> None:
    """A deletion is a write: it is refused like one, and the fence outlives the value."""
    with _opened(opens) as backend, _opened(opens) as another:
        name = _name()
        _let_by(backend.write, name, b"there", 8, 1)
        _refused((8, 1), backend.write, name, None, 7, 9)
        _same(backend.read(name), b"there", "A refused deletion deletes nothing")
        _let_by(backend.write, name, None, 9, 1)
        _same(another.read(name), None, "What was deleted is not there")
        _refused((9, 1), another.write, name, b"back", 8, 2)
        _let_by(another.write, name, b"new", 9, 2)
        _same(backend.read(name), b"new", "A newer write brings it back")


def a_claim_refuses_before_anything_is_written(opens: Open) -> None:
    """From a claim on, lower tokens are refused, and the value is as it was."""
    with _opened(opens) as backend, _opened(opens) as another:
        name, empty = _name(), _name()
        _let_by(backend.write, name, b"before", 7, 1)
        for one in (name, empty):
            _let_by(backend.claim, one, 8)
            _let_by(backend.claim, one, 8)
            _refused((8, 0), another.write, one, b"late", 7, 2)
            _refused((8, 0), another.claim, one, 7)
        _same(another.read(name), b"before", "A claim leaves the value as it was")
        _same(another.read(empty), None, "A claim of what is not there makes nothing")
        for one in (name, empty):
            _same(_let_by(another.write, one, b"after", 8, 1), False, "Whoever has claimed a resource may write to it")
            _let_by(another.claim, one, 8)
            _refused((8, 1), another.write, one, b"x", 8, 1)
            _same(backend.read(one), b"after", "A claim under the token of the latest write changes nothing")


def keeps_resources_apart(opens: Open) -> None:
    """Each resource has a fence of its own, whatever its name."""
    with _opened(opens) as backend:
        stem = _name()
        names = [f"{stem}{suffix}" for suffix in ("", "x", "/x", ".x", "-x", " x", "%2Fx", "ü", "X")]
        for number, name in enumerate(names, 1):
            _let_by(backend.write, name, str(number).encode(), 100 - number, 1)
        for number, name in enumerate(names, 1):
            _same(backend.read(name), str(number).encode(), f"{name!a} is a resource of its own")


def many_writers_are_accepted_in_order(opens: Open) -> None:
    """Whatever many writers do at once, what is accepted rises, and the highest is there in the end."""
    _storm(opens, lambda pair: f"{pair[0]}.{pair[1]}".encode())


def many_writers_of_the_same_bytes_too(opens: Open) -> None:
    """The same, where all write the same: a fence that watches the value would not see it change."""
    _storm(opens, lambda pair: b"the same")


def many_who_write_claim_and_delete_too(opens: Open) -> None:
    """The same, where some claim and some delete."""
    _storm(opens, lambda pair: None if pair[1] == 3 else f"{pair[0]}.{pair[1]}".encode(), claims=True)


def a_claim_holds_against_a_write_under_way(opens: Open) -> None:
    """A write that was on its way when a higher token was claimed is refused, or was there before."""
    with _opened(opens) as holder, _opened(opens) as stale, ThreadPoolExecutor(1) as thread:
        for number in range(1, 41):
            name = _name()
            _let_by(holder.write, name, b"first", 1, 1)
            sent = thread.submit(_accepted, stale.write, name, b"stale", 2, 1)
            time.sleep(random.uniform(0, 0.003))
            _let_by(holder.claim, name, 3)
            there = holder.read(name)
            accepted = sent.result()
            after = holder.read(name)
            _same(after, there, f"In round {number}: what a claimer reads stays, until it writes itself")
            _same(
                after == b"stale", accepted, f"In round {number}: an accepted write is there, and a refused one is not"
            )


CHECKS: list[Callable[[Open], None]] = [
    accepts_what_rises,
    refuses_a_lower_token,
    refuses_a_lower_number_of_the_same_token,
    knows_the_same_write_sent_twice,
    a_write_that_comes_again_later_changes_nothing,
    compares_whole_numbers,
    keeps_its_fence_when_deleted,
    a_claim_refuses_before_anything_is_written,
    keeps_resources_apart,
    many_writers_are_accepted_in_order,
    many_writers_of_the_same_bytes_too,
    many_who_write_claim_and_delete_too,
    a_claim_holds_against_a_write_under_way,
]
"""All of them. Each takes what opens the backend."""


class _Sent(NamedTuple):
    pair: tuple[int, int]
    began: float
    ended: float


def _storm(opens: Open, data_of: Callable[[tuple[int, int]], bytes | None], claims: bool = False) -> None:
    """Let many write at once; over and over where it is a matter of moments, for these may be the wrong ones."""
    until = time.monotonic() + STORMY
    while True:
        _squall(opens, data_of, claims)
        if time.monotonic() >= until:
            return


def _squall(opens: Open, data_of: Callable[[tuple[int, int]], bytes | None], claims: bool) -> None:
    """Let many write at once, with pairs that rise on the whole and are shuffled in detail."""
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
            ready.abort()  # others may wait for this one, which cannot come
            raise

    # So that they come between each other as often as they can.
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
        raise AssertionError("Of many writes on a new resource, some are accepted; none was")
    highest = max(sent.pair for sent in writes)
    _same(highest, max(pairs), "The highest pair is accepted, whoever else writes")
    _check_order(accepted)
    with _opened(opens) as backend:
        _same(backend.read(name), data_of(highest), "In the end the value is that of the highest pair")
        _refused(highest, backend.write, name, b"late", highest[0], highest[1] - 1)


def _send(accepted: list[_Sent], pair: tuple[int, int], act: Callable[..., Any], *args: Any) -> None:
    began = time.monotonic()
    if _accepted(act, *args):
        accepted.append(_Sent(pair, began, time.monotonic()))


def _check_order(accepted: list[_Sent]) -> None:
    """Whatever was sent after something had been accepted, and was accepted itself, is higher; a claim, not lower."""
    done: tuple[int, int] = (0, 0)
    ends = sorted((sent.ended, sent.pair) for sent in accepted)
    for sent in sorted(accepted, key=lambda sent: sent.began):
        while ends and ends[0][0] < sent.began:
            done = max(done, ends.pop(0)[1])
        token, number = sent.pair
        if sent.pair <= done if number else token < done[0]:
            raise AssertionError(
                f"{sent.pair} was accepted, and sent only after {done} had been: what is accepted rises"
            )


def _accepted(act: Callable[..., Any], *args: Any) -> bool:
    try:
        act(*args)
    except (StaleTokenError, TimeoutError):
        return False
    return True


def _let_by(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except StaleTokenError as error:
        raise AssertionError(f"{act.__name__}{args!r:.200} was refused, though it is not stale: {error}") from error


def _refused(fence: tuple[int, int], act: Callable[..., object], *args: Any) -> StaleTokenError:
    try:
        act(*args)
    except StaleTokenError as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"{act.__name__}{args!r:.200} raised {type(error).__name__}: {error}; the promise is StaleTokenError"
        ) from error
    raise AssertionError(
        f"{act.__name__}{args!r:.200} was let by, though the fence stands at {fence}: it raises StaleTokenError"
    )


def _same(found: object, wanted: object, promise: str) -> None:
    if found != wanted:
        raise AssertionError(f"{promise}; expected {wanted!r:.200}, got {found!r:.200}")


def _name() -> str:
    return f"conformance-{uuid.uuid4().hex}"


@contextmanager
def _opened(opens: Open) -> Iterator[Backend]:
    if not callable(opens):
        raise TypeError("A check takes what opens a backend, such as its class, and not a backend.")
    backend = opens()
    try:
        yield backend
    finally:
        close = getattr(backend, "close", None)
        if close is not None:
            close()

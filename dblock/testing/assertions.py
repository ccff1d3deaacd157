"""Assert in which order a test was granted its locks, and that no call waited for one.

The assertions see the clients that were made during a test with one of the plugin's fixtures. Their messages name the
holder, the token and the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dblock._core.options import brief
from dblock.errors import DblockError, InvalidArgument, NotLocked
from dblock.observability import ObservedHold, ObservedWait
from dblock.testing import leaks
from dblock.testing.locations import UNKNOWN, Location


def assert_order(expected: Sequence[str]) -> None:
    """Raise AssertionError unless the locks of this test were granted in this order, and no others.

    Each item is the name of a lock, or a holder and a lock: `"worker 1: invoice:42"`.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, and not this function
    if isinstance(expected, str) or not all(isinstance(name, str) for name in expected):
        raise InvalidArgument(f"assert_order takes a list of the names of locks; got {brief(expected)}.")
    granted = _watch().grants
    if len(granted) == len(expected):
        pairs = zip(granted, expected, strict=True)
        if all(name in (hold.lock, f"{hold.holder}: {hold.lock}") for (hold, _), name in pairs):
            return
    lines = [f"  {number}. {_describe_grant(hold, location)}" for number, (hold, location) in enumerate(granted, 1)]
    raise AssertionError(
        "\n".join([f"The locks were not granted in this order: {list(expected)}. The order was:", *lines])
        if lines
        else f"The locks were not granted in this order: {list(expected)}. None was granted."
    )


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise AssertionError if a call in the block had to wait for a lock, or did not get it."""
    __tracebackhide__ = True
    watch = _watch()
    before = len(watch.queued)
    yield
    waited = watch.queued[before:]
    lasting = list(watch.waits.items())
    if waited or lasting:
        lines = [f"  {_describe_wait(watch, wait, location)}" for wait, location in [*waited, *lasting]]
        raise AssertionError("\n".join(["Calls have waited for locks:", *lines]))


def name_grants(error: Exception) -> None:
    """Add the grants of this test to the message of an error that says that a lock is not held."""
    if isinstance(error, NotLocked):
        grants = [_describe_grant(hold, at) for hold, at in _watch().grants if hold.lock == error.name]
        granted = "\n".join(["In this test, the lock was granted to:", *(f"  {grant}" for grant in grants)])
        error.args = (f"{error}\n{granted if grants else 'In this test, the lock was not granted.'}",)


def _describe_wait(watch: leaks.Watch, wait: ObservedWait, location: Location | None) -> str:
    names = ", ".join(map(repr, wait.locks))
    how = f"{wait.outcome} after {wait.seconds:.3f} s" if wait.outcome else "still waiting"
    line = f"{wait.holder} asked for {names} at {location or UNKNOWN} ({how})"
    holders = [
        (hold, at)
        for hold, at in watch.grants
        # Held when the wait began: `seconds` is 0 as long as it is held.
        if hold.lock in wait.locks
        and hold.began <= wait.began <= (hold.began + hold.seconds if hold.seconds else wait.began)
    ]
    return f"{line}, held by: {_describe_grant(*holders[-1])}" if holders else line


def _describe_grant(hold: ObservedHold, location: Location | None) -> str:
    token = "an efficiency lock" if hold.token is None else f"token {hold.token}"
    return f"{hold.holder}: {hold.lock!r}, {token}, acquired at {location or UNKNOWN}"


def _watch() -> leaks.Watch:
    if leaks.current is None:
        raise DblockError(
            "No client is watched. Use this in a test with dblock_client or another fixture of dblock. Memory clients "
            "are not watched."
        )
    return leaks.current

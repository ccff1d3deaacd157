"""One run of a slot, as the scheduled function sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from dblock.errors import DblockError

_current: ContextVar[Run] = ContextVar("dblock_run")


class Run:
    """One run of a slot, under a lease of its own."""

    def __init__(self, name: str, slot: datetime, number: int, lease: Any) -> None:
        self.name = name
        """The schedule's name."""
        self.slot = slot
        """The moment at which the run was due, by the database's clock, in UTC."""
        self.number = number
        """The number of this run among the runs of its slot: more than 1 if an earlier runner died."""
        self.lease = lease
        """The lease of the run: a Lease, or an AsyncLease in a coroutine."""

    @property
    def token(self) -> int:
        """The fencing token of the run. Pass it to every resource that the run writes to."""
        return int(self.lease.token)

    @property
    def deadline(self) -> datetime:
        """When the lease ends unless it is renewed, by the database's clock."""
        at: datetime = self.lease.expires_at
        return at

    @property
    def lost(self) -> Any:
        """The event that is set when the lease is lost. Another host may then run the slot."""
        return self.lease.lost

    def remaining(self) -> float:
        """Return the seconds left in the trust window; 0 if the lease is lost."""
        return float(self.lease.remaining())

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, unless the lease is inside its trust window at this moment."""
        self.lease.raise_if_lost()

    def __repr__(self) -> str:
        return f"<Run {self.name!r} {self.slot.isoformat()} token {self.token}>"


def current_run() -> Run:
    """Return the run of the scheduled function that calls this. Raise DblockError outside of a run."""
    try:
        return _current.get()
    except LookupError:
        raise DblockError(
            "There is no current run. Call current_run() only inside a scheduled function, during its run."
        ) from None


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Make this the current run for the body."""
    before = _current.set(run)
    try:
        yield
    finally:
        _current.reset(before)

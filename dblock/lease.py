"""A lease: what a client has in hand after a grant.

Guarantee: `renew` and `release` act on this exact grant and on no other. A late release never frees the next holder; a
renewal never revives a lease that was lost or released. The database decides both; this object only
remembers how long it may be believed without asking.

A lease belongs to the process that acquired it. In a child of that process it is over, and leaving its `with` does
nothing.
"""

from __future__ import annotations

import os
import time
from datetime import datetime
from types import TracebackType

from dblock.errors import DatabaseError, LeaseLost
from dblock.steps import Grant, Run, RunAsync, Service, Steps, moment
from dblock.terms import Seconds, check_ttl


class _LeaseBase:
    """What both kinds of lease know and compute."""

    def __init__(self, service: Service, grant: Grant, ttl: float) -> None:
        self._service = service
        self._grant = grant
        self._ttl = ttl
        self._over = False
        """Not to be believed any more, whatever the database says."""
        self._given_back = False
        """The database has said so."""
        self._process = os.getpid()

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._grant.name

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier grant of this lock."""
        return self._grant.token

    @property
    def expires_at(self) -> datetime:
        """The deadline by the database's clock. For logs; use `remaining()` to decide anything."""
        return moment(self._grant.expires_at)

    def remaining(self) -> float:
        """Return the seconds for which this lease may still be believed without asking; 0 when it is over."""
        if not self._ours:
            return 0.0
        return max(0.0, self._grant.trusted_until - time.monotonic())

    def _renewing(self, ttl: Seconds | None) -> Steps[None]:
        seconds = self._ttl if ttl is None else check_ttl(self.name, ttl)
        if not self._ours:
            raise LeaseLost(self.name, self.token)
        renewed = yield from self._service.renew(self._grant, seconds)
        if renewed is None:
            self._over = True
        if renewed is None or self._over:
            # Lost; or another thread has released it while the answer was on its way.
            raise LeaseLost(self.name, self.token)
        self._ttl = seconds
        # A renewal never brings the deadline nearer, so of two that were under way at once the longer is true.
        if renewed.trusted_until > self._grant.trusted_until:
            self._grant = renewed

    def _releasing(self) -> Steps[bool]:
        if self._finished:
            return False
        # Over from here on, whatever becomes of the call: who lets go may not go on writing.
        self._over = True
        released = yield from self._service.release(self._grant)
        self._given_back = True
        return released

    @property
    def _finished(self) -> bool:
        """Whether there is nothing for this process to give back."""
        return self._given_back or self._process != os.getpid()

    @property
    def _ours(self) -> bool:
        """Whether this process may do anything with the lease; a child of the one that acquired it may not."""
        return not self._over and self._process == os.getpid()

    def _check_end(self, given_back: bool, error: BaseException | None) -> None:
        """Raise LeaseLost at the end of a body that lost its lease and does not raise anything itself."""
        if not given_back and error is None:
            raise LeaseLost(self.name, self.token)

    def __repr__(self) -> str:
        state = f"{self.remaining():.1f} s left" if self.remaining() else "over"
        return f"<{type(self).__name__} {self.name!r} token {self.token}, {state}>"


class Lease(_LeaseBase):
    """A grant in hand; as a context manager it is released at the end."""

    def __init__(self, run: Run, service: Service, grant: Grant, ttl: float) -> None:
        super().__init__(service, grant, ttl)
        self._run = run

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to a full ttl from now, its own or a new one; raise LeaseLost when it is not held any more.

        A shorter ttl than before does not bring the deadline nearer.
        """
        self._run(self._renewing(ttl))

    def release(self) -> bool:
        """Give the lock back; False means that it was no longer held under this token."""
        return not self._finished and self._run(self._releasing())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Released inside the body: nothing to give back and nothing to report.
        if not self._finished:
            try:
                self._check_end(self.release(), error)
            except DatabaseError:
                # What the body raised matters more than a lock that will free itself.
                if error is None:
                    raise


class AsyncLease(_LeaseBase):
    """A grant in hand; as an async context manager it is released at the end."""

    def __init__(self, run: RunAsync, service: Service, grant: Grant, ttl: float) -> None:
        super().__init__(service, grant, ttl)
        self._run = run

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to a full ttl from now, its own or a new one; raise LeaseLost when it is not held any more.

        A shorter ttl than before does not bring the deadline nearer.
        """
        await self._run(self._renewing(ttl))

    async def release(self) -> bool:
        """Give the lock back; False means that it was no longer held under this token."""
        return not self._finished and await self._run(self._releasing())

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            try:
                self._check_end(await self.release(), error)
            except DatabaseError:
                if error is None:
                    raise

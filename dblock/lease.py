"""A lease: what a client has in hand after a grant.

Guarantee: `renew` and `release` act on this exact grant and on no other. A late release never frees the next holder; a
renewal never revives a lease that was lost or released. The database decides both; this object only
remembers how long it may be believed without asking.
"""

from __future__ import annotations

import time
from datetime import datetime
from types import TracebackType

from dblock.errors import DatabaseError, LeaseLost
from dblock.steps import TRUST, Grant, Protocol, Run, RunAsync, Steps, moment
from dblock.terms import Seconds, check_ttl


class _LeaseBase:
    """What both kinds of lease know and compute."""

    def __init__(self, protocol: Protocol, grant: Grant, ttl: float) -> None:
        self._protocol = protocol
        self._grant = grant
        self._ttl = ttl
        self._over = False
        """Not to be believed any more, whatever the database says."""
        self._given_back = False
        """The database has said so."""
        self._renewals = 0

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
        if self._over:
            return 0.0
        return max(0.0, self._grant.trusted_until - time.monotonic())

    def _renewing(self, ttl: Seconds | None) -> Steps[None]:
        seconds = self._ttl if ttl is None else check_ttl(self.name, ttl)
        if self._over:
            raise LeaseLost(self.name, self.token)
        self._renewals += 1
        number = self._renewals
        # A shorter ttl counts from here on: if its answer is lost, the database may have taken it all the same.
        self._trust_until(time.monotonic() + seconds * TRUST)
        renewed = yield from self._protocol.renew(self._grant, seconds)
        if renewed is None:
            self._over = True
        if renewed is None or self._over:
            # Lost; or another thread has released it while the answer was on its way.
            raise LeaseLost(self.name, self.token)
        self._ttl = seconds
        if number == self._renewals:
            self._grant = renewed
        else:
            # Another renewal was under way; whichever came last, the shorter is safe.
            self._trust_until(renewed.trusted_until)

    def _trust_until(self, moment: float) -> None:
        """Believe in the lease until then at the latest."""
        self._grant = self._grant._replace(trusted_until=min(self._grant.trusted_until, moment))

    def _releasing(self) -> Steps[bool]:
        if self._given_back:
            return False
        # Over from here on, whatever becomes of the call: who lets go may not go on writing.
        self._over = True
        released = yield from self._protocol.release(self._grant)
        self._given_back = True
        return released

    def _check_end(self, given_back: bool, error: BaseException | None) -> None:
        """Raise LeaseLost at the end of a body that lost its lease and does not raise anything itself."""
        if not given_back and error is None:
            raise LeaseLost(self.name, self.token)

    def __repr__(self) -> str:
        state = f"{self.remaining():.1f} s left" if self.remaining() else "over"
        return f"<{type(self).__name__} {self.name!r} token {self.token}, {state}>"


class Lease(_LeaseBase):
    """A grant in hand; as a context manager it is released at the end."""

    def __init__(self, run: Run, protocol: Protocol, grant: Grant, ttl: float) -> None:
        super().__init__(protocol, grant, ttl)
        self._run = run

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease from now, by its ttl or a new one; raise LeaseLost when it is not held any more."""
        self._run(self._renewing(ttl))

    def release(self) -> bool:
        """Give the lock back; False means that it was no longer held under this token."""
        return self._run(self._releasing())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Released inside the body: nothing to give back and nothing to report.
        if not self._given_back:
            try:
                self._check_end(self.release(), error)
            except DatabaseError:
                # What the body raised matters more than a lock that will free itself.
                if error is None:
                    raise


class AsyncLease(_LeaseBase):
    """A grant in hand; as an async context manager it is released at the end."""

    def __init__(self, run: RunAsync, protocol: Protocol, grant: Grant, ttl: float) -> None:
        super().__init__(protocol, grant, ttl)
        self._run = run

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease from now, by its ttl or a new one; raise LeaseLost when it is not held any more."""
        await self._run(self._renewing(ttl))

    async def release(self) -> bool:
        """Give the lock back; False means that it was no longer held under this token."""
        return await self._run(self._releasing())

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._given_back:
            try:
                self._check_end(await self.release(), error)
            except DatabaseError:
                if error is None:
                    raise

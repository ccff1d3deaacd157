"""The errors of locks and leases."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar, NamedTuple

from dblock.errors.base import DblockError


class LockTimeout(DblockError, TimeoutError):
    """The lock was not acquired before the timeout passed."""

    def __init__(
        self,
        name: str,
        timeout: float,
        claims: bool = False,
        own_token: int | None = None,
        names: Sequence[str] = (),
        any_of: bool = False,
        shared: bool = False,
    ) -> None:
        self.name = name
        """The lock. Of several locks, the one that the caller was waiting for at the timeout."""
        self.timeout = timeout
        self.claims = claims
        """Whether the lock claims resources. It may then have waited for a transaction that has passed their fences."""
        self.own_token = own_token if own_token is not None and own_token > 0 else None
        """The token of the lease by which this client itself holds the lock; None if it does not, and for an efficiency
        lock."""
        self.names = tuple(names)
        """The names of all the locks, if the caller asked for several."""
        self._own_number = own_token
        self._any_of = any_of
        self._shared = shared
        way = "another client holds it, or other waiters are ahead"
        if claims:
            way = (
                "another client holds it, other waiters are ahead, or an open transaction has passed the fence of a "
                "resource that it claims"
            )
        lock = f"client.lock({name!r})" if names else "lock"
        then = f"Wait longer, or call {lock}.holder() and {lock}.queue() to see its holder and its waiters."
        if own_token is not None:
            # The number of an efficiency lock's grant is negative, and is no token.
            under = f", under token {self.own_token}" if self.own_token else ""
            way = f"this client itself holds {'a share of it' if shared else 'it'}{under}"
            then = "Release that lease first, or wait longer if another thread or task holds it."
            if self.own_token and not names and not shared:
                then += " If this one holds it, give both locks reentrant=True."
        what = f"Lock {name!r} was not acquired"
        if any_of:
            what = f"None of {len(self.names)} locks was acquired"
            own = f"one of them is lock {name!r}, and {way}"
            way = own if own_token is not None else "other clients hold them, or are ahead"
        elif names:
            what = f"{len(self.names)} locks were not all acquired"
            way = f"the caller waited for lock {name!r}, and {way}"
        super().__init__(f"{what} within {timeout:g} s: {way}. {then}")

    def __reduce__(self) -> tuple[object, ...]:
        how = (self._own_number, self.names, self._any_of, self._shared)
        return type(self), (self.name, self.timeout, self.claims, *how)


class CycleWait(NamedTuple):
    """One wait of a deadlock: for the holder of a lock, or of a session for another session of the database."""

    waiter: str
    """The name of the client that waits."""
    lock: str | None
    """The lock that it waits for; None for a wait between sessions."""
    holder: str
    """The name of the client that holds the lock, or that works in the other session."""
    token: int | None
    """The token under which it holds the lock or works; None for an efficiency lock."""
    session: int | None
    """The process ID of the session that waits; None for a wait for a lock."""
    blocker: int | None
    """The process ID of the session that it waits for; None for a wait for a lock."""

    def __str__(self) -> str:
        under = f" under token {self.token}" if self.token else ""
        if self.lock is not None:
            return f"{self.waiter} waits for lock {self.lock!r}, which {self.holder} holds{under}"
        # A session that is not bound to a lease is its own holder.
        unbound = self.holder == f"session {self.blocker}"
        works = "" if unbound else f", in which {self.holder} works{under}"
        return f"{self.waiter} waits in session {self.session} for session {self.blocker}{works}"


class DeadlockDetected(DblockError):
    """The wait was ended because it was part of a deadlock: a cycle of waits, each for the holder that waits next."""

    def __init__(self, name: str, cycle: Sequence[CycleWait]) -> None:
        self.name = name
        self.cycle = list(cycle)
        """The waits of the cycle in order. The first is the one that was ended."""
        waits = "".join(f"\n  {wait}" for wait in self.cycle)
        then = (
            "The other waits continue when you release the locks that you hold. Release them, and try again."
            if all(wait.session is None for wait in self.cycle)
            else "The other waits continue when you roll back your transaction and release the locks that you "
            "hold. Do both, and try again."
        )
        super().__init__(f"The wait for lock {name!r} was ended because it was part of a deadlock:{waits}\n{then}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.cycle)


class LeaseLost(DblockError):
    """The lease is no longer held."""

    _WHY: ClassVar[dict[str, str]] = {
        "expired": "it expired before it was renewed",
        "superseded": "the lock was granted to another client",
        "forced": "an operator or another session released it by force",
        "unreachable": "the database did not confirm it in time",
        "over": "it was released, or belongs to another process",
    }

    def __init__(self, name: str, reason: str, last_held: datetime, token: int) -> None:
        self.name = name
        self.reason = reason
        """One of expired, superseded, forced and unreachable; or `over` for a lease that was released."""
        self.last_held = last_held
        """The last moment at which the lease was known to be held, by this machine's wall clock."""
        self.token = token if token > 0 else None
        """The fencing token; None for an efficiency lock."""
        self._number = token
        under = f" under token {token}" if token > 0 else ""
        super().__init__(
            f"The lease of lock {name!r}{under} is lost ({reason}): {self._WHY.get(reason, reason)}. It was last "
            f"known to be held at {last_held:%H:%M:%S.%f} UTC. Stop writing and acquire again."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.reason, self.last_held, self._number)


class NotLocked(DblockError):
    """The calling thread or task does not hold the lock that the code relies on."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"Lock {name!r} is not held by the calling thread or task, or its lease is lost. Acquire the lock before "
            "this call, in the same thread or task: a child task and a thread of a pool do not hold what their caller "
            "holds."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)


class NoFencingToken(DblockError):
    """An efficiency lock has no fencing token."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"Lock {name!r} is an efficiency lock: a crash of the database may forget its grant, so it has no fencing "
            "token and cannot protect a resource. Use client.lock() if it should."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)


class WrongKind(DblockError):
    """The name belongs to a lock of another kind: one name has one kind."""

    def __init__(
        self, message: str, then: str = "One name has one kind of lock: choose another name, or use that kind."
    ) -> None:
        super().__init__(f"{message.rstrip('.')}. {then}")
        self._message = message
        self._then = then

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._message, self._then)


class PermitsDiffer(DblockError):
    """The semaphore has another number of permits than this client asked for."""

    def __init__(self, name: str, permits: int, asked: int) -> None:
        self.name = name
        self.permits = permits
        """The number of permits that the semaphore has."""
        self.asked = asked
        """The number of permits that this client asked for."""
        super().__init__(
            f"Semaphore {name!r} has {permits} permits, and this client asked for {asked}. Give permits={permits}, or "
            f"permits=None to take the number that it has, or change it for all clients with resize({asked})."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.permits, self.asked)


class UpgradeRefused(DblockError):
    """A reader asked for the write lock without releasing its read lease first."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"The read lease of lock {name!r} cannot become a write lease: a writer waits until all readers have left, "
            "and two readers that both want to write would wait for each other. Release the read lease, acquire "
            "write_lock(), and read again what you have read. If you may have to write, start with write_lock() and "
            "downgrade()."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)

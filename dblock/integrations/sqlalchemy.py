"""SQLAlchemy: a session of the ORM that commits only under its lease.

    with client.lock("invoice:42") as lease, Session(engine) as session:
        guard(session, lease)
        session.get(Invoice, 42).closed = True
        session.commit()                         # LeaseLost, and nothing is stored, if the lease is gone

Guarantee: every commit of a guarded session proves the lease in its own transaction first. From the proof until the
transaction has ended, the database grants the lock to no other client, so no commit comes late. A flush checks the
lease without a round trip, so that a session stops writing as soon as this process knows of the loss.

The locks must be in the database of the session. For other databases use `fenced_store`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from dblock.lease import TaskLease

if TYPE_CHECKING:
    from dblock.lease import AsyncLease, Lease


def guard(session: Any, lease: Lease | AsyncLease) -> Callable[[], None]:
    """Let every commit of the session prove the lease first. Return a function that ends the guard.

    The session is a Session or a scoped_session with a lease of a Client, or an AsyncSession with a lease of an
    AsyncClient. A commit without the lease raises LeaseLost: roll the session back then. A session can be guarded by
    several leases.
    """
    if hasattr(session, "registry") and callable(session):
        session = session()  # the current session of a scoped_session
    guarded = getattr(session, "sync_session", session)
    if isinstance(lease, TaskLease) != (guarded is not session):
        kind = "AsyncSession" if isinstance(lease, TaskLease) else "Session"
        from dblock.errors import InvalidArgument

        raise InvalidArgument(f"This lease guards a SQLAlchemy {kind}; got {type(session).__name__}.")

    def before_commit(_: Any) -> None:
        proof = lease.assert_held(session)
        if proof is not None:
            from sqlalchemy.util import await_only

            await_only(proof)

    def before_flush(*_: Any) -> None:
        lease.raise_if_lost()

    event.listen(guarded, "before_commit", before_commit)
    event.listen(guarded, "before_flush", before_flush)

    def unguard() -> None:
        if event.contains(guarded, "before_commit", before_commit):
            event.remove(guarded, "before_commit", before_commit)
            event.remove(guarded, "before_flush", before_flush)

    return unguard

"""Fencing tokens and write numbers: what each write carries.

A token is an integer from the service that grants the lock: a dblock lease, a ZooKeeper zxid, an etcd revision. Any
object with a `token` is accepted.

The write number orders the writes under one token. It rises with every write of this process, and starts at the clock.
A process that continues under the token of an earlier process (a restart that kept its lease) therefore starts above
that process's numbers. A clock that is behind can only cause a refusal, never the acceptance of a stale write.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from fenced_store.errors import InvalidArgument, abbreviated

MAX_BIGINT = 2**63 - 1
"""The highest token and the highest write number: a bigint of Postgres."""

_HOST = socket.gethostname()

_lock = threading.Lock()
_last = 0


class HasToken(Protocol):
    """A lease: dblock's, or that of any other service that issues fencing tokens."""

    @property
    def token(self) -> int:
        """The fencing token."""
        ...


def token_of(fence: int | HasToken) -> int:
    """Return the token of a lease, or the token itself. Raise for leases of dblock that may not write.

    These are its efficiency leases, which have no token, and its read leases, which other readers hold too. The token
    that a read lease returns is refused as well.
    """
    if getattr(fence, "reads_only", False) is True:
        lock = f" of lock {fence.name!a:.80}" if hasattr(fence, "name") else ""
        raise InvalidArgument(
            f"A read lease passes no fence, nor does its token: other readers{lock} hold one at the same time. Write "
            "with the lease of write_lock()."
        )
    token: Any = fence if isinstance(fence, int) else getattr(fence, "token", None)
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidArgument(f"A fence is a lease with a token, or a token; got {type(fence).__name__}.")
    if not 1 <= token <= MAX_BIGINT:
        raise InvalidArgument(f"A fencing token is a whole number from 1 to 2^63 - 1; got {token}.")
    return token


def next_write() -> int:
    """Return a write number higher than every earlier one of this process."""
    global _last
    with _lock:
        _last = max(_last + 1, time.time_ns())
        return _last


def write_of(fence: int | HasToken) -> int:
    """Return the number of the next write with this fence: its own if it stands for one write, as a request's does."""
    number = getattr(fence, "write", None)
    return next_write() if number is None else check_write(number)


class PresentedToken(NamedTuple):
    """A token that was read once from its lease, with a description of the writer that presents it."""

    token: int
    writer: str


class FenceHolder(Protocol):
    """A request that may hold the fence of a resource on a connection; `connection` is None while it does not."""

    resource: str
    connection: Any


fence_holders: ContextVar[tuple[FenceHolder, ...]] = ContextVar("fenced_store.held", default=())
"""The requests that the current task serves. A thread that the task calls sees them too."""


def refuse_self_wait(resource: str, connection: Any = None) -> None:
    """Raise if this request already holds the fence on another connection: it would wait for itself."""
    for holder in fence_holders.get():
        if (
            holder.connection is not None
            and holder.resource == resource
            and not _is_same(connection, holder.connection)
        ):
            raise InvalidArgument(
                f"The fence of {abbreviated(resource)} is held by this request, which would wait for itself. Write on "
                "request.state.fencing.connection, or give the middleware hold=False."
            )


def _is_same(connection: Any, holding: Any) -> bool:
    """Return whether a connection, or a session on one, is the connection that holds a fence."""
    ours = {id(holding), id(getattr(holding, "sync_connection", holding))}
    theirs = (connection, getattr(connection, "bind", None), getattr(connection, "sync_connection", None))
    return any(id(one) in ours for one in theirs if one is not None)


def check_write(write: int) -> int:
    """Return the caller's write number if it is valid."""
    if isinstance(write, bool) or not isinstance(write, int) or not 1 <= write <= MAX_BIGINT:
        raise InvalidArgument(f"A write number is a whole number from 1 to 2^63 - 1; got {write!r:.80}.")
    return write


def describe_writer(fence: int | HasToken | None = None) -> str:
    """Return the writer's description that is stored with a write: machine, process, and the lock's name if any."""
    if isinstance(fence, PresentedToken):
        return fence.writer
    by = getattr(fence, "by", None)
    if isinstance(by, str):
        return f"{_HOST} pid {os.getpid()} for {by:.300}"
    name = getattr(fence, "name", None)
    return f"{_HOST} pid {os.getpid()}" + (f" lock {name!a:.200}" if isinstance(name, str) else "")


def _reset_after_fork() -> None:
    """Replace the lock in the child of a fork, where no thread is left that could release it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)

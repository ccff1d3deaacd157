"""Tokens and write numbers: what a write carries, and where they come from.

A token is a whole number from whoever grants the lock: a dblock lease, a ZooKeeper zxid, an etcd revision. Anything
with a `token` will do. The write number orders the writes under one token. It rises with every write of this process,
and begins at the clock, so that a process that goes on under a token which another had before it (a restart that kept
its lease) begins above it. A clock that is behind can only cause a refusal, never an acceptance of what is stale.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from fenced_store.errors import InvalidArgument, shown

MOST = 2**63 - 1
_HOST = socket.gethostname()

_lock = threading.Lock()
_last = 0


class HasToken(Protocol):
    """A lease: of dblock's, or of anybody who hands out fencing tokens."""

    @property
    def token(self) -> int:
        """The fencing token."""
        ...


def token_of(fence: int | HasToken) -> int:
    """Return the token of a lease, or of itself; an efficiency lease of dblock's raises, for it has none."""
    token: Any = fence if isinstance(fence, int) else getattr(fence, "token", None)
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidArgument(f"A fence is a lease with a token, or a token; got {type(fence).__name__}.")
    if not 1 <= token <= MOST:
        raise InvalidArgument(f"A fencing token is a whole number from 1 to 2^63 - 1; got {token}.")
    return token


def next_write() -> int:
    """Return a number higher than every one before in this process."""
    global _last
    with _lock:
        _last = max(_last + 1, time.time_ns())
        return _last


def write_of(fence: int | HasToken) -> int:
    """Return the number of the next write with this fence: its own if it stands for one write, such as a request's."""
    number = getattr(fence, "write", None)
    return next_write() if number is None else check_write(number)


class Shown(NamedTuple):
    """A token as it was read once, and who shows it."""

    token: int
    who: str


class HoldsFence(Protocol):
    """What holds the fence of a resource, on a connection, while it is not None."""

    resource: str
    connection: Any


held: ContextVar[tuple[HoldsFence, ...]] = ContextVar("fenced_store.held", default=())
"""What this task, or the one that called this thread, holds: a request that is being served."""


def check_free(resource: str, connection: Any = None) -> None:
    """Refuse to wait for a fence that is held by the very one who asks, on another connection."""
    for one in held.get():
        if one.connection is not None and one.resource == resource and not _is_same(connection, one.connection):
            raise InvalidArgument(
                f"The fence of {shown(resource)} is held by this request, which would wait for itself. Write on "
                "request.state.fencing.connection, or let the middleware go on with hold=False."
            )


def _is_same(connection: Any, holding: Any) -> bool:
    """Tell whether a connection, or a session on one, is that which holds a fence."""
    ours = {id(holding), id(getattr(holding, "sync_connection", holding))}
    theirs = (connection, getattr(connection, "bind", None), getattr(connection, "sync_connection", None))
    return any(id(one) in ours for one in theirs if one is not None)


def check_write(write: int) -> int:
    """Return a write number that the caller gave, if it can be one."""
    if isinstance(write, bool) or not isinstance(write, int) or not 1 <= write <= MOST:
        raise InvalidArgument(f"A write number is a whole number from 1 to 2^63 - 1; got {write!r:.80}.")
    return write


def who(fence: int | HasToken | None = None) -> str:
    """Say who writes, for those who will ask later: the machine, the process, and the lock if it has a name."""
    if isinstance(fence, Shown):
        return fence.who
    by = getattr(fence, "by", None)
    if isinstance(by, str):
        return f"{_HOST} pid {os.getpid()} for {by:.300}"
    name = getattr(fence, "name", None)
    return f"{_HOST} pid {os.getpid()}" + (f" lock {name!a:.200}" if isinstance(name, str) else "")


def _begin_anew() -> None:
    """In the child of a fork nobody holds the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)

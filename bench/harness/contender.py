"""What is compared: a contender is one client library on one server, with the same three verbs for all.

A peer is the adapter of a library, in bench/peers. It acquires as its documentation shows, with a new lock object for
each acquisition where the documentation does so.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Release = Callable[[], object]
AsyncRelease = Callable[[], Awaitable[object]]

TTL = 30.0
"""Seconds, for every lease of every contender unless a question says otherwise."""

PATIENCE = 600.0
"""Seconds that a server may take to reply: on a busy machine a benchmark is slow, and does not fail."""


class Peer(Protocol):
    """One client of a library. Threads may share it."""

    def acquire(self, name: str) -> Release:
        """Wait until the lock is held, and return what releases it."""

    def close(self) -> None:
        """Close its connections."""


class AsyncPeer(Protocol):
    """One client of a library for asyncio."""

    async def acquire(self, name: str) -> AsyncRelease:
        """Wait until the lock is held, and return what releases it."""

    async def close(self) -> None:
        """Close its connections."""


@dataclass(frozen=True)
class Contender:
    """A named way to lock."""

    name: str
    make: str
    """The module and the class of its peer."""
    where: str
    pid: int = 0
    """The process of its server, whose descendants count too. 0 if it has none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    also: tuple[int, ...] = ()
    """Other processes that serve it, such as the database behind a pooler."""

    @property
    def servers(self) -> tuple[int, ...]:
        """All processes that serve it."""
        return tuple(pid for pid in (self.pid, *self.also) if pid)

    def open(self) -> Any:
        """Create a client, in the process that uses it."""
        module, _, name = self.make.partition(":")
        return getattr(importlib.import_module(module), name)(self.where, **self.options)

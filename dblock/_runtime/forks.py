"""Reset objects in the child of a fork.

A child has the parent's objects but none of its threads. A lock that another thread held at the fork would stay held
forever, and two processes would talk over one socket.

The same is true of the interpreter's own locks: a module that another thread was importing could never be imported in
the child. So a fork waits while a client imports the modules that it needs.
"""

from __future__ import annotations

import os
import threading
import typing
import weakref


class Forkable(typing.Protocol):
    """An object that a child cannot use as the parent left it."""

    def reset_after_fork(self) -> None:
        """Forget what belongs to the parent. Called in the child, which has one thread."""


importing = threading.RLock()
"""Held while a client imports modules at its first use, and during a fork."""

_forks = 0

_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def call_after_fork(thing: Forkable) -> None:
    """Reset the thing in every child."""
    _known.add(thing)


def forks_so_far() -> int:
    """Return how often this process has forked since dblock was imported."""
    return _forks


def _in_parent() -> None:
    global _forks
    _forks += 1
    importing.release()


def _in_child() -> None:
    try:
        for thing in list(_known):
            thing.reset_after_fork()
    finally:
        # Last, because this raises if a signal handler interrupted the wait for the lock: Python forks even then.
        importing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=importing.acquire, after_in_parent=_in_parent, after_in_child=_in_child)

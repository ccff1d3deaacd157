"""What must start anew in the child of a fork.

A child has the parent's objects but none of its threads: a lock that another thread held at that moment would stay
held for good, and a socket would have two processes talking over it.

The interpreter's own locks are no different: a module that another thread was importing could never be imported in the
child. So nobody forks while a client is importing what it needs.
"""

from __future__ import annotations

import os
import threading
import typing
import weakref


class Forkable(typing.Protocol):
    """Something that a child cannot use as the parent left it."""

    def reset_after_fork(self) -> None:
        """Forget what belongs to the parent. Called in the child, which has one thread."""


importing = threading.RLock()
"""Held by whoever imports modules when a client is first used, and by whoever forks."""

_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def call_after_fork(thing: Forkable) -> None:
    """Have the thing start anew in every child."""
    _known.add(thing)


def _in_child() -> None:
    try:
        for thing in list(_known):
            thing.reset_after_fork()
    finally:
        # Last: it is not ours if a signal's handler has thrown us out of waiting for it, and Python forks all the same.
        importing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=_in_child)

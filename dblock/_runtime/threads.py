"""Start threads.

A process may be refused a thread for a moment, by the limit of its container or account. The caller then gets one of
dblock's errors, and nothing may remember the thread as started: the next call starts it.

Ctrl-C may interrupt a start at any point, and Python then does not say whether the thread runs. So the thread decides:
either it has begun, and its owner remembers it, or it is revoked and does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dblock.errors import Unavailable


class RevocableThread(threading.Thread):
    """A daemon thread that can be revoked until its function begins."""

    def __init__(self, name: str, target: Callable[..., object], *args: object) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._first = threading.Lock()
        """Taken once: by the thread when it begins, or by the call that revokes it."""

    def run(self) -> None:
        """Run the function, unless the thread was revoked before."""
        if self._first.acquire(blocking=False):
            super().run()

    def revoke(self) -> bool:
        """Return whether the function has not begun. Then it never will."""
        return self._first.acquire(blocking=False)


def start_only_thread(
    remember: Callable[[threading.Thread | None], object], name: str, target: Callable[..., object], *args: object
) -> None:
    """Start the one thread of a component. `remember` stores the thread, or None if it will never run.

    An interrupt at any moment leads neither to a second thread nor to a thread that is remembered and does not run.
    """
    thread = RevocableThread(name, target, *args)
    try:
        started(thread)
        remember(thread)
    except BaseException:
        # A thread with an identifier is past the point at which its start can fail.
        runs = thread.ident is not None or not thread.revoke()
        remember(thread if runs else None)
        raise


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread and return it. Raise Unavailable if the process may start no thread now."""
    return started(threading.Thread(target=target, args=args, name=name, daemon=True))


def start_timer(name: str, seconds: float, function: Callable[[], object]) -> threading.Timer:
    """Call the function after so many seconds, in a thread. Raise Unavailable if the process may start none now."""
    timer = threading.Timer(seconds, function)
    timer.name, timer.daemon = name, True
    started(timer)
    return timer


def started(thread: threading.Thread) -> threading.Thread:
    """Start the thread. Raise Unavailable if the process may start no thread now."""
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(
            f"This process could not start a thread ({thread.name}): {error}. Retry, and raise the process limit of "
            "its container or account (pids.max, ulimit -u) if this happens again."
        ) from error
    except KeyError as error:
        if error.__context__ is None:
            raise
        # An interrupt came when the thread had begun. Thread.start() fails then as it handles the interrupt.
        raise error.__context__ from None
    return thread

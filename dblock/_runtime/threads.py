"""Start threads.

A process may be refused a thread for a moment, by the limit of its container or account. The caller then gets one of
dblock's errors, and nothing may remember the thread as started: the next call starts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dblock.errors import Unavailable


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
    return thread

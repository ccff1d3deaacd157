"""The calls that wait for a connection of a pool, and what they get."""

from __future__ import annotations

import asyncio
import threading

from dblock._runtime.connection import RawConnection


class Slot:
    """Permission to have one connection open."""


Handed = RawConnection | Slot
"""What a call gets from the pool: a connection, or a slot in which to open one."""


class ThreadTurn:
    """One call in the queue, for a thread. `handed` is set before the event. It gets a slot only if it `opens`."""

    def __init__(self, opens: bool = True) -> None:
        self.opens = opens
        self.came = threading.Event()
        self.handed: Handed | None = None

    def give(self, handed: Handed | None) -> bool:
        """Hand something over, or None from a closed pool. Return whether the call still waits."""
        self.handed = handed
        self.came.set()
        return True


class TaskTurn:
    """One call in the queue, for a task. It gets a slot only if it `opens`."""

    def __init__(self, opens: bool = True) -> None:
        self.opens = opens
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.handed: Handed | None = None

    def give(self, handed: Handed | None) -> bool:
        """Hand something over, or None from a closed pool. Return whether the call still waits."""
        if self.came.done():
            return False  # its task was cancelled
        self.handed = handed
        self.came.set_result(None)
        return True

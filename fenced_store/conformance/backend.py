"""The promise of a fenced resource, as a protocol: implement `Backend` to run the checks against your resource."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Backend(Protocol):
    """A fenced resource, as one of its writers sees it.

    The promise, for each resource by itself: the fence is the greatest (token, write number) that was accepted or
    claimed. A claim counts as write number 0. A write is accepted if and only if its pair is greater than the fence, or
    it is the same write that raised the fence. Comparing, raising the fence and writing are atomic with respect to all
    other writers, on any thread, process or machine. The fence never falls, and a deletion keeps it. Tokens and write
    numbers are integers up to 2^63 - 1. The name of a resource is any text. A backend may be used by another thread
    than the one that opened it, but not by two at once.

    A backend may raise a TimeoutError if other writers keep it from writing. It has then stored nothing.
    """

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        """Write, or delete if `data` is None. Return whether the same write had been accepted before.

        A write that was accepted before changes nothing. If the pair is not greater than the fence, raise
        StaleTokenError and change nothing. A write that was accepted and then superseded may do either.
        """
        ...

    def claim(self, resource: str, token: int) -> None:
        """Raise the fence to (token, 0) and keep the value. Do nothing if the fence already has this token.

        If the fence has a higher token, raise StaleTokenError and change nothing.
        """
        ...

    def read(self, resource: str) -> bytes | None:
        """Return the value; None if nothing was written, or the value was deleted."""
        ...


Open = Callable[[], Backend]
"""Opens the resource for one more writer. If the backend has a close(), the check calls it at the end."""

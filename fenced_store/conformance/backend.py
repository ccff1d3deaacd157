"""The promise of a fenced resource, as a protocol: implement `Backend` to run the checks against your resource."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Backend(Protocol):
    """A resource with a fence, as one of its writers sees it.

    The promise, for each resource by itself: the fence is the greatest (token, write number) that was accepted or
    claimed, a claim counting as number 0. A write is accepted if and only if its pair is greater than the fence, or it
    is the very write that raised it; comparing, raising the fence and writing are one act that nothing comes between,
    whichever process, thread or machine the other writers are on. The fence never falls: deleting keeps it. Tokens and
    numbers are whole ones, up to 2^63 - 1. A resource is named by any text. One that was opened may be used by another
    thread than that which opened it, though not by two at once.

    A backend may raise a TimeoutError when others keep it from writing; then it has stored nothing.
    """

    def write(self, resource: str, data: bytes | None, token: int, number: int) -> bool:
        """Write, or delete with None. Return whether this very write had been accepted before; then change nothing.

        Raise StaleTokenError, and change nothing, when the pair is not greater than the fence. A write that was
        accepted, and superseded since, may be answered either way.
        """
        ...

    def claim(self, resource: str, token: int) -> None:
        """Raise the fence to (token, 0) and leave the value as it is; do nothing if it stands at this token.

        Raise StaleTokenError, and change nothing, when it stands at a higher one.
        """
        ...

    def read(self, resource: str) -> bytes | None:
        """Return the value; None where nothing was written, or it was deleted."""
        ...


Open = Callable[[], Backend]
"""Opens the resource once more, as another writer would. If the backend has a close(), it is called at the end."""

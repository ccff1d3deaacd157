"""A resource that refuses stale writers: the meaning of a fence of fenced_store.

A write carries its token and its number under that token, and is accepted only above everything that was accepted or
claimed before.
"""

from __future__ import annotations


class Fence:
    """The fences of some resources."""

    def __init__(self) -> None:
        self.stands: dict[str, tuple[int, int]] = {}
        self.accepted: list[tuple[str, int, int]] = []
        self.claimed: list[tuple[str, int]] = []

    def claim(self, resource: str, token: int) -> None:
        """Raise the fence to this token, ahead of its first write."""
        if token > self.stands.get(resource, (0, 0))[0]:
            self.stands[resource] = (token, 0)
        self.claimed.append((resource, token))

    def write(self, resource: str, token: int, number: int) -> bool:
        """Accept a write, or refuse it."""
        if not self.passes(resource, token, number):
            return False
        self.stands[resource] = (token, number)
        self.accepted.append((resource, token, number))
        return True

    def passes(self, resource: str, token: int, number: int) -> bool:
        """Return whether a write is newer than all before it."""
        return (token, number) > self.stands.get(resource, (0, 0))

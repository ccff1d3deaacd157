"""Wait for the keep-alive to renew a lease, instead of for a time in which a slow machine may not have renewed it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.support.eventually import eventually_async

TTL = 6.0
"""Seconds of a lease that is to be renewed once. The renewal is due after a third, so the machine may be 3 s late."""


async def renewed(lease: Any) -> None:
    """Return when the keep-alive has extended a lease of TTL seconds by a quarter of it, as only a due renewal does.

    The renewal that ties a lease to a presence comes at once, and extends the lease by less.
    """
    beyond = lease.expires_at + timedelta(seconds=TTL / 4)

    def extended() -> bool:
        if lease.expires_at >= beyond:
            return True
        lease.raise_if_lost()
        return False

    await eventually_async(extended, "the lease is renewed")
    assert lease.remaining() > 0

"""Mistakes of locks that their holder may acquire again."""

from __future__ import annotations

from typing import Any

import pytest

from dblock._core.holds import Hold
from dblock._runtime import owners
from tests.dblock.client.test_reentrance import (
    test_inner_ttl_never_shortens_the_outer_lease,
    test_many_acquires_leave_no_renewal_and_no_row,
    test_tasks_of_one_loop_never_share,
)
from tests.dblock.peer_bugs import PeerBug


def _release_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: Any, state: Any, *, close: bool) -> bool:
        return len(self._open) > 1

    monkeypatch.setattr(Hold, "leave", leave)


def _ttl_of_the_last_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Any) -> None:
        self.grant.change_ttl(self._open[-1].own_ttl, self._open[-1].own_keep_alive)

    monkeypatch.setattr(Hold, "apply", apply)


def _tasks_are_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_thread(local: Any) -> owners.Owner:
        if not hasattr(local, "owner"):
            local.owner = owners.Owner()
        owner: owners.Owner = local.owner
        return owner

    monkeypatch.setattr(owners, "_owner_of", lambda task, local: of_the_thread(local))


BUGS = (
    PeerBug(
        ("redisson#7251",),
        "Each acquire adds a renewal and only one release takes it back, so the lock is renewed for ever.",
        test_many_acquires_leave_no_renewal_and_no_row,
        arguments={"times": 5},
        patch=_release_that_does_not_count,
    ),
    PeerBug(
        ("redisson#1110", "redisson#891"),
        "An inner acquire with a shorter ttl shortens the lease of the outer one.",
        test_inner_ttl_never_shortens_the_outer_lease,
        patch=_ttl_of_the_last_acquire,
    ),
    PeerBug(
        ("aredis#119", "aioredis#1040", "aioredis#1076", "dogpile#171"),
        "The token is kept per thread, so all tasks of one event loop pass for the holder.",
        test_tasks_of_one_loop_never_share,
        arguments={"tasks": 3},
        patch=_tasks_are_their_thread,
    ),
)

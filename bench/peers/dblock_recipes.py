"""dblock's other locks and recipes, each with the three verbs of a peer."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Any

import dblock
from bench.harness.contender import PATIENCE, TTL, Release
from bench.peers.dblock_locks import patient


class _Recipe:
    def __init__(self, where: str, **options: Any) -> None:
        self.client = dblock.Client(patient(where), **{"patience": PATIENCE, **options})

    def close(self) -> None:
        self.client.close()


class ReadLock(_Recipe):
    """The readers' side of a read-write lock."""

    def acquire(self, name: str) -> Release:
        return self.client.read_lock(f"shared {name}", ttl=TTL).acquire().release


class WriteLock(_Recipe):
    """The writers' side of a read-write lock."""

    def acquire(self, name: str) -> Release:
        return self.client.write_lock(f"shared {name}", ttl=TTL).acquire().release


class Semaphore(_Recipe):
    """A semaphore of four permits."""

    def acquire(self, name: str) -> Release:
        return self.client.semaphore(f"semaphore {name}", permits=4, ttl=TTL).acquire().release


class LockAll(_Recipe):
    """Three locks in one request."""

    def acquire(self, name: str) -> Release:
        return self.client.lock_all([f"{name} {part}" for part in "abc"], ttl=TTL).acquire().release


class Election(_Recipe):
    """A term: campaign, lead, and resign."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(where, **options)
        self._elections: dict[str, Any] = {}

    def acquire(self, name: str) -> Release:
        election = self._elections.setdefault(name, self.client.election(name, ttl=TTL))
        leading = contextlib.ExitStack()
        leading.enter_context(election.lead())
        return leading.close


class OnceDue(_Recipe):
    """A schedule whose slot is due: its first call registers it, claims the slot, runs and records the outcome."""

    _numbers = itertools.count()

    def acquire(self, name: str) -> Release:
        own = f"{name} {os.getpid()} {time.monotonic_ns()} {next(self._numbers)}"
        assert self.client.once(own, delay=3600)(lambda: True)() is True
        return lambda: None


class OnceSkipped(_Recipe):
    """A schedule whose slot was taken: each call is told that there is nothing to do."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(where, **options)
        self._schedules: dict[str, Any] = {}

    def acquire(self, name: str) -> Release:
        if name not in self._schedules:
            self._schedules[name] = self.client.once(f"skipped {name}", delay=3600)(lambda: True)
        self._schedules[name]()
        return lambda: None

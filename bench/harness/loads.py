"""What the clients of a block do: pairs on locks of their own, or turns at one lock.

Each load exists for threads and processes, and with the prefix `async_` for tasks.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.contender import AsyncPeer, Contender, Peer

WARM_UP = 3

_clock = time.monotonic


@dataclass
class Pairs:
    """The duration of each acquire with its release."""

    times: list[float]


@dataclass
class Turns:
    """The turns of one client at a lock that others want too."""

    grants: int = 0
    """Grants within the block."""
    hand_offs: list[float] = field(default_factory=list)
    """For each grant after another client's: the time from the beginning of that release to this grant."""
    waits: list[float] = field(default_factory=list)
    """For each grant, the time from its request."""


class Ledger:
    """Shared memory of the last holder that released, of the moment at which it began to, and of the last grant.

    Only the holder of the lock writes, so it needs no lock of its own.
    """

    LAYOUT = struct.Struct("qdq")

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(file, self.LAYOUT.size)
        os.close(file)

    @staticmethod
    def create(path: Path) -> str:
        path.write_bytes(Ledger.LAYOUT.pack(-1, 0.0, -1))
        return str(path)

    def release(self, holder: int, now: float) -> None:
        """Record that this holder begins to release the lock."""
        self._memory[:] = self.LAYOUT.pack(holder, now, holder)

    def grant(self, holder: int) -> tuple[int, float]:
        """Record a grant. Return the holder before, or -1, and when it began to release the lock."""
        before, released, _ = self.LAYOUT.unpack(self._memory[:])
        self._memory[:] = self.LAYOUT.pack(before, released, holder)
        return before, released

    def granted(self) -> int:
        """Return the client of the last grant, or -1."""
        return int(self.LAYOUT.unpack(self._memory[:])[2])


def pairs(peer: Peer, index: int, start: float, *, seconds: float, prefix: str = "own") -> Pairs:
    """Acquire and release a lock of one's own until the time is up."""
    name, times = f"{prefix} {index}", []
    for _ in range(WARM_UP):
        peer.acquire(name)()
    time.sleep(max(start - _clock(), 0))
    now = _clock()
    ends = max(start, now) + seconds
    while now < ends:
        peer.acquire(name)()
        done = _clock()
        times.append(done - now)
        now = done
    return Pairs(times)


async def async_pairs(peer: AsyncPeer, index: int, start: float, *, seconds: float, prefix: str = "own") -> Pairs:
    """Acquire and release a lock of one's own until the time is up."""
    name, times = f"{prefix} {index}", []
    for _ in range(WARM_UP):
        await (await peer.acquire(name))()
    await asyncio.sleep(max(start - _clock(), 0))
    now = _clock()
    ends = max(start, now) + seconds
    while now < ends:
        await (await peer.acquire(name))()
        done = _clock()
        times.append(done - now)
        now = done
    return Pairs(times)


def turns(
    peer: Peer, index: int, start: float, *, seconds: float, ledger: str, hold: float = 0.0, pause: float = 0.0,
    name: str = "hot", alternate: bool = False,
) -> Turns:  # fmt: skip
    """Acquire one lock that all want, hold it, release it and pause, until the time is up.

    With `alternate` a client asks again only when another has got the lock. `pause` is the mean of the pauses: equal
    pauses would keep in step with a client or a server that polls.
    """
    done, shared = Turns(), Ledger(ledger)
    time.sleep(max(start - _clock(), 0))
    ends = start + seconds
    while (asked := _clock()) < ends:
        release = peer.acquire(name)
        now = _clock()
        _count(done, shared, index, asked, now, start, ends)
        if hold:
            time.sleep(hold)
        shared.release(index, _clock())
        release()
        while alternate and shared.granted() == index and _clock() < ends:
            time.sleep(0.001)
        if pause:
            time.sleep(random.uniform(0, 2 * pause))
    return done


async def async_turns(
    peer: AsyncPeer, index: int, start: float, *, seconds: float, ledger: str, hold: float = 0.0, pause: float = 0.0,
    name: str = "hot", alternate: bool = False,
) -> Turns:  # fmt: skip
    """Acquire one lock that all want, hold it, release it and pause, until the time is up.

    With `alternate` a client asks again only when another has got the lock. `pause` is the mean of the pauses: equal
    pauses would keep in step with a client or a server that polls.
    """
    done, shared = Turns(), Ledger(ledger)
    await asyncio.sleep(max(start - _clock(), 0))
    ends = start + seconds
    while (asked := _clock()) < ends:
        release = await peer.acquire(name)
        now = _clock()
        _count(done, shared, index, asked, now, start, ends)
        if hold:
            await asyncio.sleep(hold)
        shared.release(index, _clock())
        await release()
        while alternate and shared.granted() == index and _clock() < ends:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(0.001)
        await asyncio.sleep(random.uniform(0, 2 * pause))
    return done


def _count(done: Turns, shared: Ledger, index: int, asked: float, now: float, start: float, ends: float) -> None:
    """Record a grant, unless it came after the end."""
    holder, released = shared.grant(index)
    if now < ends:
        done.grants += 1
        done.waits.append(now - asked)
        if holder not in (-1, index) and released >= start:
            done.hand_offs.append(now - released)


_held: dict[int, Any] = {}
_waiting: list[Any] = []


def hold(peer: Peer, index: int, start: float, *, name: str = "held", each: bool = False) -> float:
    """Acquire a lock and keep it until `let_go`. Return the moment of the grant."""
    _held[index] = peer.acquire(f"{name} {index}" if each else name)
    return _clock()


def let_go(peer: Peer, index: int, start: float) -> float:
    """Release the lock that this client holds. Return the moment at which the release began."""
    began = _clock()
    _held.pop(index)()
    return began


def get(peer: Peer, index: int, start: float, *, name: str = "held") -> float:
    """Acquire a lock and release it at once. Return the moment of the grant."""
    release = peer.acquire(name)
    now = _clock()
    release()
    return now


def hold_many(peer: Peer, index: int, start: float, *, name: str, number: int) -> None:
    """Acquire many locks and keep them."""
    _held[index] = [peer.acquire(f"{name} {one}") for one in range(number)]


def cycles(peer: Peer, index: int, start: float, *, number: int, name: str) -> list[float]:
    """Acquire and release one lock this often, and return how long each pair took."""
    times, now = [], _clock()
    for _ in range(number):
        peer.acquire(name)()
        done = _clock()
        times.append(done - now)
        now = done
    return times


def pairs_among(peer: Peer, index: int, start: float, *, seconds: float, names: int) -> Pairs:
    """Acquire and release locks chosen at random among many names, until the time is up."""
    rng, times = random.Random(start), []
    for _ in range(WARM_UP):
        peer.acquire("name 1")()
    now = _clock()
    ends = now + seconds
    while now < ends:
        peer.acquire(f"name {rng.randrange(names)}")()
        done = _clock()
        times.append(done - now)
        now = done
    return Pairs(times)


def begin_to_wait(peer: Peer, index: int, start: float, *, name: str = "held") -> None:
    """Wait for a lock in a thread of its own, for as long as this process lives."""
    waiter = threading.Thread(target=get, args=(peer, index, start), kwargs={"name": name}, daemon=True)
    waiter.start()
    _waiting.append(waiter)


async def async_hold(peer: AsyncPeer, index: int, start: float, *, name: str = "held", each: bool = False) -> float:
    """Acquire a lock and keep it until `async_let_go`. Return the moment of the grant."""
    _held[index] = await peer.acquire(f"{name} {index}" if each else name)
    return _clock()


async def async_let_go(peer: AsyncPeer, index: int, start: float) -> float:
    """Release the lock that this client holds. Return the moment at which the release began."""
    began = _clock()
    await _held.pop(index)()
    return began


async def async_get(peer: AsyncPeer, index: int, start: float, *, name: str = "held") -> float:
    """Acquire a lock and release it at once. Return the moment of the grant."""
    release = await peer.acquire(name)
    now = _clock()
    await release()
    return now


async def async_begin_to_wait(peer: AsyncPeer, index: int, start: float, *, name: str = "held") -> None:
    """Wait for a lock in a task of its own, for as long as this process lives."""
    _waiting.append(asyncio.create_task(async_get(peer, index, start, name=name)))


def of(contender: Contender, kind: str, load: str) -> Any:
    """Return a load in the form that the clients of this contender need."""
    return globals()[f"async_{load}" if kind == "task" or contender.is_async else load]

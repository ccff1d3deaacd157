"""What real clients see on this database: grants, order, hand-overs, deaths, losses and fences, each with figures.

Each trial returns its figures, or raises Failed with what it saw instead. Each uses its own locks in the schema of the
run.
"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._runtime.target import Target
from dblock.cli.certify.stage import Cuttable, drop
from dblock.client import Client
from dblock.errors import LockTimeout

if TYPE_CHECKING:
    from dblock.lease import Lease

PAIRS = 20
CONTENDERS, ROUNDS = 4, 8
HAND_OVERS = 5
SHORT_TTL = 2.0
"""Seconds that a lease lasts whose holder is to die."""

PATIENCE = 6.0
"""Seconds after which a grant that should come has not come."""

Figures = dict[str, float | int | str | bool]


class Failed(Exception):
    """A trial saw something else than it should."""


@dataclass(frozen=True)
class Trial:
    """One trial."""

    run: Callable[[Target, str], Figures]

    @property
    def id(self) -> str:
        """The name of the trial."""
        return self.run.__name__.replace("_", "-")

    @property
    def what(self) -> str:
        """What is true where it succeeds."""
        return (self.run.__doc__ or "").strip()


def grant(target: Target, schema: str) -> Figures:
    """A lock is granted and released, each time with a higher token."""
    times, tokens = [], []
    with _client(target, schema) as client:
        lock = client.lock("grant", timeout=PATIENCE)
        for _ in range(PAIRS):
            started = time.perf_counter()
            lease = lock.acquire()
            tokens.append(lease.token)
            lease.release()
            times.append(time.perf_counter() - started)
    _check_order(tokens)
    return {"pairs": PAIRS, "median_ms": _ms(statistics.median(times)), "max_ms": _ms(max(times))}


def contention(target: Target, schema: str) -> Figures:
    """Clients that contend for a lock hold it one at a time, and tokens rise in the order of their grants."""
    tokens: list[int] = []
    inside = threading.Semaphore(1)
    started = time.perf_counter()
    until = time.monotonic() + PATIENCE
    stopped = threading.Event()

    def contend() -> None:
        with _client(target, schema) as client:
            lock = client.lock("order", timeout=PATIENCE)
            for _ in range(ROUNDS):
                if time.monotonic() > until or stopped.is_set():
                    return
                with lock as lease:
                    if not inside.acquire(blocking=False):
                        raise Failed("two clients held the lock at the same time")
                    tokens.append(lease.token)
                    inside.release()

    with ThreadPoolExecutor(CONTENDERS) as threads:
        try:
            for done in [threads.submit(contend) for _ in range(CONTENDERS)]:
                done.result()
        finally:
            stopped.set()
    _check_order(tokens)
    seconds = time.perf_counter() - started
    return {"clients": CONTENDERS, "grants": len(tokens), "per_second": round(len(tokens) / seconds, 1)}


def hand_over(target: Target, schema: str) -> Figures:
    """A waiter gets the lock when its holder releases it."""
    times = []
    with _client(target, schema) as holder, _client(target, schema) as waiter:
        for number in range(HAND_OVERS):
            lease = holder.lock("hand-over", timeout=PATIENCE).acquire()
            with _Waiter(waiter, "hand-over") as waiting:
                if number == 0:
                    time.sleep(0.3)  # the waiter learns whether notifications come through
                released = time.perf_counter()
                lease.release()
                times.append(waiting.granted_at() - released)
        woken = waiter._runtime.listener.waiters.notifications_work
    how = "notifications" if woken else "polling"
    return {"by": how, "median_ms": _ms(statistics.median(times)), "max_ms": _ms(max(times))}


def late_release(target: Target, schema: str) -> Figures:
    """A late release or renewal changes nothing for the next holder."""
    name = quoted(schema)
    with target.connect() as connection, _client(target, schema) as client:

        def value(sql: str, *arguments: Any) -> Any:
            row = connection.execute(sql.encode(), arguments).fetchone()
            return row[0] if row else None

        late = value(f"SELECT token FROM {name}.try_acquire('late', ttl => '100 ms')")
        started = time.perf_counter()
        lease = client.lock("late", timeout=PATIENCE).acquire()
        if value(f"SELECT {name}.release('late', %s)", late):
            raise Failed("a late release freed the lock of the next holder")
        lease.renew()
        if lease.token <= late:
            raise Failed(f"token {lease.token} was granted after {late}")
        lease.release()
    return {"expired_after_ms": _ms(time.perf_counter() - started)}


def cut_session(target: Target, schema: str) -> Figures:
    """A lease without presence outlasts the end of every session of its client."""
    cuttable = Cuttable(target)
    with _client(cuttable, schema, presence=None) as client:
        lease = client.lock("cut", timeout=PATIENCE).acquire()
        _wait_for_listener(client)
        cut = time.perf_counter()
        cuttable.cut(for_good=False)
        lease.renew()
        recovered = time.perf_counter() - cut
        lease.release()
    return {"recovered_after_ms": _ms(recovered)}


def cut_off(target: Target, schema: str) -> Figures:
    """A holder that is cut off learns of the loss of its lease before another client gets the lock."""
    cuttable = Cuttable(target)
    with _client(target, schema) as next_client, _client(cuttable, schema) as client:
        lease = client.lock("loss", ttl=SHORT_TTL, timeout=PATIENCE).acquire()
        _wait_for_listener(client)
        with _Waiter(next_client, "loss", earlier=lease) as waiting:
            cut = time.perf_counter()
            cuttable.cut(for_good=True)
            granted_at = waiting.granted_at()
            if waiting.earlier_was_trusted:
                raise Failed("another client had the lock while its holder still trusted its lease")
    return {"next_holder_after_ms": _ms(granted_at - cut)}


def takeover(target: Target, schema: str) -> Figures:
    """When the session of a holder's process ends, the next waiter gets the lock long before the lease expires."""
    since_grant, since_death = _dead_holder(target, schema, "takeover", presence=True)
    if since_grant >= SHORT_TTL:
        raise Failed(f"the next waiter got the lock after {since_grant:.1f} s, when the lease had expired")
    return {"next_holder_after_ms": _ms(since_death), "ttl_ms": _ms(SHORT_TTL)}


def expiry(target: Target, schema: str) -> Figures:
    """The lock of a dead holder without presence is granted to the next waiter when its lease expires."""
    since_grant, _ = _dead_holder(target, schema, "expiry", presence=False)
    if since_grant < SHORT_TTL:
        raise Failed(f"the next waiter got the lock after {since_grant:.1f} s, before the lease had expired")
    return {"next_holder_after_ms": _ms(since_grant), "ttl_ms": _ms(SHORT_TTL)}


def stale_write(target: Target, schema: str) -> Figures:
    """A fence refuses the write of an earlier holder after one of a later holder."""
    import fenced_store

    fences, dsn = f"{schema}_fences", target.conninfo()
    try:
        fenced_store.install(dsn, fences)
        with _client(target, schema) as client:
            first = _token(client)
            second = _token(client)
        with fenced_store.FencedStore(dsn, schema=fences) as store:
            started = time.perf_counter()
            store.put("resource", {"by": "the later holder"}, fence=second)
            seconds = time.perf_counter() - started
            try:
                store.put("resource", {"by": "the earlier holder"}, fence=first)
            except fenced_store.StaleTokenError:
                return {"write_ms": _ms(seconds)}
            raise Failed(f"a write with token {first} was accepted after one with token {second}")
    finally:
        drop(target, fences)


def _client(target: Target, schema: str, **options: Any) -> Client:
    where: Any = target  # a Client resolves a target to itself
    return Client(where, schema=schema, **options)


def _token(client: Client) -> int:
    with client.lock("fence", timeout=PATIENCE) as lease:
        return lease.token


def _dead_holder(target: Target, schema: str, name: str, presence: bool) -> tuple[float, float]:
    """Let a holder die, and return the seconds until the next waiter has the lock, since its grant and its death."""
    function, session = f"{quoted(schema)}.", target.connect()
    try:
        mark = uuid.uuid4() if presence else None
        if presence:
            session.execute(f"SELECT {function}register_presence(%s, '150 ms')".encode(), [mark])
        granted = time.perf_counter()
        session.execute(
            f"SELECT {function}try_acquire(%s, ttl => make_interval(secs => %s), presence => %s)".encode(),
            [name, SHORT_TTL, mark],
        )
        with _client(target, schema) as client, _Waiter(client, name) as waiting:
            died = time.perf_counter()
            session.close()
            granted_at = waiting.granted_at()
            return granted_at - granted, granted_at - died
    finally:
        session.close()


class _Waiter:
    """Waits for a lock in a thread of its own."""

    def __init__(self, client: Client, name: str, *, earlier: Lease | None = None) -> None:
        self._client, self._name, self._earlier = client, name, earlier
        self.earlier_was_trusted = False
        """Whether the earlier lease said that it was held when the lock was granted to the waiter."""

        self._lock = client.lock(name, timeout=PATIENCE)
        self._threads = ThreadPoolExecutor(1)
        self._lease: Lease | None = None

    def _acquire(self) -> float:
        self._lease = self._lock.acquire()
        granted_at = time.perf_counter()
        # The lease itself is asked. A callback at its loss would also measure how late this machine runs a thread.
        self.earlier_was_trusted = self._earlier is not None and not self._earlier.lost.is_set()
        return granted_at

    def granted_at(self) -> float:
        """Return when the lock was granted, and release it."""
        try:
            granted_at = self._done.result()
        except LockTimeout:
            raise Failed(f"a waiter did not get the lock within {PATIENCE:g} s") from None
        assert self._lease is not None
        self._lease.release()
        return granted_at

    def __enter__(self) -> _Waiter:
        self._done = self._threads.submit(self._acquire)
        deadline = time.monotonic() + PATIENCE
        while not self._lock.queue() and not self._done.done():
            if time.monotonic() > deadline:
                raise Failed(f"a waiter was not in the queue after {PATIENCE:g} s")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._client.close()  # so that the waiter does not wait any longer
        self._threads.shutdown()


def _wait_for_listener(client: Client) -> None:
    """Return once the client listens, and its lease is tied to its presence if there is one."""
    deadline = time.monotonic() + PATIENCE
    while client._runtime.listener.flow.connection is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)


def _check_order(tokens: list[int]) -> None:
    for number, later in enumerate(tokens[1:]):
        if later <= tokens[number]:
            raise Failed(f"token {later} was granted after {tokens[number]}")


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


GRANT, TAKEOVER = Trial(grant), Trial(takeover)

TRIALS = (
    GRANT,
    Trial(contention),
    Trial(hand_over),
    Trial(late_release),
    Trial(cut_session),
    Trial(cut_off),
    TAKEOVER,
    Trial(expiry),
    Trial(stale_write),
)
"""In the order in which they run. Without the first, the others are pointless."""

"""Every behaviour of the server that dblock relies on, and how two sessions try it.

Each function returns what it saw instead of the behaviour, or None if the behaviour holds. Its docstring is the
behaviour, as a sentence that is true where it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dblock._core.options import quoted
from dblock.admin.probe.session_pair import SessionPair, Unknown

INSTALL, PRESENCE, WAKE_UPS = "install", "presence", "wake-ups"

ARRIVES_WITHIN = 2.0
"""Seconds after which a notification has not arrived, or the lock of a closed session has not become free."""

POOLED = "the connection goes through a pooler, which keeps no session between two transactions"

NO_EXCLUSION = "Two clients could hold the same lock."
TAKEN_FOR_DEAD = "A live client could be taken for dead, and two clients could hold the same lock."
LATE_TOKENS = "A later grant could get a lower token, and fences would refuse the rightful holder."


@dataclass(frozen=True)
class Behaviour:
    """One behaviour."""

    find: Callable[[SessionPair], str | None]
    needed_by: str
    """What depends on it: the whole `install`, or only `presence` or `wake-ups`."""
    without: str
    """What follows where it does not hold."""
    writes: bool = False
    """Whether its trial writes: to the tables of the probe, or a notification."""

    @property
    def id(self) -> str:
        """The name of the behaviour."""
        return self.find.__name__.replace("_", "-")

    @property
    def what(self) -> str:
        """The behaviour as a sentence."""
        return (self.find.__doc__ or "").strip()


def advisory_lock(pair: SessionPair) -> str | None:
    """A session cannot take an advisory lock that another session holds."""
    one, other, key = pair.one, pair.other, pair.key
    if one.value("SELECT pg_try_advisory_lock($1)", key) is not True:
        return "a session could not take a free advisory lock"
    try:
        if other.value("SELECT pg_try_advisory_lock($1)", key):
            other.value("SELECT pg_advisory_unlock($1)", key)
            return "two sessions held the same advisory lock"
    finally:
        one.value("SELECT pg_advisory_unlock($1)", key)
    if not other.value("SELECT pg_try_advisory_lock($1)", key):
        return "a session could not take an advisory lock that another session had released"
    other.value("SELECT pg_advisory_unlock($1)", key)
    return None


def advisory_transaction(pair: SessionPair) -> str | None:
    """An advisory lock of a transaction excludes other sessions, and ends with the transaction."""
    one, other, key = pair.one, pair.other, pair.key
    one.value("SELECT pg_advisory_xact_lock($1)", key)
    if other.value("SELECT pg_try_advisory_xact_lock($1)", key):
        return "two transactions held the same advisory lock"
    one.rollback()
    if not other.value("SELECT pg_try_advisory_xact_lock($1)", key):
        return "an advisory lock outlasted its transaction"
    return None


def advisory_shared(pair: SessionPair) -> str | None:
    """Sessions can share an advisory lock, and none can hold it alone while another session shares it."""
    one, other, key = pair.one, pair.other, pair.key
    for session in (one, other):
        if not session.value("SELECT pg_try_advisory_xact_lock_shared($1)", key):
            return "two sessions could not share an advisory lock"
    if other.value("SELECT pg_try_advisory_xact_lock($1)", key):
        return "a session held an advisory lock alone while another session shared it"
    one.rollback()
    other.rollback()
    one.value("SELECT pg_advisory_xact_lock($1)", key)
    if other.value("SELECT pg_try_advisory_xact_lock_shared($1)", key):
        return "a session shared an advisory lock that another session held alone"
    return None


def row_lock(pair: SessionPair) -> str | None:
    """A locked row stops other sessions: SKIP LOCKED leaves it out, and lock_timeout ends the wait for it."""
    one, other = pair.one, pair.other
    select = f"SELECT id FROM {pair.table('rows')} WHERE id = 1 FOR UPDATE"
    one.value(select)
    if other.value(f"{select} SKIP LOCKED") is not None:
        return "SKIP LOCKED returned a row that another session had locked"
    other.value("SET LOCAL lock_timeout TO 10")
    refusal = other.refusal(select)
    if refusal != "55P03":
        reply = f"SQLSTATE {refusal}" if refusal else "the row"
        return f"a session that waited for a locked row got {reply} instead of lock_not_available (55P03)"
    return None


def table_lock(pair: SessionPair) -> str | None:
    """A lock on a table stops other sessions that want a conflicting one, and ends with its transaction."""
    lock = f"LOCK TABLE {pair.table('rows')} IN SHARE UPDATE EXCLUSIVE MODE"
    pair.one.value(lock)
    refusal = pair.other.refusal(f"{lock} NOWAIT")
    if refusal != "55P03":
        reply = f"SQLSTATE {refusal}" if refusal else "it too"
        return f"a session that wanted the lock on a table of another session got {reply}"
    pair.one.rollback()
    return "a lock on a table outlasted its transaction" if pair.other.refusal(f"{lock} NOWAIT") else None


def read_committed(pair: SessionPair) -> str | None:
    """A statement sees what other sessions committed before it, inside an open READ COMMITTED transaction too."""
    one, other, rows = pair.one, pair.other, pair.table("rows")
    before = one.value(f"SELECT number FROM {rows} WHERE id = 1")
    other.value("SET LOCAL synchronous_commit TO off")
    other.value(f"UPDATE {rows} SET number = number + 1 WHERE id = 1")
    if one.value(f"SELECT number FROM {rows} WHERE id = 1") != before:
        return "a statement saw what another session had not committed"
    other.commit()
    if one.value(f"SELECT number FROM {rows} WHERE id = 1") != before + 1:
        return "a statement did not see what another session had committed before"
    return None


def sequence(pair: SessionPair) -> str | None:
    """A sequence rises with every call, in every session, and repeats no number after a rollback."""
    one, other = pair.one, pair.other
    numbers = []
    for session in (one, other, one, other):
        numbers.append(session.value(f"SELECT nextval('{pair.table('sequence')}')"))
        if len(numbers) == 3:
            one.rollback()
    numbers.append(one.value(f"SELECT nextval('{pair.table('sequence')}')"))
    if numbers != sorted(set(numbers)):
        return f"a sequence returned {', '.join(map(str, numbers))}, in this order"
    return None


def clock(pair: SessionPair) -> str | None:
    """clock_timestamp() moves inside a transaction, and all sessions read the same clock."""
    first = pair.one.value("SELECT clock_timestamp()")
    between = pair.other.value("SELECT clock_timestamp()")
    last = pair.one.value("SELECT clock_timestamp() FROM pg_sleep(0.002)")
    if last <= first:
        return "clock_timestamp() stood still inside a transaction"
    if not first <= between <= last:
        return "two sessions read different clocks"
    return None


def server_start(pair: SessionPair) -> str | None:
    """pg_postmaster_start_time() is the same in all sessions, and in the past."""
    first, second = (
        session.value("SELECT pg_postmaster_start_time() FROM pg_sleep(0.001)") for session in (pair.one, pair.other)
    )
    if first != second:
        return "two sessions read different starts of the server"
    ahead = pair.one.value("SELECT pg_postmaster_start_time() > clock_timestamp() + interval '1 hour'")
    return "the start of the server is in the future" if ahead else None


def synchronous_commit(pair: SessionPair) -> str | None:
    """A transaction can choose whether its commit waits for the disk."""
    one = pair.one
    before = one.value("SELECT current_setting('synchronous_commit')")
    for value in ("off", "on"):
        one.value("SELECT set_config('synchronous_commit', $1, true)", value)
        found = one.value("SELECT current_setting('synchronous_commit')")
        if found != value:
            return f"synchronous_commit was {found} after it had been set to {value}"
    one.rollback()
    after = one.value("SELECT current_setting('synchronous_commit')")
    return None if after == before else "synchronous_commit kept the value of a transaction that had ended"


def definer_function(pair: SessionPair) -> str | None:
    """A PL/pgSQL function with SECURITY DEFINER and its own search_path finds its tables by that path."""
    function, schema = pair.table("function"), quoted(pair.schema or "")
    body = f"BEGIN RETURN (SELECT number FROM {pair.table('rows').rpartition('.')[2]} WHERE id = 1); END"
    pair.one.value(
        f"CREATE FUNCTION {function}() RETURNS integer LANGUAGE plpgsql SECURITY DEFINER"
        f" SET search_path TO {schema}, pg_temp AS $probe${body}$probe$"
    )
    if pair.one.value(f"SELECT {function}()") is None:
        return "a function did not find its table by its own search_path"
    if schema in pair.one.value("SELECT current_setting('search_path')"):
        return "a function's search_path outlasted its call"
    return None


def unlogged_table(pair: SessionPair) -> str | None:
    """An unlogged table can be created, and is one."""
    pair.one.value(f"CREATE UNLOGGED TABLE {pair.table('unlogged')} (id integer)")
    kind = pair.one.value("SELECT relpersistence::text FROM pg_class WHERE oid = $1::regclass", pair.table("unlogged"))
    return None if kind == "u" else f"an UNLOGGED table is of kind {kind!r}"


def session_end(pair: SessionPair) -> str | None:
    """An advisory lock ends with its session."""
    if pair.pooled:
        raise Unknown(POOLED)
    ending, other = pair.open(), pair.other
    try:
        if not ending.value("SELECT pg_try_advisory_lock($1)", pair.key):
            return "a session could not take a free advisory lock"
        ending.rollback()
        if other.value("SELECT pg_try_advisory_xact_lock_shared($1)", pair.key):
            return "the advisory lock of a session ended before the session"
    finally:
        ending.close()
    deadline = time.monotonic() + ARRIVES_WITHIN
    while not other.value("SELECT pg_try_advisory_xact_lock_shared($1)", pair.key):
        if time.monotonic() > deadline:
            return f"an advisory lock was still held {ARRIVES_WITHIN:g} s after its session had been closed"
        time.sleep(0.002)
    return None


def direct_connection(pair: SessionPair) -> str | None:
    """Both ends of a connection are the same for the client and for the server."""
    if pair.pooled:
        return "statements run in another session than the one that the connection was opened to: a pooler"
    seen, ours = pair.ends()
    if [_plain(one) for one in seen if one] == [_plain(one) for one in ours]:
        return None
    return (
        f"this machine is connected from {_pair(ours[:2])} to {_pair(ours[2:])}, but the server sees "
        f"{_pair(seen[:2])} and {_pair(seen[2:])}: a proxy, a NAT or a published port of a container"
    )


def notify_call(pair: SessionPair) -> str | None:
    """A session can send a notification, and can ask how full their queue is."""
    pair.one.value("SELECT pg_notify($1, 'probe'), pg_notification_queue_usage()", f"dblock_probe_{pair.key}")
    return None


def notification(pair: SessionPair) -> str | None:
    """A notification reaches another session."""
    if pair.pooled:
        raise Unknown(POOLED)  # the session that would listen is another client's a moment later
    channel = f"dblock_probe_{pair.key}"
    listening = pair.one.link.connection
    pair.one.outside(f'LISTEN "{channel}"')
    try:
        pair.other.value("SELECT pg_notify($1, 'probe')", channel)
        pair.other.commit()
        arrived = any(True for _ in listening.notifies(timeout=ARRIVES_WITHIN, stop_after=1))
    finally:
        pair.one.outside(f'UNLISTEN "{channel}"')
    return None if arrived else f"a notification had not arrived after {ARRIVES_WITHIN:g} s"


def _plain(address: str | None) -> str:
    return (address or "").removeprefix("::ffff:").partition("%")[0]


def _pair(end: list[str] | list[str | None]) -> str:
    return ":".join(one or "" for one in end) if any(end) else "a Unix socket"


BEHAVIOURS = (
    Behaviour(advisory_lock, INSTALL, TAKEN_FOR_DEAD),
    Behaviour(advisory_transaction, INSTALL, TAKEN_FOR_DEAD),
    Behaviour(advisory_shared, INSTALL, TAKEN_FOR_DEAD),
    Behaviour(row_lock, INSTALL, NO_EXCLUSION, writes=True),
    Behaviour(table_lock, INSTALL, "Tokens could go back, and a fence could miss a write.", writes=True),
    Behaviour(read_committed, INSTALL, NO_EXCLUSION, writes=True),
    Behaviour(sequence, INSTALL, LATE_TOKENS, writes=True),
    Behaviour(clock, INSTALL, "Leases would not expire when they should, and two clients could hold the same lock."),
    Behaviour(
        server_start,
        INSTALL,
        "After a failover the tokens could go back. Grants would be slow, because each would look for a failover.",
    ),
    Behaviour(synchronous_commit, INSTALL, "A crash could forget grants that were acknowledged."),
    Behaviour(definer_function, INSTALL, "dblock's functions would not work, or could be misled.", writes=True),
    Behaviour(unlogged_table, INSTALL, "After a crash a live client could be taken for dead.", writes=True),
    Behaviour(notify_call, INSTALL, "A release that wakes a waiter would fail.", writes=True),
    Behaviour(session_end, PRESENCE, "The lock of a holder that dies stays held until its lease expires."),
    Behaviour(
        direct_connection,
        PRESENCE,
        "Presence is off: the lock of a holder that dies stays held until its lease expires. Give clients a "
        "listen_dsn that leads straight to the server.",
    ),
    Behaviour(
        notification,
        WAKE_UPS,
        "Wake-ups are off: waiters poll several times a second instead of being woken.",
        writes=True,
    ),
)
"""In the order in which they are tried: those that matter most come first."""

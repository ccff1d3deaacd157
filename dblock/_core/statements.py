"""Every SQL statement that a client sends.

Each statement calls one function of the schema and returns one row, as text. Times come as seconds since 1970, so that
DateStyle, TimeZone and IntervalStyle have no influence. The arguments of each statement are described where it is sent.
"""

from __future__ import annotations

from dblock._core.effects import Call
from dblock._core.options import literal, quoted
from dblock._core.presence import DROPPED_AFTER

PROBE = "probe"
"""The payload of a notification that a client sends to itself, to learn whether notifications come through."""

WHICH_BACKEND = Call(b"SELECT pg_backend_pid(), current_setting('default_transaction_isolation')", ())
"""Asks which backend serves the connection, and for the isolation of its statements.

Behind a pooler it is not the backend that the connection was opened to.
"""

SET_READ_COMMITTED = Call(b"SET default_transaction_isolation TO 'read committed'", ())
BEGIN_READ_COMMITTED = b"BEGIN ISOLATION LEVEL READ COMMITTED"
READ_COMMITTED = ("read committed", "read uncommitted")
"""The settings under which each statement sees the latest commits. In Postgres they mean the same."""

_ENDPOINTS = (
    "pg_backend_pid(), host(inet_client_addr()), inet_client_port(), host(inet_server_addr()), inet_server_port()"
)

WHICH_ENDPOINTS = Call(f"SELECT {_ENDPOINTS}".encode(), ())
"""Asks which backend serves the connection, and which addresses and ports the server sees at the client's end and at
its own."""

ARE_YOU_THERE = Call(b"SELECT 1", ())
"""Asks for a reply, whatever it is."""

STOP_LISTENING = Call(b"UNLISTEN *", ())

NOTIFY_SELF = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, '{PROBE}')".encode()
"""Sends the probe to a channel, $1. Its commit does not wait for the disk."""

_KEEP_SESSION = {
    "idle_session_timeout": 0,
    "tcp_keepalives_idle": DROPPED_AFTER // 2,
    "tcp_keepalives_interval": DROPPED_AFTER // 6,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": DROPPED_AFTER * 1000,
}

KEEP_SESSION = Call(
    (
        "SELECT " + ", ".join(f"set_config({literal(name)}, '{value}', false)" for name, value in _KEEP_SESSION.items())
    ).encode(),
    (),
)
"""Makes the server keep the session for longer than the client believes in it without a heartbeat."""


def listen(channel: str) -> Call:
    """Return the call that subscribes a connection to a channel."""
    return Call(f"LISTEN {quoted(channel)}".encode(), ())


DEFAULT_FENCES = "fenced_store"
"""The schema of fenced_store, unless the client names another."""

FENCED_STORES = Call(
    (
        b"SELECT string_agg(quote_ident(n.nspname), ', ' ORDER BY n.nspname = 'fenced_store' DESC, n.nspname)"
        b" FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace"
        b" WHERE p.proname = 'claim' AND pg_catalog.oidvectortypes(p.proargtypes) ="
        b" 'text[], bigint, text, double precision' AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')"
        b" HAVING count(*) > 1"
    ),
    (),
)
"""Returns the schemas with fenced_store that this role may use, if there are several. Else there is no row."""


class Statements:
    """The statements for one schema."""

    def __init__(self, schema: str, fences: str = DEFAULT_FENCES) -> None:
        """`fences` is the schema of fenced_store, in which a grant claims resources."""
        prefix = quoted(schema)
        # The function is called as a column, because Postgres would first store the rows of a function in FROM.
        # OFFSET 0 makes sure that the function is called once.
        self.try_acquire = (
            "SELECT (r).granted, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).waiting FROM"
            f" (SELECT {prefix}.try_acquire($1, $2, $3, $4, $5, $6, presence => $7, fair => $8, ticket => $9) AS r"
            " OFFSET 0) AS a"
        ).encode()
        self.try_acquire_again = self.try_acquire.replace(b"$6,", b"$6, retry => true,")
        self.acquire = (
            "SELECT (r).granted, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).ticket, (r).first,"
            " (r).watched, (r).fresh FROM (SELECT"
            f" {prefix}.acquire($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) AS r OFFSET 0) AS a"
        ).encode()
        self.acquire_shared = (
            "SELECT (r).granted, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).ticket, (r).first,"
            " (r).watched, (r).fresh, (r).share FROM (SELECT"
            f" {prefix}.acquire_shared($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) AS r OFFSET 0) AS a"
        ).encode()
        self.acquire_shared_again = _telling_undecided(self.acquire_shared, "(r).fresh")
        self.downgrade = (
            "SELECT (r).granted, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).share FROM"
            f" (SELECT {prefix}.downgrade($1, $2, $3, $4, $5) AS r OFFSET 0) AS a"
        ).encode()
        self.downgrade_again = _telling_undecided(self.downgrade, "(r).granted")
        self.resize_semaphore = f"SELECT {prefix}.resize_semaphore($1, $2)".encode()
        self.shared_state = f"SELECT kind, permits, available, holders FROM {prefix}.shared_state($1)".encode()
        self.wake_queue = f"SELECT {prefix}.wake_queue($1)".encode()
        self.claiming = {
            statement: _claiming(statement, f"${argument}", f"${argument + 1}", "$3", fences)
            for statement, argument in ((self.try_acquire, 10), (self.try_acquire_again, 10), (self.acquire, 12))
        }
        """For each statement that grants, one that also raises fences: all of it, or nothing."""
        # A claim of a semaphore contains the number of the permit.
        numbered = (
            "ARRAY(SELECT replace(c, '{permit}', coalesce((r).permit::text, '{permit}')) FROM unnest($13::text[]) AS c)"
        )
        for statement in (self.acquire_shared, self.acquire_shared_again):
            self.claiming[statement] = _claiming(statement, numbered, "$14", "$6", fences)
        self.abandon = f"SELECT {prefix}.abandon($1, $2)".encode()
        self.abandon_ticket = f"SELECT {prefix}.abandon($1, $2, only_ticket => true)".encode()

        self.look_for_deadlock = f"SELECT victim, cycle FROM {prefix}.look_for_deadlock($1, $2, $3, $4)".encode()
        granted = "(r).tokens, ARRAY(SELECT date_part('epoch', d) FROM unnest((r).deadlines) AS d), (r).lasting"
        self.acquire_all = (
            f"SELECT {granted}, (r).refused, (r).remaining, (r).ticket, (r).first, (r).watched, (r).fresh, (r).cycle,"
            " (r).waiter, (r).wanted FROM (SELECT"
            f" {prefix}.acquire_all($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) AS r OFFSET 0) AS a"
        ).encode()
        self.acquire_all_again = self.acquire_all.replace(b"$12)", b"$12, retry => true)")
        self.acquire_any = (
            "SELECT (r).name, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).left_queues, (r).busy,"
            " (r).tickets, (r).remainings, (r).firsts, (r).watched, (r).fresh FROM (SELECT"
            f" {prefix}.acquire_any($1, $2, $3, $4, $5, $6, $7, $8, $9) AS r OFFSET 0) AS a"
        ).encode()
        self.acquire_any_again = self.acquire_any.replace(b"$9)", b"$9, retry => true)")
        self.abandon_all = f"SELECT {prefix}.abandon_all($1, $2)".encode()
        self.give_way = f"SELECT {prefix}.give_way($1, $2, $3, $4, $5, $6, $7)".encode()
        self.wake_set = f"SELECT {prefix}.wake_set($1)".encode()
        self.abandon_tickets = f"SELECT {prefix}.abandon_all($1, $2, only_tickets => true)".encode()

        self.renew_all = (
            f"SELECT date_part('epoch', renewed_at), failed, reasons FROM {prefix}.renew_all($1, $2, $3, $4)"
        ).encode()
        # A release does not wait for the disk: a crash that loses it only keeps the lock until its deadline.
        self.release = f"SELECT {prefix}.release($1, $2, durable => false)".encode()
        # A retried release that finds nothing to free returns NULL, because the first one may have freed the lock.
        self.release_again = f"SELECT nullif({prefix}.release($1, $2, durable => false), false)".encode()
        self.release_all = f"SELECT busy FROM {prefix}.release_all($1, $2)".encode()
        self.release_set = f"SELECT released, busy FROM {prefix}.release_all($1, $2)".encode()
        self.release_set_again = f"SELECT NULL, busy FROM {prefix}.release_all($1, $2)".encode()

        self.heartbeat = f"SELECT tickets, firsts, next_check, watched FROM {prefix}.heartbeat($1, $2)".encode()
        self.leave = f"SELECT {prefix}.leave_queue($1, $2)".encode()
        self.leave_but = f"SELECT {prefix}.leave_queue($1, keep => $2)".encode()
        self.register_presence = f"SELECT {_ENDPOINTS}, {prefix}.register_presence($1, $2)".encode()
        self.withdraw_presence = f"SELECT lost FROM {prefix}.withdraw_presence($1, $2, $3)".encode()

        self.holder = (
            "SELECT token, holder, meta, date_part('epoch', granted_at), date_part('epoch', expires_at), remaining"
            f" FROM {prefix}.holder($1)"
        ).encode()
        self.queue = f"SELECT {prefix}.queue($1)".encode()

        # Moments of slots as microseconds since 1970, because they must come back exactly.
        moments = ", ".join(
            f"(extract(epoch FROM (r).{moment}) * 1000000)::bigint" for moment in ("slot", "asked_at", "planned_until")
        )
        self.claim_slot = (
            "SELECT (r).decision, (r).lock, (r).token, date_part('epoch', (r).expires_at), (r).remaining, (r).number,"
            f" (r).wait, {moments} FROM (SELECT {prefix}.claim_slot($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12,"
            " $13, $14, CASE WHEN $15::bigint[] IS NOT NULL THEN ARRAY(SELECT to_timestamp(p) FROM unnest($15) AS p)"
            " END, timestamptz 'epoch' + $16::bigint * interval '1 microsecond') AS r OFFSET 0) AS a"
        ).encode()
        self.end_slot = f"SELECT {prefix}.end_slot($1, $2, $3, $4, $5)".encode()
        self.slot_outcome = (
            f"SELECT outcome, exit_code, error, alive FROM {prefix}.slot_outcome($1,"
            " timestamptz 'epoch' + $2::bigint * interval '1 microsecond')"
        ).encode()
        self.revision = Call(f"SELECT {prefix}.schema_revision()".encode(), ())
        self.installation = Call(f"SELECT {prefix}.installation()".encode(), ())


def _telling_undecided(statement: bytes, column: str) -> bytes:
    """Return a statement for a retry, in whose reply an undecided request can be told from one that was sent once."""
    told = f"CASE WHEN {column} THEN 't' WHEN NOT {column} THEN 'f' ELSE 'undecided' END,"
    return statement.replace(f"{column},".encode(), told.encode())


def _claiming(statement: bytes, resources: str, within: str, holder: str, fences: str) -> bytes:
    """Return a statement that grants, extended to raise the fences of these resources."""
    claim = f"{quoted(fences)}.claim({resources}, (r).token, {holder}, {within})"
    return statement.replace(b" FROM", f", CASE WHEN (r).granted THEN {claim}::text END FROM".encode(), 1)

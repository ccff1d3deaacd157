"""Check the server's clock, which alone decides when a lease ends.

A deviation is reported only if nothing else explains it: the time that a reply took is allowed for.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from dblock._core import clock
from dblock._runtime.socket_timeout import bounded
from dblock.admin.doctor.patient import Check, Finding, Patient, Sample, server_check
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock._runtime.target import Target

AHEAD = 0.1
"""Seconds by which a row may lie in the future, because the clocks of two processors may differ slightly."""

SAMPLE = 0.3
"""Seconds between the two samples of the server's clock, at least."""

STEP, DRIFT = 0.05, 0.01
"""Allowed difference between the clocks: seconds, plus a part of the time between the samples."""

APART = 5.0
"""Seconds by which the server's time of day may differ from this machine's."""

NODES_APART = 0.5
"""Seconds by which the clocks of two nodes may differ. A failover rarely takes less."""

NODE_TIMEOUT, MOST_NODES = 3, 8
"""Seconds that a node may take to connect and to reply, and how many nodes are asked."""

KEEP = (
    "On the server, check chronyc tracking (or timedatectl timesync-status), and let it slew the clock, never step it."
)


def clock_set_back(patient: Patient) -> Iterator[Finding]:
    """Find grants and releases that lie in the future."""
    rows = patient.rows(
        "SELECT l.name, date_part('epoch', greatest(l.granted_at, l.released_at)) - now.now,"
        " CASE WHEN l.expires_at > clock_timestamp()"
        "  THEN date_part('epoch', l.expires_at) - now.now - date_part('epoch', l.ttl) END"
        f" FROM {patient.within('distributed_locks')} AS l,"
        " LATERAL (SELECT date_part('epoch', clock_timestamp()) AS now) AS now"
        " WHERE greatest(l.granted_at, l.released_at) > clock_timestamp() + make_interval(secs => $1)"
        " OR l.expires_at > clock_timestamp() + l.ttl + make_interval(secs => $1)"
        " ORDER BY 2 DESC NULLS LAST LIMIT 1000",
        AHEAD,
    )
    if not rows:
        return
    name, ahead, longer = rows[0]
    held = [row for row in rows if row[2] is not None and row[2] > AHEAD]
    by = max(ahead or 0.0, longer or 0.0)
    command = KEEP
    if held:
        command += f" To free a lock earlier: {patient.run('force-release', held[0][0])}"
    yield Finding(
        "warning",
        f"The server's clock was set back by {by:.1f} s or more: {len(rows)} lock{'s' * (len(rows) > 1)} "
        f"(such as {shlex.quote(name)}) were granted or released in the future, or last longer than their ttl; "
        f"{len(held) or 'none'} of them held.",
        "A lock whose holder dies stays held for that much longer. Whatever sets a clock back may also set it ahead, "
        "and then leases expire before their holders know.",
        command,
    )


@server_check
def clock_steps(patient: Patient) -> Iterator[Finding]:
    """Check that the server's clock runs as fast as this machine's."""
    first = patient.samples[0]
    time.sleep(max(0.0, first.after + SAMPLE - clock.now()))
    last = patient.sample()
    patient.samples.append(last)
    off = deviation(first, last)
    if off:
        yield Finding(
            "warning",
            f"The server's clock deviated by {off:+.2f} s within {last.after - first.before:.2f} s of this machine's.",
            "The server's clock ends a lease, and the client's clock ends the trust window. If the server's clock runs "
            "ahead, another client may get the lock before its holder knows.",
            KEEP,
        )


@server_check
def clock_difference(patient: Patient) -> Iterator[Finding]:
    """Check that the server and this machine agree on the time of day."""
    sample = patient.samples[-1]
    apart = sample.server - sample.wall
    if abs(apart) - (sample.after - sample.before) / 2 > APART:
        yield Finding(
            "note",
            f"The server's clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine's.",
            "Locks are not affected, because only the server's clock decides. But the timestamps in logs differ.",
            "Synchronize both clocks: chronyc tracking, on each machine.",
        )


def deviation(first: Sample, last: Sample) -> float:
    """Return the seconds by which the server's clock deviated between two samples; 0 if the replies explain it."""
    went = last.server - first.server
    least, most = last.before - first.after, last.after - first.before
    if went > most + STEP + DRIFT * most:
        return went - most
    if went < least - STEP - DRIFT * least:
        return went - least
    return 0.0


@server_check
def node_clocks(patient: Patient) -> Iterator[Finding]:
    """Check that the servers of a DSN with several hosts agree on the time of day."""
    offsets = [found for host in _hosts(patient.link.target) if (found := _offset(host))]
    if len(offsets) < 2:
        return
    least, most = min(offsets), max(offsets)
    apart = most.seconds - least.seconds
    if apart - least.doubt - most.doubt > NODES_APART:
        yield Finding(
            "warning",
            f"The clock of {most.host} is {apart:.1f} s ahead of that of {least.host}.",
            f"Tokens follow the clock of the server. If {least.host} takes over within {apart + 1:.1f} s, its tokens "
            "may repeat or be lower than tokens that were granted before.",
            "Synchronize the clocks of all nodes: chronyc tracking, on each machine.",
        )


class _Offset(NamedTuple):
    """The time of day on a server, less this machine's monotonic clock."""

    seconds: float
    doubt: float
    """Half the time that the reply took."""
    host: str


def _hosts(target: Target) -> list[dict[str, Any]]:
    """Return the connection parameters of each host that the DSN names, if it names several."""
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = dict(conninfo_to_dict(target.conninfo()))
    except DblockError:
        return []  # an engine that connects in a way of its own
    several = {key: str(given.pop(key, None) or "").split(",") for key in ("host", "hostaddr", "port")}
    count = max(len(several["host"]), len(several["hostaddr"]))
    if count < 2:
        return []
    given |= {"target_session_attrs": "any", "connect_timeout": NODE_TIMEOUT}
    each = [
        {key: values[number] if len(values) > 1 else values[0] for key, values in several.items()}
        for number in range(min(count, MOST_NODES))
    ]
    return [given | {key: value for key, value in one.items() if value} for one in each]


def _offset(parameters: dict[str, Any]) -> _Offset | None:
    """Read the clock of one host; None if the host does not reply."""
    import psycopg

    try:
        with psycopg.connect("", autocommit=True, **parameters) as connection, bounded(connection, NODE_TIMEOUT):
            before = clock.now()
            row = connection.execute("SELECT date_part('epoch', pg_catalog.clock_timestamp())").fetchone()
            after = clock.now()
    except (psycopg.Error, DblockError):
        return None
    assert row is not None
    where = ":".join(str(parameters[key]) for key in ("host", "port") if parameters.get(key))
    return _Offset(row[0] - (before + after) / 2, (after - before) / 2, where or str(parameters.get("hostaddr")))


CHECKS = (Check(clock_set_back), clock_steps, clock_difference, node_clocks)

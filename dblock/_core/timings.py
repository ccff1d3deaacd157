"""The intervals and patiences of a client's runtime.

A client hands one `Timings` object to each of its parts when it makes them. The object does not change, so all parts of
a client work with the same values. None of these values decides which client holds a lock: the database does. But
`own_part` and `trusted_for` decide for how long a client trusts its own leases: see what is said of them.

Tests give a client a `Timings` of their own: shorter intervals to see sooner what happens after them, or longer
patiences on a busy machine. A client without one uses `default`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """How often the parts of a client act, and how long they wait. Fields are seconds unless they end in `_part`."""

    # Calls of the database.

    connect_timeout: int = 5
    """Seconds that one attempt to connect may take, unless the DSN says otherwise."""
    least_patience: float = 1.0
    """Seconds to wait for a reply at least, even for a caller with a shorter timeout."""
    give_up_within: float = 2.0
    """Seconds that each step of giving up an unanswered call may take: to cancel it, to see it end, to undo it."""
    claim_within: float = 0.5
    """Seconds that a grant with claims waits for transactions that have already passed one of those fences.

    Then the grant is undone and retried.
    """

    # Waiters, and what they ask of the database.

    heartbeat_interval: float = 1.0
    """Seconds between two heartbeats. The database drops the tickets of a client after three seconds without one."""
    early_check: float = 0.1
    """Seconds from a new ticket to the first check of its queue. The interval then doubles, up to the heartbeat's."""
    holder_check_interval: float = 0.075
    """Seconds between two checks, for the first waiter in a queue, of whether the holder's process is alive."""
    poll_interval: float = 0.1
    """Seconds between two checks for the first waiter in a queue, where notifications do not come through."""
    poll_interval_of_others: float = 0.3
    """The same for waiters that were not first at their last check."""
    away_for: float = 5.0
    """Seconds without a heartbeat after which the waiters are woken, so that each sees that the database is away."""
    deadlock_look_interval: float = 0.5
    """Seconds of waiting before the first look for a deadlock, and between two looks."""
    cycle_look_interval: float = 0.4
    """Seconds after which a waiter for several locks that holds some looks again whether it waits in a cycle."""
    keep_several_for: float = 3.2
    """Seconds for which a waiter for several locks keeps locks that another waiter wants, if no cycle is known."""

    # The listener's connection.

    ping_interval: float = 5.0
    """Seconds between two requests over the connection."""
    reply_within: float = 5.0
    """Seconds to wait for a reply over the connection. Without one, the connection has fallen silent."""
    listen_for: float = 30.0
    """Seconds to keep listening after the last waiter has left."""
    probe_within: float = 2.0
    """Seconds after which a notification that the client sent to itself is taken to be lost."""
    reads_end_within: float = 1.0
    """Seconds that a close waits for a read in another thread."""
    interrupted_within: float = 0.5
    """Seconds to cancel what is under way for a renewal."""

    # The presence.

    trusted_for: float = 45.0
    """Seconds for which the presence is trusted after a reply from the server over the presence's own connection.

    With `ping_interval` it must be shorter than DROPPED_AFTER in dblock/_core/presence.py.
    """
    own_part: float = 2 / 3
    """The part of the grace within which this client recovers or gives its leases up, below 1.

    The rest is for the next holders.
    """
    look_for: float = 1.0
    """Seconds for which the listener goes on to look at the socket after the last lease has ended."""
    read_within: float = 0.05
    """Seconds that the listener gets to read input that the probe of the socket cannot understand."""

    # Connections for calls.

    idle_for: float = 5.0
    """Seconds after which an idle connection that a burst of calls had opened is closed."""
    lent_for: float = 0.2
    """Seconds for which a call borrows the home, at most."""
    last_resort_for: float = 1.0
    """The same for a call that has no other connection. Shorter than the waiters' tickets last without a heartbeat."""
    loan_given_up_within: float = 0.5
    """Seconds to cancel a borrowed call that got no reply, and as many again to see it end."""
    free_within: float = 0.02
    """Seconds that a call waits until the home is free. It is usually free, or a heartbeat is under way over it."""

    # The keep-alive.

    lasting: float = 1.0
    """Seconds after which a lease that is still held counts as lasting."""
    lasting_in_loop: float = 0.2
    """The same for an AsyncClient. A loop that is blocked cannot use the connections of its pool."""
    reserved_for: float = 5.0
    """Seconds for which a connection of the keep-alive's own stays open after the last lasting lease."""
    slow_part: float = 1 / 8
    """The part of its time from which a reply over the home is slow. A new connection would be slow to open too."""
    longest_wait: float = 1.0
    """Seconds that a renewal waits for one connection, at most. Then it goes over another one."""

    # The end of a client.

    listener_ends_within: float = 0.5
    """Seconds that a close waits for the listener's thread."""
    calls_end_within: float = 1.0
    """Seconds that a close waits for calls that are under way."""

    # Recipes.

    observe_interval: float = 0.25
    """Seconds between two looks at the log of an election. A term begins with a durable commit, which cannot notify."""
    longest_election_pause: float = 5.0
    """Seconds between two attempts of a candidate or observer to reach a database that is away, at most."""
    count_retry_for: float = 30.0
    """Seconds for which the count of a latch is sent again to a database that is away."""


default = Timings()
"""What a client without timings uses. A client reads it when it is made, so that a test run can replace it."""


def chosen(timings: Timings | None) -> Timings:
    """Return these timings, or the default if there are none."""
    return default if timings is None else timings

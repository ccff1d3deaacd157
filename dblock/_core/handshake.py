"""The first statements over a new connection of the listener: what is at its other end, and can it be a presence?

Guarantee: a presence is a server session whose socket this client watches. A pooler, a proxy or a NAT may close its
side toward the server unseen by the client, and a pooler that emulates sessions keeps advisory locks on a connection of
its own, which outlives the client. So the server describes both ends of the connection twice: before the registration,
and in the very statement that registers. Unless each description matches this end, there is no presence.
"""

from __future__ import annotations

from collections.abc import Callable

from dblock._core import statements
from dblock._core.effects import Call, Flow
from dblock._core.grants import GrantFlows
from dblock._core.listener_failures import ConnectFailed, Connection
from dblock._core.options import interval
from dblock._core.presence import Presence

NOT_DIRECT = (
    "listener: a pooler, proxy or NAT is between this client and the database. There is no presence: leases of a dead "
    "process last until they expire. Set listen_dsn to a DSN that leads straight to the server."
)


def handshake(
    flows: GrantFlows, connection: Connection, installation: str, grace: float | None, warn: Callable[[str], object]
) -> Flow[Presence | None]:
    """Check a new connection, and register it as a presence. The result is None where there can be none."""
    (found,) = yield flows.statements.installation
    if found != installation:
        raise ConnectFailed("listen_dsn leads to another installation of dblock than the client itself")
    if grace is None:
        return None
    ends = yield statements.WHICH_ENDPOINTS
    if not connection.is_direct(*ends):
        warn(NOT_DIRECT)
        return None
    yield statements.KEEP_SESSION
    name, sent_at = flows.new_name(), flows.clock()
    *ends, _ = yield Call(flows.statements.register_presence, (name, interval(grace)))
    if not connection.is_direct(*ends):
        yield Call(flows.statements.withdraw_presence, (name, "{}", "{}"))
        warn(NOT_DIRECT)
        return None
    return Presence(name, grace, connection.probe, sent_at, connection.server, flows.timings)

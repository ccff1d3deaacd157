"""The listener's connection as the core sees it, and the ways in which it fails.

The runtime translates the driver's errors into these. What the driver knows about an error (is the connection usable,
did the reply come in time, does the server restart) is decided there and named here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

from dblock._core.presence import SocketState


class Connection(Protocol):
    """The listener's connection, as the runtime provides it."""

    @property
    def server(self) -> str:
        """The address of the server at its other end."""

    def is_direct(self, backend: str, *ends: str | None) -> bool:
        """Return whether both ends, as the server describes them, are those of this connection.

        They are the backend, the client's address and port, and the server's address and port.
        """

    def probe(self) -> SocketState:
        """Look at the socket without waiting and without reading."""

    def close(self) -> None:
        """Close the connection at once, from any thread. Closing twice does no harm."""

    def drop(self) -> None:
        """Close this process's copy of the socket in the child of a fork, without a message to the server."""


class Failure(enum.Enum):
    """What is left of a connection over which a call failed."""

    REFUSED = "refused"
    """The server refused the call. The connection is usable."""
    SILENT = "silent"
    """The reply did not come in time. The server may not know of it."""
    CLOSED = "closed"
    TERMINATED = "terminated"
    """The server ended this session: because it shuts down, or because an administrator ended this session alone."""
    SERVER_RESTARTED = "server restarted"
    """The server ended all sessions at once, after a crash or in an immediate shutdown."""


class ServerState(enum.Enum):
    """What the server that ended a session replies to a new connection."""

    UNKNOWN = "unknown"
    SHUTTING_DOWN = "shutting down"
    """It accepts no sessions any more. A fast shutdown has ended all sessions. A smart one lets them continue."""
    STARTING = "starting"
    """It has ended all sessions and accepts none yet."""


class ConnectionFailed(Exception):
    """A call over the listener's connection failed, or reading from it did."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


class ConnectFailed(Exception):
    """No connection could be opened."""

    def __init__(self, message: str, states: Mapping[str, ServerState] | None = None) -> None:
        """`states` has the address and the state of each server that refused the connection because of its state."""
        super().__init__(message)
        self.states = states or {}

"""Bugs in the client's look at the connection of its listener, and in its conclusions."""

from __future__ import annotations

from typing import Any

from tests.robustness.mutations import Bug


def _notice_late() -> None:
    """Let the listener notice only after a second that its connection has ended."""
    from dblock._core.effects import Sleep
    from dblock._core.listener_flow import ListenerFlow

    failed: Any = ListenerFlow._failed

    def late(self: Any, *args: Any) -> Any:
        yield Sleep(1.0)
        return (yield from failed(self, *args))

    ListenerFlow._failed = late  # type: ignore[assignment, method-assign]


def _hide_hang_up() -> None:
    """Make every connection look open, as a patched poll does."""
    from dblock._core.presence import SocketState
    from dblock._runtime.socket_probe import SocketProbe

    SocketProbe.__call__ = lambda self, patient=False: SocketState.OPEN  # type: ignore[method-assign]


def _connect_late() -> None:
    """Let the listener connect again only after a second, as to a busy server."""
    from dblock._core.effects import Sleep
    from dblock._core.listener_flow import ListenerFlow

    connect: Any = ListenerFlow._connect

    def late(self: Any) -> Any:
        yield Sleep(1.0)
        return (yield from connect(self))

    ListenerFlow._connect = late  # type: ignore[method-assign]


def _take_for_restart() -> None:
    """Take the end of the listener's session for the end of the server."""
    from dblock._core.doubtful_presences import DoubtfulPresences

    add: Any = DoubtfulPresences.add

    def proven(self: Any, presence: Any, terminated: bool = False) -> None:
        add(self, presence, terminated)
        if terminated:
            self.end(presence)

    DoubtfulPresences.add = proven  # type: ignore[method-assign]


BUGS = (
    Bug(
        "termination taken for a restart",
        "keeps a lease whose session an administrator has terminated, as if the server had ended all sessions",
        ("loss reported first", "linearizability"),
        fault="terminate-listeners",
        seconds=8.0,
        options={"locks": 1, "ttl": 4.0, "brief": 2.0, "long": 0.0, "kept_alive": 0.0},
        slow_client=_connect_late,
        client=_take_for_restart,
    ),
    Bug(
        "hang-up hidden",
        "trusts a lease whose connection the server has closed, because poll does not report it",
        ("loss reported first", "linearizability"),
        fault="terminate-listeners",
        seconds=8.0,
        options={"locks": 1, "ttl": 4.0, "brief": 2.0, "long": 0.0, "kept_alive": 0.0},
        slow_client=_notice_late,
        client=_hide_hang_up,
    ),
)

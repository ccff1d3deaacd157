"""Effects: what a flow asks for, and the drivers that perform a flow.

A flow is a generator. It yields one effect at a time and receives the effect's result, so that it decides without
touching a database, a socket or a clock. A driver takes the effects to a function that performs them: `drive` in the
calling thread, `drive_async` in an event loop. Tests and the simulation perform the same effects by hand.

An effect that fails is raised inside the flow, at its `yield`. The flow decides whether to continue.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from dblock._core.listener_failures import Connection

T = TypeVar("T")
Row = tuple["str | None", ...]


class Call(NamedTuple):
    """Call one of the database's functions. The result is its row as text, or None. A call is safe to send twice."""

    sql: bytes
    args: tuple[str | None, ...]
    again: bytes | None = None
    """The statement to retry with after the connection broke, if it differs: the first one may have been executed."""
    within: float = math.inf
    """Seconds to wait for the reply; never longer than the client's patience."""
    giving_up: float = math.inf
    """Seconds to cancel a call that got no reply, and as many again to see it end; never more than `give_up_within`."""
    apart: bool = False
    """Whether it may go over the listener's connection only if nothing is between that and the server."""

    def sent_again(self) -> Call:
        """Return the call for a retry, because the first one may have been executed."""
        return self._replace(sql=self.again or self.sql)


class JoinQueue(NamedTuple):
    """Register a waiter of this process, before its ticket can exist. The result is the LocalWaiter."""

    name: str
    attempt: str


class Waits(Protocol):
    """A thing that a thread or a task can wait at until it is woken."""

    def wait(self, seconds: float) -> Any:
        """Block until woken, or for that many seconds. Returns an awaitable for a task."""


class Wait(NamedTuple):
    """Wait until the waiter is woken, but no longer than this many seconds."""

    waiter: Waits
    seconds: float


class Sleep(NamedTuple):
    """Let this many seconds pass."""

    seconds: float


Flow = Generator[Any, Any, T]
"""A generator that yields effects and returns a T."""


class CallOver(NamedTuple):
    """Make a call over the listener's connection. The result is the row; a failure raises ConnectionFailed."""

    connection: Connection
    call: Call
    within: float


class CallOverKeepAlive(NamedTuple):
    """Make a call over the keep-alive's connection, as its runner does. A plain Call goes over the pool."""

    call: Call


class Connect(NamedTuple):
    """Open a connection. The result is a Connection; a failure raises ConnectFailed."""


class Spawn(NamedTuple):
    """Run a flow beside this one, in a thread of its own."""

    flow: Flow[None]


class CallLater(NamedTuple):
    """Call a function after so many seconds, whatever else is under way. A closed listener need not call it."""

    seconds: float
    function: Callable[[], None]


class WaitForInput(NamedTuple):
    """Wait until the listener is woken, but no longer than this many seconds.

    While it waits, pass notifications that come over the connection to `notified`. A connection that turns out to be
    closed raises ConnectionFailed.
    """

    connection: Connection | None
    seconds: float


def drive(flow: Flow[T], perform: Callable[[Any], Any]) -> T:
    """Perform every effect of the flow and return the flow's result."""
    try:
        effect = next(flow)
        while True:
            try:
                result = perform(effect)
            except BaseException as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


async def drive_async(flow: Flow[T], perform: Callable[[Any], Awaitable[Any]]) -> T:
    """Perform every effect of the flow in the running event loop and return the flow's result."""
    try:
        effect = next(flow)
        while True:
            try:
                result = await perform(effect)
            except BaseException as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


def redirect(flow: Flow[T], wrap: Callable[[Call], Any]) -> Flow[T]:
    """Yield each call of the flow, wrapped in another effect that makes it elsewhere."""
    try:
        call = next(flow)
        while True:
            try:
                result = yield wrap(call)
            except BaseException as error:
                call = flow.throw(error)
            else:
                call = flow.send(result)
    except StopIteration as done:
        value: T = done.value
        return value

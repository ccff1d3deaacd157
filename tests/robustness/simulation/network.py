"""The network between a process and the database: a message may be late, overtaken, lost, or executed without a reply.

Every statement travels on its own, so two of them arrive in any order. A connection may break before the statement has
arrived, or after. Then the sender learns of it, perhaps even before the statement arrives. Or everything may go silent,
and the sender learns of nothing. In calm weather every message arrives, and soon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors as pg

from dblock._runtime.error_mapping import Overdue
from dblock.errors import ClaimBusy, DblockError
from dblock.testing.database.statements import Args, Listens, perform
from tests.robustness.simulation.database import Database
from tests.robustness.simulation.world import World

if TYPE_CHECKING:
    from tests.robustness.simulation.process import Connection, Process

Answered = Callable[[Any], object]
"""Receives the row, or the error."""


BROKEN = (
    psycopg.OperationalError("the connection is lost"),
    # What PgBouncer says if its connection to the server has broken.
    pg.ProtocolViolation("server conn crashed?"),
)
"""What the sender learns of a connection that breaks."""


@dataclass
class Weather:
    """How bad the network is."""

    longest: float = 0.01
    """Seconds that a message usually takes at most, one way."""
    slow: float = 0.0
    """The share of messages that take far longer than that."""
    slowest: float = 1.0
    breaks: float = 0.0
    """The share of messages that are lost, or whose reply is lost, with a connection that breaks."""
    breaks_again: float = 0.0
    """The same for a message that is sent again. Connections often break together."""
    silent: float = 0.0
    """The share of messages that are lost, or whose reply is lost, in silence."""
    claim_busy: float = 0.0
    """The share of claims that meet a transaction past the fence."""


class Message:
    """One statement on its way."""

    __slots__ = ("cancelled", "silent")

    def __init__(self) -> None:
        self.cancelled = False
        """Whether it is not executed even if it arrives."""
        self.silent = False
        """Whether its reply never comes."""


class Network:
    """The network of one database."""

    def __init__(self, world: World, database: Database, weather: Weather) -> None:
        self.world = world
        self.database = database
        self.weather = weather
        self.connections: dict[int, Connection] = {}
        """The listeners' connections, by the session at their other end."""
        self.channels: dict[int, str] = {}
        """The client whose channel each session listens to."""
        self.on_session_end: Callable[[int], object] = lambda session: None
        self._sessions = 0

    def delay(self) -> float:
        """Return how long one message takes one way."""
        weather, chance = self.weather, self.world.random
        if weather.slow and chance.random() < weather.slow:
            return chance.uniform(weather.longest, weather.slowest)
        return chance.uniform(0.0002, weather.longest)

    def send(
        self,
        process: Process,
        sql: bytes,
        args: Args,
        within: float,
        connection: Connection | None,
        answered: Answered,
        again: bool = False,
    ) -> Message:
        """Send a statement, perhaps `again`. Report its outcome within so many of the sender's seconds."""
        world, weather = self.world, self.weather
        breaks = max(weather.breaks, weather.breaks_again) if again else weather.breaks
        message = Message()
        there, back = self.delay(), self.delay()
        patience = within / process.rate
        fate = world.random.random()
        lost_on_the_way = world.random.random() < 0.5
        if process.cut_off or fate < weather.silent:
            message.silent = True
            if not process.cut_off and not lost_on_the_way:
                world.after(there, self._arrive, process, message, sql, args, connection, None, 0.0)
            process.later(patience, answered, Overdue("the reply did not come in time"))
        elif fate < weather.silent + breaks and connection is None:
            if not lost_on_the_way:
                there += world.random.choice([0.0, 0.1, 0.5, 2.0]) * world.random.random()
                world.after(there, self._arrive, process, message, sql, args, connection, None, 0.0)
            # Perhaps the sender knows before the statement arrives. The statement is then executed after its retry.
            broken_after = world.random.uniform(0, min(there + back, 0.2))
            if broken_after > patience:
                process.later(patience, answered, Overdue("the reply did not come in time"))
            else:
                process.later(broken_after, answered, world.random.choice(BROKEN))
        elif there + back > patience:
            world.after(there, self._arrive, process, message, sql, args, connection, None, 0.0)
            process.later(patience, answered, Overdue("the reply did not come in time"))
        else:
            world.after(there, self._arrive, process, message, sql, args, connection, answered, back)
        return message

    def _arrive(
        self,
        process: Process,
        message: Message,
        sql: bytes,
        args: Args,
        connection: Connection | None,
        answered: Answered | None,
        back: float,
    ) -> None:
        if message.cancelled:
            return
        result: Any
        if not self.database.up or (connection is not None and connection.session not in self.database.store.sessions):
            result = psycopg.OperationalError("the connection is lost")
        else:
            result = self._do(process, sql, args, connection)
        if answered is not None:
            process.later(back, answered, result)

    def _do(self, process: Process, sql: bytes, args: Args, connection: Connection | None) -> Any:
        weather, database = self.weather, self.database
        if weather.claim_busy and b".claim(" in sql and self.world.chance(weather.claim_busy):
            row = database.store.tables.rows.get(args[0] or "")
            if row is None or row.expires_at <= self.world.now:
                return ClaimBusy("a transaction is past the fence")
        database.caller = process
        result: Any
        try:
            result = database.call(
                connection.session if connection else None, lambda: perform(database.store, database.fence, sql, args)
            )
        except Listens as listens:
            assert connection is not None
            if listens.client is None:
                self.channels.pop(connection.session, None)
            else:
                self.channels[connection.session] = listens.client
            result = None
        except DblockError as error:
            result = error  # as the client translates what the function raises
        if self.world.tracing:
            self.world.say("database", f"{process.name}: {_told(sql, args)} -> {result}")
        return result

    def notify(self, client: str, payload: str) -> None:
        """Carry a notification to the sessions that listen to the client's channel."""
        for session, channel in list(self.channels.items()):
            connection = self.connections.get(session)
            if channel == client and connection is not None and session in self.database.store.sessions:
                lost = connection.process.cut_off or connection.process.deaf or self.world.chance(self.weather.silent)
                if not lost:
                    connection.process.later(self.delay(), connection.notified, payload)

    # The listeners' connections.

    def connect(self, connection: Connection) -> int | None:
        """Open a connection. None while the database accepts none."""
        if not self.database.accepts or connection.process.cut_off:
            return None
        self._sessions += 1
        self.database.store.sessions.add(self._sessions)
        self.connections[self._sessions] = connection
        return self._sessions

    def end_session(self, session: int) -> None:
        """End a session in the database."""
        self.on_session_end(session)
        self.database.store.sessions.discard(session)
        self.channels.pop(session, None)
        self.connections.pop(session, None)

    def hang_up(self, connection: Connection, told: psycopg.Error | None = None) -> None:
        """Cut a connection. The database sees it now, the process's machine a moment later, even if it is stopped.

        `told` is the server's last message. Without one, only the connection ends.
        """
        self.end_session(connection.session)
        told = told or psycopg.OperationalError("closed")
        self.world.after(self.world.random.uniform(0, 0.01), connection.hung_up, told)

    def shut_down(self) -> None:
        """End all sessions with a message, as a server does that shuts down."""
        for connection in list(self.connections.values()):
            self.hang_up(connection, pg.AdminShutdown("terminating connection due to administrator command"))

    def crash(self) -> None:
        """Cut all connections, as a server does that restarts after a crash. It says so where it still can."""
        for connection in list(self.connections.values()):
            self.hang_up(connection, None if self.world.chance(0.3) else pg.CrashShutdown("the server restarts"))


def _told(sql: bytes, args: Args) -> str:
    text = sql.decode()
    what = text.partition('"dblock".')[2].partition("(")[0] if '"dblock".' in text else text
    again = " (again)" if "retry =>" in text or "nullif" in text else ""
    shown = [_shown(arg) for arg in args]
    return f"{what}({', '.join(shown)}){again}"


def _shown(arg: str | None) -> str:
    if arg is None:
        return "-"
    return f"#{int(arg, 16)}" if len(arg) == 32 and arg.isalnum() else arg

"""A process that uses dblock: its clock, its tasks, and how the effects of their flows are performed.

It performs effects as the runner does: it retries a statement once if the connection breaks, and it cancels a statement
that gets no reply in time, which is an error. While a process is stopped, its clock continues and nothing else happens
in it. A process may also die.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import psycopg
from psycopg import errors as pg

from dblock._core.effects import (
    Call,
    CallLater,
    CallOver,
    CallOverKeepAlive,
    Flow,
    JoinQueue,
    Sleep,
    Spawn,
    Wait,
)
from dblock._core.listener_failures import ConnectionFailed, Failure, ServerState
from dblock._core.presence import SocketState
from dblock._core.timings import Timings
from dblock._core.waiters import LocalWaiter, LocalWaiters
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import is_overdue
from dblock.errors import DblockError, Unavailable
from tests.robustness.simulation.network import Message, Network
from tests.robustness.simulation.world import World

T = TypeVar("T")


class Cancelled(BaseException):
    """The caller of a task has cancelled it."""


class Bell:
    """What a task waits for until it is rung."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._rung = False
        self._resume: Callable[[Any], object] | None = None

    def ring(self) -> None:
        """Resume the task that waits."""
        self._rung = True
        resume, self._resume = self._resume, None
        if resume is not None:
            self._process.later(0.0, resume, None)

    def wait_then(self, seconds: float, resume: Callable[[Any], object]) -> None:
        """Call this when the bell has been rung, or after so many seconds."""
        if self._rung:
            self._process.later(0.0, resume, None)
            return
        self._resume = resume
        if seconds < math.inf:
            self._process.later(seconds / self._process.rate, resume, None)

    def wait_and_mute(self, seconds: float, resume: Callable[[Any], object]) -> None:
        """Call this when the bell has been rung, or after so many seconds. Forget that it was rung in either case."""
        over = False

        def woken(result: Any) -> None:
            nonlocal over
            if not over:
                over = True
                self.mute()
                resume(result)

        self.wait_then(seconds, woken)

    def mute(self) -> None:
        """Forget that it was rung."""
        self._rung = False


class Waiter(LocalWaiter):
    """A waiter that a task of the simulation waits as."""

    def __init__(self, process: Process, waiters: LocalWaiters, name: str, attempt: str) -> None:
        super().__init__(waiters, name, attempt)
        self.bell = Bell(process)

    def ticket_redeemed(self) -> None:
        self.has_ticket = False
        self.bell.mute()

    def wake(self) -> None:
        self.bell.ring()

    def wait(self, seconds: float) -> None:
        raise NotImplementedError

    def wait_then(self, seconds: float, resume: Callable[[Any], object]) -> None:
        """Call this when woken, or after so many seconds."""
        self.bell.wait_then(seconds, resume)


class Connection:
    """The listener's connection, with a session at its other end."""

    server = "the database"

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.session = 0
        self.error: psycopg.Error | None = None
        """Why it is closed, as the machine knows even while the process is stopped."""
        self.on_end: Callable[[], object] = lambda: None
        self.look: Callable[[], object] = lambda: None
        """Looks at the socket as its process last did before the connection closed."""
        self.notified: Callable[[str], object] = lambda payload: None
        self.doubted: Callable[[], object] = lambda: None
        """Makes the listener ask for a reply, because a renewal got none."""
        self._network = network

    def is_direct(self, backend: str, *ends: str | None) -> bool:
        """Return True: nothing stands between a process and the database."""
        return True

    def probe(self) -> SocketState:
        """Look at the socket, as poll() does."""
        return SocketState.OPEN if self.error is None else SocketState.CLOSED

    def hung_up(self, error: psycopg.Error) -> None:
        """Close it at the other end."""
        self.look()
        self.error = error
        self.process.later(0.0, self.on_end)

    def close(self) -> None:
        """Close this end. The database sees that unless the process is cut off. A dead process closes nothing."""
        if not self.process.cut_off and not self.process.dead:
            self._network.end_session(self.session)

    def drop(self) -> None:
        """Do nothing: no process forks here."""


Resume = Callable[[Any], object]
"""Continues a flow with the result of its effect; an exception is raised in it."""


class Task:
    """Performs the effects of one flow, one after the other."""

    def __init__(
        self,
        process: Process,
        flow: Flow[Any],
        done: Callable[[Any], object] | None = None,
        perform: Callable[[Any, Resume], bool] = lambda effect, resume: False,
        keeps_alive: bool = False,
    ) -> None:
        """`perform` starts effects that a process alone cannot perform, and returns False for all others.

        `keeps_alive` means that its calls are made as the keep-alive makes them.
        """
        self._process = process
        self._flow = flow
        self._done = done
        self._perform_first = perform
        self._keeps_alive = keeps_alive
        self._turn = 0
        """The number of the effect under way. A result of an earlier effect comes too late."""
        self.over = False
        self._message: Message | None = None
        self._continue(None)

    def cancel(self) -> None:
        """Make the flow leave whatever it waits for."""
        if not self.over:
            message, self._turn = self._message, self._turn + 1
            if message is not None and not self._process.cut_off and self._process.world.chance(0.5):
                message.cancelled = True
            self._process.later(self._process.network.delay(), self._resume, self._turn, Cancelled())

    def _resume(self, turn: int, result: Any) -> None:
        if turn == self._turn and not self.over:
            self._continue(result)

    def _continue(self, result: Any) -> None:
        self._turn += 1
        self._message = None
        turn = self._turn
        try:
            effect = self._flow.throw(result) if isinstance(result, BaseException) else self._flow.send(result)
        except StopIteration as done:
            self._end(done.value)
            return
        except (DblockError, Cancelled) as error:
            self._end(error)
            return
        self._perform(effect, lambda result: self._resume(turn, result))

    def _perform(self, effect: Any, resume: Resume) -> None:
        process = self._process
        if self._perform_first(effect, resume):
            return
        if isinstance(effect, Call):
            self._call(effect, resume, self._keeps_alive)
        elif isinstance(effect, CallOverKeepAlive):
            self._call(effect.call, resume, True)
        elif isinstance(effect, CallOver):
            self._call_over(effect, resume)
        elif isinstance(effect, Wait):
            waiter: Any = effect.waiter
            waiter.wait_then(effect.seconds, resume)
        elif isinstance(effect, JoinQueue):
            resume(process.join_queue(effect.name, effect.attempt))
        elif isinstance(effect, Spawn):
            Task(process, effect.flow, perform=self._perform_first)
            resume(None)
        elif isinstance(effect, CallLater):
            process.later(effect.seconds / process.rate, effect.function)
            resume(None)
        else:
            assert isinstance(effect, Sleep)
            process.later(effect.seconds / process.rate, resume, None)

    def _call_over(self, effect: CallOver, resume: Resume) -> None:
        process, connection = self._process, cast(Connection, effect.connection)

        def answered(result: Any) -> None:
            resume(failed(result) if isinstance(result, psycopg.Error) else result)

        sql, args = effect.call.sql, effect.call.args
        self._message = process.network.send(process, sql, args, effect.within, connection, answered)

    def _call(self, call: Call, resume: Resume, keeps_alive: bool) -> None:
        process, database = self._process, self._process.network.database
        within = min(call.within, process.patience)
        # A renewal goes over the listener's connection if there is no other, or if the other one is busy.
        home = process.home if keeps_alive and (not process.has_reserve or process.world.chance(0.3)) else None
        turn, trouble = self._turn, CallRetry(process, call, None)

        def send(connects: bool) -> None:
            if connects and database.up and not database.accepts and not process.cut_off:
                process.later(process.network.delay(), refused)
                return
            sql, again = trouble.call.sql, trouble.may_be_done
            self._message = process.network.send(process, sql, call.args, within, home, answered, again)

        def answered(result: Any) -> None:
            if turn != self._turn:
                return
            if isinstance(result, DblockError):
                result.may_be_done = trouble.may_be_done
            if not isinstance(result, psycopg.Error):
                resume(result)
                return
            connects = home is None
            try:
                trouble.raise_or_retry(result, cast(RawConnection, object()) if connects else None)
            except Unavailable as error:
                if is_overdue(result):
                    give_up(error)
                else:
                    fail(error)
            else:
                send_over_other(connects)

        def give_up(late: Unavailable) -> None:
            message, uniform = self._message, process.world.random.uniform
            if message is not None and not process.cut_off and process.world.chance(0.5):
                message.cancelled = True
            giving_up = min(call.giving_up, process.timings.give_up_within)
            most = min(giving_up, math.inf if process.cut_off else process.network.weather.longest)
            seen_to_its_end = giving_up if message is not None and message.silent else uniform(0, most)
            if home is not None and message is not None and message.silent:
                process.later(uniform(0, most) + seen_to_its_end, home.doubted)
            process.later(uniform(0, most) + seen_to_its_end, resume, late)

        def refused() -> None:
            if turn == self._turn:
                error = Unavailable("No connection could be opened.")
                error.may_be_done = trouble.may_be_done
                fail(error)

        def fail(error: Unavailable) -> None:
            if keeps_alive:
                process.other_session.refused_by(database.state)
            resume(error)

        def send_over_other(connects: bool) -> None:
            nonlocal home
            home, session = None, process.other_session
            if not keeps_alive:
                send(connects)
                return
            if not process.has_reserve and process.world.chance(0.5):
                session.close()
            if session.has_ended():
                trouble.broken = True
                trouble.call = call.sent_again()
            send(session.must_be_opened(database.accepts) or connects)

        if home is not None:
            send(False)
        else:
            send_over_other(False)

    def _end(self, result: Any) -> None:
        self.over = True
        if self._done is not None:
            self._done(result)
        elif isinstance(result, BaseException):
            raise result


def failed(error: psycopg.Error) -> ConnectionFailed:
    """Translate an error of the listener's connection as the runtime does."""
    if is_overdue(error):
        failure = Failure.SILENT
    elif isinstance(error, pg.CrashShutdown):
        failure = Failure.SERVER_RESTARTED
    elif isinstance(error, pg.AdminShutdown):
        failure = Failure.TERMINATED
    else:
        failure = Failure.CLOSED
    return ConnectionFailed(str(error), failure)


def performed(flow: Flow[T], perform: Callable[[Any], Flow[Any]]) -> Flow[T]:
    """Perform every effect of a flow by a flow of its own."""
    result: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect = flow.send(result) if error is None else flow.throw(error)
            try:
                result, error = (yield from perform(effect)), None
            except GeneratorExit:
                _end(flow)
                raise
            except BaseException as problem:
                error = problem
    except StopIteration as done:
        value: T = done.value
        return value


def _end(flow: Flow[Any]) -> None:
    """End a flow whose process is gone, although it would still clean up."""
    try:
        while True:
            flow.throw(GeneratorExit())
    except (StopIteration, GeneratorExit):
        pass


class OtherSession:
    """A session of a process beside the listener's, and what the process knows of the server behind it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.ended_at = -math.inf
        """When the process read that the server has ended it."""
        self.refused: tuple[dict[str, ServerState], float] = {}, -math.inf
        self._clock = clock
        self._open = True
        self._ended = self._terminated = False

    def end(self, terminated: bool) -> None:
        """End it. `terminated` means that the server says so."""
        self._ended, self._terminated = self._open, terminated

    def has_ended(self) -> bool:
        """Return whether the next call over it fails. Then there is none."""
        if not self._ended:
            return False
        if self._terminated:
            self.ended_at = self._clock()
        self._open = self._ended = False
        return True

    def must_be_opened(self, accepts: bool) -> bool:
        """Return whether there is none. Then the next call opens one, if the server accepts one."""
        is_open, self._open = self._open, self._open or accepts
        return not is_open

    def close(self) -> None:
        """Close it, as a quiet process does."""
        self._open = self._ended = False

    def refused_by(self, state: ServerState) -> None:
        """Record in which state the server refuses a connection. A server that does not reply is in none."""
        if state is not ServerState.UNKNOWN:
            self.refused = {Connection.server: state}, self._clock()


class Process:
    """What every process has: a clock of its own, a name, and whether it runs."""

    timings = Timings()
    """Those that dblock ships with, whatever clients of the test run use."""
    schema = "dblock"
    terminated_at = -math.inf

    def __init__(self, world: World, network: Network, name: str, rate: float, patience: float) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.rate = rate
        """How fast its clock runs."""
        self.patience = self.reply_within = max(patience, 1.0)
        self.dead = False
        self.stopped = False
        self.continued_at = -math.inf
        """When it last continued after a stop, by its own clock."""
        self.cut_off = False
        """Whether nothing gets through between it and the database."""
        self.refused = False
        """Whether its listener gets no new connection."""
        self.deaf = False
        """Whether notifications never reach it, as behind a pooler."""
        self.other_session = OtherSession(self.clock)
        self._began = world.random.uniform(0, 1000)
        self._put_off: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def join_queue(self, name: str, attempt: str) -> Waiter:
        """Register a waiter for a lock."""
        raise NotImplementedError

    def stop_preparing(self, why: str) -> None:
        """Do nothing: no statement is prepared here."""

    @property
    def has_reserve(self) -> bool:
        """Whether it keeps a session beside the listener's."""
        return True

    @property
    def home(self) -> Connection | None:
        """The connection of the listener; None while there is none."""
        return None

    def clock(self) -> float:
        """Return the time by its own clock."""
        return self._began + self.world.now * self.rate

    def when(self, time: float) -> float:
        """Return the world's time for one of its own clock."""
        return (time - self._began) / self.rate

    def later(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Call a function in this process, so many seconds from now."""
        self.world.after(seconds, self._act, act, args)

    def _act(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.dead:
            return
        if self.stopped:
            self._put_off.append((act, args))
            return
        act(*args)

    def stop(self) -> None:
        """Stop it. Its clock continues."""
        self.stopped = True

    def go_on(self) -> None:
        """Let it continue, with all that has happened in the meantime."""
        self.stopped, self.continued_at = False, self.clock()
        put_off, self._put_off = self._put_off, []
        for act, args in put_off:
            self.later(0.0, act, *args)

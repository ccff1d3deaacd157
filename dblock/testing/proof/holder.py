"""One holder of a proof: a thread that runs the user's function with what its parameters ask for."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from dblock.errors import InvalidArgument
from dblock.testing.locations import Location, user_location
from dblock.testing.proof.own_sessions import FirstConnection

GIVEN = ("dsn", "client", "connection", "engine", "lease")


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return what a function asks for; raise InvalidArgument if a proof cannot give it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InvalidArgument(f"prove_fenced runs a function; got {function!r}.") from None
    asked = []
    for one in parameters:
        if one.name in GIVEN:
            asked.append(one.name)
        elif one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise InvalidArgument(
                f"prove_fenced cannot give the parameter {one.name!r}. It gives {', '.join(GIVEN)}. For others use "
                "functools.partial, or a default."
            )
    if not asked:
        raise InvalidArgument(
            f"The function takes none of {', '.join(GIVEN)}, so prove_fenced cannot see its statements. Let it reach "
            "the database by one of these."
        )
    return asked


class Holder:
    """A thread that runs the function once."""

    def __init__(self, function: Callable[..., Any], schema: str, lock: str, own: set[int]) -> None:
        """Run under this lock. `own` gets the process IDs of sessions that are not the function's."""
        self._function, self._schema, self._lock, self._own = function, schema, lock, own
        self._asked = parameters_of(function)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.error: BaseException | None = None

    def start(self, dsn: str) -> None:
        """Run the function with a way to the database of this DSN."""
        is_async = inspect.iscoroutinefunction(getattr(self._function, "func", self._function))

        def run() -> None:
            try:
                if is_async:
                    asyncio.run(self._run_async(dsn))
                else:
                    self._run(dsn)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, name="proof holder", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the function has not returned."""
        return self._thread is not None and self._thread.is_alive()

    def is_this_thread(self) -> bool:
        """Whether the calling thread is the one that runs the function."""
        return threading.current_thread() is self._thread

    def join(self, seconds: float) -> bool:
        """Wait for the function to return; False if it does not."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.running

    def where(self) -> Location | None:
        """Return the user's line that the function has reached."""
        thread = self._thread
        if thread is None or thread.ident is None:
            return None
        location = user_location(sys._current_frames().get(thread.ident))
        if location is None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the set of tasks changes
                location = next(filter(None, map(_location_of_task, asyncio.all_tasks(self._loop))), None)
        return location

    def _run(self, dsn: str) -> None:
        import psycopg

        from dblock.client import Client

        with contextlib.ExitStack() as stack:
            given: dict[str, Any] = {"dsn": dsn}
            if "client" in self._asked or "lease" in self._asked:
                given["client"] = stack.enter_context(Client(dsn, schema=self._schema))
            if "engine" in self._asked:
                from sqlalchemy import create_engine

                first = FirstConnection(self._own)
                engine = create_engine("postgresql+psycopg://", creator=lambda: first.note(psycopg.connect(dsn)))
                stack.callback(engine.dispose)
                engine.connect().close()
                engine.dispose()
                given["engine"] = engine
            if "lease" in self._asked:
                given["lease"] = stack.enter_context(given["client"].lock(self._lock))
            if "connection" in self._asked:
                given["connection"] = stack.enter_context(psycopg.connect(dsn))
            self._function(**{name: given[name] for name in self._asked})

    async def _run_async(self, dsn: str) -> None:
        import psycopg

        from dblock.async_client import AsyncClient

        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            given: dict[str, Any] = {"dsn": dsn}
            if "client" in self._asked or "lease" in self._asked:
                given["client"] = await stack.enter_async_context(AsyncClient(dsn, schema=self._schema))
            if "engine" in self._asked:
                from sqlalchemy.ext.asyncio import create_async_engine

                first = FirstConnection(self._own)

                async def connect() -> Any:
                    return first.note(await psycopg.AsyncConnection.connect(dsn))

                engine = create_async_engine("postgresql+psycopg://", async_creator=connect)
                stack.push_async_callback(engine.dispose)
                await (await engine.connect()).close()
                await engine.dispose()
                given["engine"] = engine
            if "lease" in self._asked:
                given["lease"] = await stack.enter_async_context(given["client"].lock(self._lock))
            if "connection" in self._asked:
                connecting = await psycopg.AsyncConnection.connect(dsn)
                given["connection"] = await stack.enter_async_context(connecting)
            await self._function(**{name: given[name] for name in self._asked})


def _location_of_task(task: asyncio.Task[Any]) -> Location | None:
    """Return the user's line at which a task waits."""
    found: Location | None = None
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame: FrameType | None = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            # The frame alone, because a waiting coroutine has no caller.
            found = user_location(frame) or found
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return found

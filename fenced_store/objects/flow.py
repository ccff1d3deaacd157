"""Objects' protocols as flows: generators that yield effects, and the two runners that perform the effects.

A put, a claim or a sweep takes several requests, and is written once. Between any two requests the process may be
stopped or die, and other writers may come first: the flows state what is true there, and the tests stop them there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Effect(NamedTuple):
    """One thing that a flow needs done."""

    target: str
    """What performs it: `objects`, the store of objects; `pointers`, the fenced store that points to them; `body`, a
    reply of `objects` whose body is to be read; `call`, a blocking function; `sleep`."""
    operation: Any
    """The name of the method; for `body` the reply, for `call` the function, for `sleep` the seconds."""
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


Flow = Generator[Effect, Any, T]


def drive(flow: Flow[T], perform: Callable[[Effect], Any]) -> T:
    """Run a flow to its end: perform each effect, and send its reply, or throw its error, into the flow."""
    reply, error = None, None
    while True:
        try:
            effect = flow.send(reply) if error is None else flow.throw(error)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        reply, error = None, None
        try:
            reply = perform(effect)
        except Exception as raised:
            error = raised


async def drive_async(flow: Flow[T], perform: Callable[[Effect], Awaitable[Any]]) -> T:
    """Run a flow to its end, as `drive` does, with effects that are awaited."""
    reply, error = None, None
    while True:
        try:
            effect = flow.send(reply) if error is None else flow.throw(error)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        reply, error = None, None
        try:
            reply = await perform(effect)
        except Exception as raised:
            error = raised


class Runner:
    """Performs effects in the caller's thread."""

    def __init__(self, objects: Any, pointers: Any) -> None:
        self._objects = objects
        self._pointers = pointers

    def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end and return its result."""
        return drive(flow, self.perform)

    def perform(self, effect: Effect) -> Any:
        """Perform one effect and return its reply."""
        if effect.target == "sleep":
            return time.sleep(effect.operation)
        if effect.target == "call":
            return effect.operation(*effect.args)
        if effect.target == "body":
            return bytes(effect.operation.bytes())
        if effect.target == "pointers":
            return getattr(self._pointers, effect.operation)(*effect.args, **effect.options)
        if effect.operation == "list":
            return [entry["path"] for chunk in self._objects.list(*effect.args) for entry in chunk]
        return getattr(self._objects, effect.operation)(*effect.args, **effect.options)


class AsyncRunner:
    """Performs effects in an event loop."""

    def __init__(self, objects: Any, pointers: Any) -> None:
        self._objects = objects
        self._pointers = pointers

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end and return its result."""
        return await drive_async(flow, self.perform)

    async def perform(self, effect: Effect) -> Any:
        """Perform one effect and return its reply."""
        if effect.target == "sleep":
            return await asyncio.sleep(effect.operation)
        if effect.target == "call":
            return await asyncio.to_thread(effect.operation, *effect.args)
        if effect.target == "body":
            return bytes(await effect.operation.bytes_async())
        if effect.target == "pointers":
            return await getattr(self._pointers, effect.operation)(*effect.args, **effect.options)
        if effect.operation == "list":
            return [entry["path"] async for chunk in self._objects.list(*effect.args) for entry in chunk]
        return await getattr(self._objects, f"{effect.operation}_async")(*effect.args, **effect.options)


def call(function: Callable[..., Any], *args: Any) -> Effect:
    """Return the effect that calls a blocking function; an event loop calls it in a thread."""
    return Effect("call", function, args)

"""What takes several requests is written once, as a generator that asks for what it needs; two runners do the asking.

Between any two requests the process may be stopped or die, and others may come first: the generators say what is true
there, and the tests stop them there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Ask(NamedTuple):
    """A request: of whom, what, and with what."""

    of: str
    """`objects`, the store of objects; `pointers`, the fenced store that points to them; `body`, an answer of the
    former; `call`, a function that takes its time; `sleep`."""
    what: Any
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it


Steps = Generator[Ask, Any, T]


class Runner:
    """Does what is asked for, in the caller's thread."""

    def __init__(self, objects: Any, pointers: Any) -> None:
        self._objects = objects
        self._pointers = pointers

    def run(self, steps: Steps[T]) -> T:
        """Go through the steps, and return what they come to."""
        answer, error = None, None
        while True:
            try:
                ask = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            answer, error = None, None
            try:
                answer = self.do(ask)
            except Exception as raised:
                error = raised

    def do(self, ask: Ask) -> Any:
        """Do one of them."""
        if ask.of == "sleep":
            return time.sleep(ask.what)
        if ask.of == "call":
            return ask.what(*ask.args)
        if ask.of == "body":
            return bytes(ask.what.bytes())
        if ask.of == "pointers":
            return getattr(self._pointers, ask.what)(*ask.args, **ask.options)
        if ask.what == "list":
            return [one["path"] for chunk in self._objects.list(*ask.args) for one in chunk]
        return getattr(self._objects, ask.what)(*ask.args, **ask.options)


class AsyncRunner:
    """Does what is asked for, in an event loop."""

    def __init__(self, objects: Any, pointers: Any) -> None:
        self._objects = objects
        self._pointers = pointers

    async def run(self, steps: Steps[T]) -> T:
        """Go through the steps, and return what they come to."""
        answer, error = None, None
        while True:
            try:
                ask = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            answer, error = None, None
            try:
                answer = await self.do(ask)
            except Exception as raised:
                error = raised

    async def do(self, ask: Ask) -> Any:
        """Do one of them."""
        if ask.of == "sleep":
            return await asyncio.sleep(ask.what)
        if ask.of == "call":
            return await asyncio.to_thread(ask.what, *ask.args)
        if ask.of == "body":
            return bytes(await ask.what.bytes_async())
        if ask.of == "pointers":
            return await getattr(self._pointers, ask.what)(*ask.args, **ask.options)
        if ask.what == "list":
            return [one["path"] async for chunk in self._objects.list(*ask.args) for one in chunk]
        return await getattr(self._objects, f"{ask.what}_async")(*ask.args, **ask.options)


def call(what: Callable[..., Any], *args: Any) -> Ask:
    """Ask for a function that takes its time."""
    return Ask("call", what, args)

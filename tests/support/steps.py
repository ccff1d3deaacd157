"""Runs the steps of fenced_store.objects one by one, so that a test can stop where it matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fenced_store.objects import FencedObjects
from fenced_store.objects.flow import Ask, Runner


class Stepwise:
    """A writer that stops before a step, and goes on when told."""

    def __init__(self, objects: FencedObjects, act: Callable[[FencedObjects], Any]) -> None:
        runner = objects._runner
        self.asked: list[Ask] = []
        """What was done so far."""
        self._runner = runner
        self._steps: Any = None
        outer = self

        class Catches(Runner):
            def run(self, steps: Any) -> Any:
                outer._steps = steps
                raise _Caught

        objects._runner = Catches(None, None)
        try:
            act(objects)
        except _Caught:
            pass
        finally:
            objects._runner = runner
        self._answer: Any = None
        self._error: Exception | None = None
        self.result: Any = None
        self.done = False
        self.next: Ask | None = None
        self._advance()

    def until(self, what: str) -> Stepwise:
        """Go on to just before the next step of this name, such as `put`."""
        while not self.done and self.next is not None and self.next.what != what:
            self.step()
        assert not self.done, f"it came to its end before {what}"
        return self

    def step(self) -> None:
        """Do one step."""
        assert self.next is not None
        self.asked.append(self.next)
        self._answer, self._error = None, None
        try:
            self._answer = self._runner.do(self.next)
        except Exception as error:
            self._error = error
        self._advance()

    def finish(self) -> Any:
        """Do all that is left, and return what it comes to, or raise it."""
        while not self.done:
            self.step()
        return self.result

    def _advance(self) -> None:
        try:
            self.next = self._steps.send(self._answer) if self._error is None else self._steps.throw(self._error)
        except StopIteration as done:
            self.done, self.next, self.result = True, None, done.value


class _Caught(BaseException):
    pass

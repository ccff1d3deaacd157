"""Perform the effects of a flow of fenced_store.objects one by one, so that a test can stop before any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fenced_store.objects import FencedObjects
from fenced_store.objects.flow import Effect, Runner


class Stepwise:
    """Runs a writer that stops before each effect until the test continues it."""

    def __init__(self, objects: FencedObjects, act: Callable[[FencedObjects], Any]) -> None:
        runner = objects._runner
        self.performed: list[Effect] = []
        """The effects performed so far."""
        self._runner = runner
        self._flow: Any = None
        outer = self

        class CapturingRunner(Runner):
            def run(self, flow: Any) -> Any:
                outer._flow = flow
                raise _Captured

        objects._runner = CapturingRunner(None, None)
        try:
            act(objects)
        except _Captured:
            pass
        finally:
            objects._runner = runner
        self._reply: Any = None
        self._error: Exception | None = None
        self.result: Any = None
        self.done = False
        self.next: Effect | None = None
        self._advance()

    def until(self, operation: str) -> Stepwise:
        """Perform effects up to the next one with this operation, such as `put`, and stop before it."""
        while not self.done and self.next is not None and self.next.operation != operation:
            self.step()
        assert not self.done, f"the flow ended before {operation}"
        return self

    def step(self) -> None:
        """Perform the next effect."""
        assert self.next is not None
        self.performed.append(self.next)
        self._reply, self._error = None, None
        try:
            self._reply = self._runner.perform(self.next)
        except Exception as error:
            self._error = error
        self._advance()

    def finish(self) -> Any:
        """Perform the remaining effects, and return the flow's result or raise its error."""
        while not self.done:
            self.step()
        return self.result

    def _advance(self) -> None:
        try:
            self.next = self._flow.send(self._reply) if self._error is None else self._flow.throw(self._error)
        except StopIteration as done:
            self.done, self.next, self.result = True, None, done.value


class _Captured(BaseException):
    pass

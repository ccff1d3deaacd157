"""Traces for OpenTelemetry: a span for each wait and for each hold.

client = dblock.Client(dsn, observers=[OpenTelemetryObserver()])

Both spans are children of the span that is current where the lock is acquired. The observer needs only the API of
OpenTelemetry, from the extra `opentelemetry`. Without an SDK in the program, the spans are not recorded.

The span of a hold is not the current span, because a lease may be released in another thread or task than the one that
acquired it. So the spans of your own work inside the `with` are siblings of the hold.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from dblock._core.observation import ObservedHold, ObservedWait, Observer

try:
    from opentelemetry.trace import Span, Status, StatusCode, TracerProvider, get_tracer
except ImportError as error:
    raise ImportError(
        "dblock.observability.opentelemetry needs the API of OpenTelemetry: pip install 'opentelemetry-api>=1.20'"
    ) from error

__all__ = ["OpenTelemetryObserver"]

WAIT, HOLD = "dblock.wait", "dblock.hold"
"""The names of the spans. The name of the lock is an attribute, because there may be any number of them."""


class OpenTelemetryObserver(Observer):
    """Makes the spans. All clients of a process can share one observer."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """Use this provider. With None, use the one that the program has set."""
        self._tracer = get_tracer("dblock", _version(), tracer_provider)
        self._spans: dict[ObservedWait | ObservedHold, Span] = {}
        self._lock = threading.Lock()

    def wait_began(self, wait: ObservedWait) -> None:
        """Start a span below the caller's."""
        self._start(WAIT, wait, {"dblock.lock": ", ".join(wait.locks), "dblock.holder": wait.holder})

    def wait_ended(self, wait: ObservedWait) -> None:
        """End the span, as an error if the caller did not get the lock that it waited for."""
        span = self._end(wait)
        if span is None:
            return
        span.set_attribute("dblock.outcome", str(wait.outcome))
        if wait.token is not None:
            span.set_attribute("dblock.token", wait.token)
        if wait.handoff is not None:
            span.set_attribute("dblock.handoff_seconds", wait.handoff)
        if wait.outcome in ("timeout", "deadlock", "error"):
            if isinstance(wait.error, Exception):
                span.record_exception(wait.error)
            span.set_status(Status(StatusCode.ERROR, str(wait.error) if wait.error else str(wait.outcome)))
        span.end()

    def hold_began(self, hold: ObservedHold) -> None:
        """Start a span below the caller's."""
        attributes: dict[str, str | int] = {"dblock.lock": hold.lock, "dblock.holder": hold.holder}
        if hold.token is not None:
            attributes["dblock.token"] = hold.token
        self._start(HOLD, hold, attributes)

    def hold_ended(self, hold: ObservedHold) -> None:
        """End the span, as an error if the lease was lost."""
        span = self._end(hold)
        if span is None:
            return
        if hold.lost is not None:
            span.set_attribute("dblock.lost", hold.lost)
            span.set_status(Status(StatusCode.ERROR, f"the lease was lost: {hold.lost}"))
        span.end()

    def _start(self, name: str, event: ObservedWait | ObservedHold, attributes: Mapping[str, str | int]) -> None:
        span = self._tracer.start_span(name, attributes=attributes)
        with self._lock:
            self._spans[event] = span

    def _end(self, event: ObservedWait | ObservedHold) -> Span | None:
        with self._lock:
            return self._spans.pop(event, None)


def _version() -> str | None:
    try:
        return version("dblock")
    except PackageNotFoundError:
        return None

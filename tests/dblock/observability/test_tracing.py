"""Spans of OpenTelemetry: one for each wait and each hold, below the caller's span."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import psycopg
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import dblock
from dblock.observability.opentelemetry import OpenTelemetryObserver


class Tracing:
    """A provider whose spans can be read."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        self.observer = OpenTelemetryObserver(provider)

    def spans(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


def _parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def _id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def test_wait_and_hold_of_a_thread_are_children_of_its_span(dsn: str, tracing: Tracing) -> None:
    client = dblock.Client(dsn, observers=[tracing.observer], holder="me")
    with client, tracing.tracer.start_as_current_span("request"), client.lock("order:1") as lease:
        token = lease.token
    request = tracing.one("request")
    for name in ("dblock.wait", "dblock.hold"):
        span = tracing.one(name)
        assert _parent(span) == _id(request)
        assert dict(span.attributes or {}).items() >= {
            ("dblock.lock", "order:1"),
            ("dblock.holder", "me"),
            ("dblock.token", token),
        }
        assert span.status.status_code is StatusCode.UNSET
    assert (tracing.one("dblock.wait").attributes or {})["dblock.outcome"] == "granted"
    wait, hold = tracing.one("dblock.wait"), tracing.one("dblock.hold")
    assert wait.end_time is not None
    assert hold.start_time is not None
    assert wait.end_time <= hold.start_time


async def test_spans_of_each_task_are_children_of_its_own_span(dsn: str, tracing: Tracing) -> None:
    async with dblock.AsyncClient(dsn, observers=[tracing.observer]) as client:

        async def work(number: int) -> None:
            with tracing.tracer.start_as_current_span(f"task {number}"):
                async with client.lock("a"):
                    await asyncio.sleep(0.01)

        await asyncio.gather(*map(work, range(3)))
    for name in ("dblock.wait", "dblock.hold"):
        parents = {_parent(span) for span in tracing.spans(name)}
        assert parents == {_id(tracing.one(f"task {number}")) for number in range(3)}


def test_hold_that_another_thread_releases_keeps_its_parent(dsn: str, tracing: Tracing) -> None:
    with dblock.Client(dsn, observers=[tracing.observer]) as client:
        with tracing.tracer.start_as_current_span("request"):
            lease = client.lock("a").acquire()

        def release() -> None:
            with tracing.tracer.start_as_current_span("elsewhere"):
                lease.release()

        thread = threading.Thread(target=release)
        thread.start()
        thread.join()
    assert _parent(tracing.one("dblock.hold")) == _id(tracing.one("request"))


def test_caller_without_a_span_starts_a_trace(dsn: str, tracing: Tracing) -> None:
    with dblock.Client(dsn, observers=[tracing.observer]) as client, client.lock("a"):
        pass
    assert _parent(tracing.one("dblock.wait")) is None
    assert _parent(tracing.one("dblock.hold")) is None


def test_timeout_makes_the_wait_an_error(dsn: str, client: dblock.Client, tracing: Tracing) -> None:
    with client.lock("a"), dblock.Client(dsn, observers=[tracing.observer]) as other:
        with pytest.raises(dblock.LockTimeout):
            other.lock("a").acquire(timeout=0.05)
        assert other.lock("a").try_acquire() is None
    waited, tried = tracing.spans("dblock.wait")
    assert (waited.status.status_code, (waited.attributes or {})["dblock.outcome"]) == (StatusCode.ERROR, "timeout")
    assert (tried.status.status_code, (tried.attributes or {})["dblock.outcome"]) == (StatusCode.UNSET, "busy")
    assert tracing.spans("dblock.hold") == []


def test_failed_call_makes_the_wait_an_error_with_its_exception(
    dsn: str, client: dblock.Client, tracing: Tracing
) -> None:
    client.semaphore("a", permits=2).acquire().release()
    with dblock.Client(dsn, observers=[tracing.observer]) as other, pytest.raises(dblock.WrongKind):
        other.lock("a").acquire()
    span = tracing.one("dblock.wait")
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]


def test_lost_lease_makes_the_hold_an_error(dsn: str, owner: psycopg.Connection, tracing: Tracing) -> None:
    with dblock.Client(dsn, observers=[tracing.observer]) as client:
        lease = client.lock("a").acquire()
        owner.execute("SELECT force_release('a', %s, now => true)", [lease.token])
        assert lease.release() is False
    span = tracing.one("dblock.hold")
    assert (span.status.status_code, (span.attributes or {})["dblock.lost"]) == (StatusCode.ERROR, "forced")


def test_observer_keeps_no_span_that_has_ended(dsn: str, tracing: Tracing) -> None:
    with dblock.Client(dsn, observers=[tracing.observer]) as client:
        for number in range(20):
            with client.lock(f"a:{number}"):
                pass
    assert tracing.observer._spans == {}


def test_observer_works_with_the_api_alone(dsn: str) -> None:
    """Without an SDK the spans go nowhere."""
    with dblock.Client(dsn, observers=[OpenTelemetryObserver()]) as client, client.lock("a") as lease:
        assert lease.remaining()

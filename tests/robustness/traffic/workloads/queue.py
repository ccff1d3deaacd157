"""Queue many waiters for few locks: with short and long timeouts, with cancelled waits, and with single tries.

The server itself records when a waiter gets a ticket, when the ticket is deleted and when the lock is granted, each in
the transaction and under the locks that decide it. So the order of the records is the order of the events.
"""

from __future__ import annotations

import asyncio
from concurrent import futures
from typing import Any

import psycopg

import dblock
from tests.robustness.checkers import durability, linearizability, loss, queue_order, takeover, token_order, wake_ups
from tests.robustness.history.record import Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

LOCKS = 2

TICKETS = """
CREATE TABLE public.queue_witness (
    number bigserial, event text, name text, token bigint, ticket bigint, attempt uuid, act xid8
);
CREATE FUNCTION public.note_ticket() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO public.queue_witness (event, name, ticket, attempt, act)
        VALUES ('queued', NEW.name, NEW.number, NEW.attempt, pg_current_xact_id());
    ELSE
        INSERT INTO public.queue_witness (event, name, ticket, attempt, act)
        VALUES ('left', OLD.name, OLD.number, OLD.attempt, pg_current_xact_id());
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION public.note_turn() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.queue_witness (event, name, token, attempt, act)
    VALUES ('served', NEW.name, NEW.token, NEW.attempt, pg_current_xact_id());
    RETURN NULL;
END $$;
CREATE TRIGGER queue_witness AFTER INSERT OR DELETE ON dblock.lock_tickets FOR EACH ROW
    EXECUTE FUNCTION public.note_ticket();
CREATE TRIGGER queue_witness AFTER UPDATE ON dblock.distributed_locks FOR EACH ROW
    WHEN (NEW.token > 0 AND NEW.token <> OLD.token) EXECUTE FUNCTION public.note_turn();
"""


class Workload(workloads.Base):
    """Grants follow the order of the tickets."""

    checkers = (
        queue_order.check,
        linearizability.check,
        token_order.check,
        loss.check,
        takeover.check,
        wake_ups.check,
        durability.check,
    )
    threads = 6

    def prepare(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute(TICKETS)

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        name = f"queue {rng.randrange(LOCKS)}"
        draw = rng.random()
        ttl = rng.choice([0.5, 1.0])
        if draw < 0.1:
            lease = worker.try_acquire(name, ttl=ttl)
        elif draw < 0.25 and worker.config.kind == "async":
            _cancel_wait(worker, name, ttl, rng.uniform(0, 0.2))
            return
        else:
            lease = worker.acquire(name, ttl=ttl, timeout=rng.uniform(0, 0.2) if draw < 0.4 else 10)
        if lease is None:
            worker.pause(rng.uniform(0, 0.01))
            return
        worker.hold(lease, rng.uniform(0, 0.005))
        worker.release(lease)

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        # The last client passes over all dead waiters, and leaves no ticket behind.
        with dblock.Client(dsn) as client:
            for number in range(LOCKS):
                try:
                    client.lock(f"queue {number}").acquire(timeout=15).release()
                except dblock.LockTimeout as error:
                    recorder.record("stuck", f"queue {number}", error=str(error))
        with psycopg.connect(dsn) as connection:
            for name, ticket, holder in connection.execute(
                "SELECT name, number, holder FROM dblock.lock_tickets"
            ).fetchall():
                recorder.record("orphan", name, ticket=ticket, holder=holder)
            for number, event, name, token, ticket, attempt, act in connection.execute(
                "SELECT number, event, name, token, ticket, attempt::text, act::text"
                " FROM public.queue_witness ORDER BY number"
            ).fetchall():
                recorder.record(event, name, order=number, token=token, ticket=ticket, attempt=attempt, act=act)


def _cancel_wait(worker: Worker, name: str, ttl: float, after: float) -> None:
    """Begin to wait, then cancel the task; release the lock if it was granted before the cancellation."""
    blocking = worker.client
    number = worker.recorder.begin("acquire", name, ttl=ttl, worker=worker.name, cancelled=True)
    lock = blocking.lock(name, ttl=ttl)._inner
    future = asyncio.run_coroutine_threadsafe(lock.acquire(timeout=10), blocking._loop)
    lease: Any = None
    try:
        lease = future.result(after)
    except futures.TimeoutError:
        future.cancel()
    except Worker.REFUSED as error:
        worker.recorder.end(number, "failed", error=str(error)[:200])
        return
    except Worker.UNKNOWN as error:
        worker.recorder.end(number, "unknown", error=str(error)[:200])
        return
    if lease is None:
        # The lock may have been granted before the cancellation arrived.
        try:
            lease = future.result(0)
        except (futures.CancelledError, futures.TimeoutError, *Worker.REFUSED, *Worker.UNKNOWN):
            worker.recorder.end(number, "unknown", error="cancelled")
            return
    worker.recorder.end(number, "ok", token=lease.token)
    released = asyncio.run_coroutine_threadsafe(lease.release(), blocking._loop)
    worker.recorder.do(
        "release",
        name,
        released.result,
        refused=Worker.REFUSED,
        unknown=Worker.UNKNOWN,
        describe=lambda freed: {"freed": freed},
        token=lease.token,
    )

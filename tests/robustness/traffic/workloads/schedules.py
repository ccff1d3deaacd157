"""Call scheduled functions from every thread, as hosts do: intervals and delays, skipped, queued and caught up.

A run records what it believes, writes an effect inside a transaction that proves its lease, and ends. The database's
ledger and the effects are the final state.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg

import dblock
from dblock._core.lease_state import Reason
from tests.robustness.checkers import linearizability, loss, slots, token_order
from tests.robustness.history.record import FAILED, OK, UNKNOWN, Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

TTL = 1.0

SCHEDULES: dict[str, dict[str, Any]] = {
    "most": {"every": 0.3, "catch_up": "latest"},
    "least": {"every": 0.3, "catch_up": "latest", "delivery": "at-least-once"},
    "queue": {"every": 0.3, "overlap": "queue", "grace": 5},
    "all": {"every": 1, "catch_up": "all", "delivery": "at-least-once"},
    "delay": {"delay": 0.2, "delivery": "at-least-once"},
}
"""Each schedule and its options. Runs of one schedule never overlap."""


SET_BACK = (
    "when the server's clock is set back, no slot is due before the clock has passed the slots that are decided"
    " (docs/guides/schedules.md)"
)


class _Stop(Exception):
    """The worker must stop."""


class Workload(workloads.Base):
    """Each slot is decided once, its outcome is recorded before the next slot runs, and a stale run changes nothing."""

    checkers = (slots.check, linearizability.check, token_order.check, loss.check)
    exempt_checkers = {"clock": {"recovery": SET_BACK}, "clock-back": {"recovery": SET_BACK}}  # noqa: RUF012

    def prepare(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute(
                "CREATE TABLE public.effects (number bigint GENERATED ALWAYS AS IDENTITY, name text, slot timestamptz,"
                " token bigint)"
            )

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        name = rng.choice(list(SCHEDULES))
        lock = f"once:{name}"
        recorder = worker.recorder
        asked_at = time.monotonic()
        released: list[int] = []
        state: dict[str, Any] = {}

        def body() -> None:
            nonlocal asked_at
            run = dblock.current_run()
            worker.interruptions.remember(run.lease)
            details: dict[str, Any] = {"slot": run.slot.isoformat(), "nth": run.number, "token": run.token}
            recorder.record("acquire", lock, called=asked_at, ttl=TTL, worker=worker.name, **details)
            recorder.record("began", name, **details)
            state.update(details)
            held = worker.hold(run.lease, TTL * 1.2 if rng.random() < 0.05 else rng.uniform(0, 0.2))
            if held or rng.random() < 0.5:  # half of the stale runs write in spite of their loss
                self._write(worker, name, run.slot.isoformat(), run.token)
            released.append(recorder.begin("release", lock, token=run.token))
            asked_at = time.monotonic()
            if worker.stopping:
                raise _Stop  # a long backlog would keep the worker from stopping

        async def coroutine() -> None:
            thread = asyncio.ensure_future(asyncio.to_thread(body))
            try:
                await asyncio.shield(thread)
            except asyncio.CancelledError:
                await asyncio.wait([thread])  # the run is over when its thread is
                raise

        once = worker.client.once(name, ttl=TTL, **SCHEDULES[name])
        job = once(worker.interruptions.uninterruptible(body) if worker.config.kind == "sync" else coroutine)
        number = recorder.begin("call", name, worker=worker.name)
        outcome, more = UNKNOWN, {}
        try:
            if worker.config.kind == "sync":
                result = worker.interruptions.interruptible(job)()
            else:
                result = asyncio.run_coroutine_threadsafe(job(), worker.client._loop).result()
            outcome, more = OK, state if result is not dblock.SKIPPED else {}
        except _Stop:
            pass
        except dblock.LeaseLost as error:
            outcome, more = FAILED, {"reason": str(Reason(error.reason)) if error.reason != "over" else "over"}
        except worker.UNKNOWN as error:
            more = {"error": f"{type(error).__name__}: {error}"[:100]}
        recorder.end(number, outcome, **more)
        if outcome == OK:
            for one in released:
                recorder.end(one, OK, freed=True)
        worker.pause(rng.uniform(0, 0.1))

    def _write(self, worker: Worker, name: str, slot: str, token: int) -> None:
        """Write an effect in a transaction that proves the lease of the run."""

        def write() -> bool:
            with psycopg.connect(worker.config.direct) as connection:
                proof = connection.execute("SELECT dblock.assert_held(%s, %s)", [f"once:{name}", token]).fetchone()
                if proof != (True,):
                    raise dblock.LockTimeout(name, 0)
                connection.execute(
                    "INSERT INTO public.effects (name, slot, token) VALUES (%s, %s, %s)", [name, slot, token]
                )
            return True

        worker.recorder.do(
            "effect", name, write, refused=(dblock.LockTimeout,), unknown=(psycopg.Error,), token=token, slot=slot
        )

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        with psycopg.connect(dsn) as connection:
            for row in connection.execute(
                "SELECT name, run, slot, last_slot, slots, number, token, outcome, claimed_at, ended_at"
                " FROM dblock.slot_runs ORDER BY name, run"
            ).fetchall():
                name, run, slot, last, count, number, token, outcome, claimed, ended = row
                recorder.record(
                    "ledger",
                    name,
                    run=run,
                    slot=slot.timestamp(),
                    last_slot=last.timestamp(),
                    slots=count,
                    nth=number,
                    token=token or 0,
                    recorded=outcome,
                    claimed_at=claimed.timestamp(),
                    ended_at=None if ended is None else ended.timestamp(),
                )
            for name, number, token in connection.execute(
                "SELECT name, number, token FROM public.effects ORDER BY number"
            ).fetchall():
                recorder.record("stored", name, order=number, token=token)

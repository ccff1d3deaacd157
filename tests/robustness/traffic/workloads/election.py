"""Elect leaders: campaign with different ranks, lead for a while, write under a fence, transfer, resign, and observe.

In each process one thread observes the log from its first term, and the others are candidates of one election.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

import dblock
from tests.robustness.checkers import durability, loss, observers, term_fence, term_log, token_order
from tests.robustness.history.record import Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

NAME = "leader"
LOCK = f"election:{NAME}"
TTL = 1.0

EVERY = 5.0
"""Seconds from one pause of all candidates to the next, with the option `pause`. All processes share one clock."""


class Workload(workloads.Base):
    """One term at a time, in the order of tokens, and every observer sees all of them."""

    checkers = (
        token_order.check,
        loss.check,
        durability.check,
        term_log.check,
        term_fence.check,
        observers.check,
    )
    threads = 3

    def prepare(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as owner:
            owner.execute("CREATE TABLE public.led (number bigserial, token bigint NOT NULL)")

    def step(self, worker: Worker) -> None:
        """Observe or campaign. With the option `pause`, all candidates pause now and then for so many seconds."""
        if worker.name.endswith(".0"):
            self._observe(worker)
        elif time.monotonic() % EVERY < worker.options.get("pause", 0):
            worker.pause(0.05)
        else:
            self._campaign(worker)

    def _observe(self, worker: Worker) -> None:
        """Read the log on, with a synchronous client of this thread's own."""
        state = worker.state
        if "client" not in state:
            state["client"] = dblock.Client(worker.config.dsn, patience=2.0, presence=None)
            state["since"] = 0
        try:
            for event in state["client"].election(NAME).observe(state["since"], timeout=0.2):
                state["since"] = event
                what = "ended" if isinstance(event, dblock.Vacancy) else "began"
                worker.recorder.record("observed", LOCK, token=event.token, what=what, worker=worker.name)
                if worker.stopping:
                    break
        except (dblock.DatabaseError, dblock.ClientClosed):
            worker.pause(0.1)
        if worker.stopping:
            state.pop("client").close()

    def _campaign(self, worker: Worker) -> None:
        rng = worker.rng
        election = worker.client.election(NAME, ttl=TTL, priority=rng.choice([0, 0, 0, 1]), value=worker.name)
        term = worker.recorder.do(
            "acquire",
            LOCK,
            worker.interruptions.interruptible(lambda: election.campaign(timeout=rng.choice([0.5, 3.0]))),
            refused=worker.REFUSED,
            unknown=worker.UNKNOWN,
            describe=lambda term: {"token": term.token},
            ttl=TTL,
            worker=worker.name,
        )
        if term is None:
            worker.pause(rng.uniform(0, 0.05))
            return
        worker.interruptions.remember(term._lease)
        if rng.random() < 0.15:
            self._transfer(worker, election)
        self._lead(worker, term, TTL * 1.3 if rng.random() < 0.1 else rng.uniform(0, 0.1))
        worker.recorder.do(
            "release",
            LOCK,
            worker.interruptions.interruptible(term.end),
            refused=worker.REFUSED,
            unknown=worker.UNKNOWN,
            token=term.token,
        )

    def _transfer(self, worker: Worker, election: Any) -> None:
        """Ask the leader, which this candidate is unless it was frozen, to hand over to a candidate that waits."""

        def ask() -> None:
            with psycopg.connect(worker.config.direct, connect_timeout=2) as connection:
                waiting = connection.execute("SELECT holder FROM dblock.list_candidates(%s)", [NAME]).fetchall()
            if not waiting:
                raise dblock.TransferRefused(NAME, "", "absent")
            election.transfer(worker.rng.choice(sorted(waiting))[0])

        refused, unknown = (dblock.TransferRefused,), (psycopg.Error, *worker.UNKNOWN)
        worker.recorder.do("hand-over", LOCK, ask, refused=refused, unknown=unknown, worker=worker.name)

    def _lead(self, worker: Worker, term: Any, seconds: float) -> None:
        """Lead for this time, and write under the fence as often as the term is believed."""
        ends = time.monotonic() + seconds
        while True:
            before = time.monotonic()
            if not term.remaining():
                worker.recorder.record("loss", LOCK, token=term.token)
                if worker.rng.random() < 0.5:  # half of the stale leaders write in spite of their loss
                    self._write(worker, term.token)
                return
            worker.recorder.record("believe", LOCK, called=before, token=term.token)
            self._write(worker, term.token)
            left = ends - time.monotonic()
            if left <= 0 or term.ending.is_set():
                return
            time.sleep(min(0.02, left))

    def _write(self, worker: Worker, token: int) -> None:
        try:
            with psycopg.connect(worker.config.direct, connect_timeout=2) as connection:
                (held,) = connection.execute("SELECT dblock.assert_held(%s, %s)", [LOCK, token]).fetchone() or (False,)
                if held:
                    connection.execute("INSERT INTO public.led (token) VALUES (%s)", [token])
        except psycopg.Error:
            pass  # the server is away or cannot write; the fence has accepted nothing that was not committed

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SELECT dblock.election_leader(%s)", [NAME])
            for number, token in connection.execute("SELECT number, token FROM public.led ORDER BY 1").fetchall():
                recorder.record("led", LOCK, order=number, token=token)
            for token, number, began, ended, how in connection.execute(
                "SELECT token, number, date_part('epoch', began_at), date_part('epoch', ended_at), how"
                " FROM dblock.terms ORDER BY token"
            ).fetchall():
                recorder.record("term", LOCK, token=token, number=number, began=began, ended=ended, how=how)

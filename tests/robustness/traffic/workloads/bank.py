"""Transfer money between accounts inside the fence, each transfer with an entry in a journal, while readers add it up.

A transfer may be delayed before it enters the fence, past the end of its lease, and inside the fence, where it keeps
all other transfers out. Readers hold no lock: the balances that they see in one snapshot must add up.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg import IsolationLevel

import fenced_store
from tests.robustness.checkers import bank, durability, fence, linearizability, loss, token_order
from tests.robustness.history.record import Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

ACCOUNTS = 8
EACH = 100

TABLES = """
CREATE TABLE public.accounts (id integer PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE public.journal (
    number bigserial, transfer text, token bigint, source integer, target integer, amount bigint
);
"""


class Workload(workloads.Base):
    """No money appears or disappears, and every acknowledged transfer is in the journal once."""

    checkers = (bank.check, fence.check, linearizability.check, token_order.check, loss.check, durability.check)

    def prepare(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute(TABLES)
            connection.execute("INSERT INTO accounts SELECT g, %s FROM generate_series(1, %s) g", [EACH, ACCOUNTS])

    def step(self, worker: Worker) -> None:
        if worker.rng.random() < 0.2:
            worker.recorder.do(
                "sum", "bank", lambda: _sum(worker), unknown=(psycopg.Error,), describe=lambda found: found
            )
            worker.pause(0.01)
        else:
            self._transfer(worker)

    def _transfer(self, worker: Worker) -> None:
        rng = worker.rng
        ttl = rng.choice([0.3, 0.5, 1.0])
        claims = ["bank"] if rng.random() < 0.3 else []
        draw = rng.random()
        late = draw < float(worker.options.get("late", 0.06))
        kept_alive = not late and rng.random() < float(worker.options.get("kept_alive", 1.0))
        lease = worker.acquire("bank", ttl=0.3 if late else ttl, timeout=3, keep_alive=kept_alive, claims=claims)
        if lease is None:
            return
        worker.believes(lease)
        # Past the end of the lease, so that the transfer meets one of the next holder.
        time.sleep(rng.uniform(0.25, 0.5) if late else 0)
        number = worker.state["number"] = worker.state.get("number", 0) + 1
        source, target = rng.sample(range(1, ACCOUNTS + 1), 2)
        worker.recorder.do(
            "write",
            "bank",
            lambda: _transfer(
                worker, lease.token, f"{worker.name}.{number}", source, target, 0.05 if draw > 0.9 else 0
            ),
            refused=(fenced_store.StaleTokenError,),
            unknown=(psycopg.Error,),
            token=lease.token,
            transfer=f"{worker.name}.{number}",
        )
        worker.release(lease)

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        with psycopg.connect(dsn) as connection:
            for account, balance in connection.execute("SELECT id, balance FROM accounts").fetchall():
                recorder.record("balance", str(account), balance=balance, before=EACH)
            for number, transfer, token, source, target, amount in connection.execute(
                "SELECT number, transfer, token, source, target, amount FROM journal ORDER BY number"
            ).fetchall():
                details = {"transfer": transfer, "token": token, "source": source, "target": target, "amount": amount}
                recorder.record("entry", "bank", order=number, **details)


def _connection(worker: Worker) -> psycopg.Connection[Any]:
    found: psycopg.Connection[Any] | None = worker.state.get("connection")
    if found is None or found.closed or found.broken:
        found = worker.state["connection"] = psycopg.connect(worker.config.direct)
    elif found.info.transaction_status:
        found.rollback()
    return found


def _sum(worker: Worker) -> dict[str, int]:
    connection = _connection(worker)
    connection.isolation_level = IsolationLevel.REPEATABLE_READ
    try:
        with connection.transaction():
            # Two statements, so that only a snapshot shows the same state to both.
            row = connection.execute("SELECT sum(balance)::bigint FROM accounts").fetchone()
            entries = connection.execute("SELECT count(*) FROM journal").fetchone()
    finally:
        if not connection.closed:
            connection.isolation_level = None
    assert row
    assert entries
    return {"total": row[0], "entries": entries[0], "should_be": ACCOUNTS * EACH}


def _transfer(worker: Worker, token: int, transfer: str, source: int, target: int, pause: float) -> bool:
    connection = _connection(worker)
    with connection.transaction(), fenced_store.fence(connection, "bank", token):
        balances = dict(
            connection.execute("SELECT id, balance FROM accounts WHERE id IN (%s, %s)", [source, target]).fetchall()
        )
        time.sleep(pause)
        # Computed from the values read above, not from the current ones: only the fence prevents a lost update.
        amount = balances[source] // 3
        for account, balance in ((source, balances[source] - amount), (target, balances[target] + amount)):
            connection.execute("UPDATE accounts SET balance = %s WHERE id = %s", [balance, account])
        connection.execute(
            "INSERT INTO journal (transfer, token, source, target, amount) VALUES (%s, %s, %s, %s, %s)",
            [transfer, token, source, target, amount],
        )
    return True

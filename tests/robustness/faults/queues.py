"""Keep the rows of queues locked in another transaction, or fill the server's queue of notifications."""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault
from tests.robustness.faults.statements import ForeignRows
from tests.support.servers import major

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment


class ForeignQueues(ForeignRows):
    """Keep the queues of locks locked, as a transaction does that stays open after it has joined them."""

    name = "foreign-queues"
    take = "SELECT FROM dblock.lock_queues WHERE name = %s FOR UPDATE"


class FullNotifications(Fault):
    """Fill the server's queue of notifications, which a session that listens in an open transaction does not read."""

    name = "full-notifications"
    effect = "notifications"
    settings = {"max_notify_queue_pages": "64"}  # noqa: RUF012

    @classmethod
    def missing(cls) -> str | None:
        return None if major() >= 17 else "Postgres 17, whose queue of notifications can be made small"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        with (
            closing(psycopg.connect(env.direct, autocommit=True)) as stuck,
            closing(psycopg.connect(env.direct, autocommit=True)) as noisy,
        ):
            stuck.execute("LISTEN elsewhere")
            stuck.execute("BEGIN")
            stuck.execute("SELECT 1")
            sent = 0
            try:
                while True:
                    noisy.execute("SELECT pg_notify('elsewhere', repeat('x', 7900))")
                    sent += 1
            except psycopg.OperationalError:
                time.sleep(rng.uniform(0.5, 1.5))
        return {"notifications": sent}

"""Put a pooler in transaction mode between the traffic and the server, and kill, pause or reconnect it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault
from tests.support.pooler import PGBOUNCER, Pooler

if TYPE_CHECKING:
    from tests.robustness.traffic.stage import Stage

LONGEST_TTL = 2.0


class PoolerKilled(Fault):
    """Kill the pooler, and start it again."""

    name = "pooler-killed"
    listens_past = False
    """Whether clients have a DSN past the pooler, on which to listen."""

    @classmethod
    def missing(cls) -> str | None:
        return None if PGBOUNCER else "pgbouncer is not installed (Debian: apt-get install pgbouncer)"

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        with Pooler(stage.direct) as pooler:
            stage.props["pooler"] = pooler
            stage.dsn = pooler.dsn
            if self.listens_past:
                stage.options["client"] = {"listen_dsn": stage.direct}
            yield

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        pooler: Pooler = stage.props["pooler"]
        pooler.kill()
        seconds = dice.choice([0, dice.uniform(0, 0.5)])
        time.sleep(seconds)
        pooler.start()
        return {"seconds": seconds}


class PoolerReconnects(PoolerKilled):
    """Make the pooler close each connection to the server as soon as its transaction has ended."""

    name = "pooler-reconnects"
    every = (0.1, 0.4)

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        stage.props["pooler"].command("RECONNECT")
        return {}


class PoolerPaused(PoolerKilled):
    """Pause the pooler for less or more than leases last, and then resume it."""

    name = "pooler-paused"

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        seconds = dice.choice([0.1, 0.5, 1.3]) * LONGEST_TTL
        stage.props["pooler"].command("PAUSE")
        time.sleep(seconds)
        stage.props["pooler"].command("RESUME")
        return {"seconds": seconds}


class PassedPoolerKilled(PoolerKilled):
    """Kill and restart the pooler, with clients that listen past the pooler and have presence there."""

    name = "passed-pooler-killed"
    listens_past = True


class PassedPoolerPaused(PoolerPaused):
    """Pause and resume the pooler, with clients that listen past the pooler and have presence there."""

    name = "passed-pooler-paused"
    listens_past = True

"""Put a pooler in transaction mode between the traffic and the server, and kill, pause, reconnect or cut it off."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault
from tests.robustness.faults.network import LoseReplies
from tests.support.pooler import PGBOUNCER, Pooler
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

LONGEST_TTL = 2.0


class PoolerKilled(Fault):
    """Kill the pooler, and start it again."""

    name = "pooler-killed"
    listens_directly = False
    """Whether clients have a DSN past the pooler, on which to listen."""

    @classmethod
    def missing(cls) -> str | None:
        return None if PGBOUNCER else "pgbouncer is not installed (Debian: apt-get install pgbouncer)"

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        with Pooler(env.direct) as pooler:
            env.components["pooler"] = pooler
            env.dsn = pooler.dsn
            if self.listens_directly:
                env.options["client"] = {"listen_dsn": env.direct}
            yield

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        pooler: Pooler = env.components["pooler"]
        pooler.kill()
        seconds = rng.choice([0, rng.uniform(0, 0.5)])
        time.sleep(seconds)
        pooler.start()
        return {"seconds": seconds}


class PoolerReconnects(PoolerKilled):
    """Make the pooler close each connection to the server as soon as its transaction has ended."""

    name = "pooler-reconnects"
    every = (0.1, 0.4)

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        env.components["pooler"].command("RECONNECT")
        return {}


class PoolerPaused(PoolerKilled):
    """Pause the pooler for less or more than leases last, and then resume it."""

    name = "pooler-paused"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        seconds = rng.choice([0.1, 0.5, 1.3]) * LONGEST_TTL
        env.components["pooler"].command("PAUSE")
        time.sleep(seconds)
        env.components["pooler"].command("RESUME")
        return {"seconds": seconds}


class BypassedPoolerKilled(PoolerKilled):
    """Kill and restart the pooler, with clients that listen past the pooler and have presence there."""

    name = "bypassed-pooler-killed"
    listens_directly = True


class BypassedPoolerPaused(PoolerPaused):
    """Pause and resume the pooler, with clients that listen past the pooler and have presence there."""

    name = "bypassed-pooler-paused"
    listens_directly = True


class PoolerLosesReplies(LoseReplies):
    """Cut connections of the pooler to the server between a request that is performed and its reply."""

    name = "pooler-loses-replies"
    missing = PoolerKilled.missing

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        with Proxy(env.direct) as proxy, Pooler(proxy.dsn) as pooler:
            env.components["proxy"] = proxy
            env.dsn = pooler.dsn
            yield

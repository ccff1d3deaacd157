"""Stop traffic processes past the end of their leases, kill them, fork them, or interrupt them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault
from tests.robustness.traffic.interruptions import CANCEL, FORK

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment


class Freeze(Fault):
    """Stop a process past the end of its leases, and then let it continue."""

    name = "freeze"
    seconds = (0.4, 2.6)
    """Least and most seconds. The leases of the workloads last for 2 s at most."""

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        victim = rng.choice(sorted(env.workers))
        process = env.workers[victim]
        seconds = rng.uniform(*self.seconds)
        try:
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)
        return {"victim": victim, "seconds": seconds}


class FreezePast(Freeze):
    """Stop a process for longer than the leases of the sets last, so that all that it writes afterwards is stale."""

    name = "freeze-past"
    seconds = (1.05, 1.4)


class Kill(Fault):
    """Kill a process, and start another one in its place."""

    name = "kill"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        victim = rng.choice(sorted(env.workers))
        process = env.workers.pop(victim)
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        return {"victim": victim, "instead": env.start_worker()}


class Fork(Fault):
    """Fork a process, whatever its threads hold; the child tries to use what it has inherited."""

    name = "fork"
    every = (0.05, 0.4)

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        env.options["interruption"] = "fork"
        yield

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        worker = rng.choice(sorted(env.workers))
        env.workers[worker].send_signal(FORK)
        return {"worker": worker}


class Cancel(Fault):
    """Cancel a call at any of its awaits, or by an exception in the middle of it."""

    name = "cancel"
    every = (0.01, 0.1)

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        env.options["interruption"] = "cancel"
        yield

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        worker = rng.choice(sorted(env.workers))
        env.workers[worker].send_signal(CANCEL)
        return {"worker": worker}

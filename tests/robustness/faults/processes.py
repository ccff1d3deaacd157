"""Processes of the traffic that are stopped, for longer than their leases last, killed, forked, or interrupted."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault
from tests.robustness.traffic.interruptions import FORK, GIVE_UP

if TYPE_CHECKING:
    from tests.robustness.traffic.stage import Stage


class Freeze(Fault):
    """A process is stopped past the end of its leases, and goes on as if nothing had been."""

    name = "freeze"
    seconds = (0.4, 2.6)
    """For how long; the leases of the workloads last for 2 s at most."""

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        victim = dice.choice(sorted(stage.workers))
        process = stage.workers[victim]
        seconds = dice.uniform(*self.seconds)
        try:
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)
        return {"victim": victim, "seconds": seconds}


class FreezePast(Freeze):
    """The same, always for longer than the leases of the sets last: whatever is written then is stale."""

    name = "freeze-past"
    seconds = (1.05, 1.4)


class Kill(Fault):
    """A process is killed, and another starts in its place."""

    name = "kill"

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        victim = dice.choice(sorted(stage.workers))
        process = stage.workers.pop(victim)
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        return {"victim": victim, "instead": stage.start_worker()}


class Fork(Fault):
    """A process forks, whatever its threads hold; the child tries what it has inherited."""

    name = "fork"
    every = (0.05, 0.4)

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        stage.options["befalls"] = "forks"
        yield

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        whom = dice.choice(sorted(stage.workers))
        stage.workers[whom].send_signal(FORK)
        return {"whom": whom}


class Cancel(Fault):
    """A call is given up at any of its awaits, or by an exception in the middle of it."""

    name = "cancel"
    every = (0.01, 0.1)

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        stage.options["befalls"] = "giving up"
        yield

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        whom = dice.choice(sorted(stage.workers))
        stage.workers[whom].send_signal(GIVE_UP)
        return {"whom": whom}

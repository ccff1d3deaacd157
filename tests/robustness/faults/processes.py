"""Processes of the traffic that are stopped, for longer than their leases last, or killed."""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.stages import Stage


class Freeze(Fault):
    """A process is stopped past the end of its leases, and goes on as if nothing had been."""

    name = "freeze"
    longest_ttl = 2.0

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        victim = dice.choice(sorted(stage.workers))
        process = stage.workers[victim]
        process.send_signal(signal.SIGSTOP)
        seconds = dice.uniform(0.2, 1.3) * self.longest_ttl
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        return {"victim": victim, "seconds": seconds}


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

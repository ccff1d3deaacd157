"""Set the server's clock while it runs: ahead, back, or both.

Only the time of day is changed. The server's monotonic clock continues, as it does when a real clock is set.
"""

from __future__ import annotations

import glob
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

HOUR = 3600

EARLY = (
    "when the server's clock is set ahead, leases expire earlier than their holders believe"
    " (docs/concepts/protocol.md, Whose clock). The token protects the resource"
)
ABANDONED_AFTER = 8.0
"""Seconds after which no holder trusts a lease that was not renewed under the current clock."""

FORCE_RELEASE = """
SELECT dblock.force_release(name, token, 'operator', 'the clock was set back', now => true)
FROM unnest(%s::text[], %s::bigint[]) AS held (name, token)
"""

LATE = (
    "when the server's clock is set back, a lock stays held that much longer (docs/concepts/protocol.md, Whose clock)"
)


def library() -> str | None:
    """Return the path of libfaketime, which changes the time that a program sees, or None."""
    found = sorted(glob.glob("/usr/lib/*/faketime/libfaketime.so.1") + glob.glob("/usr/lib/faketime/libfaketime.so.1"))
    return found[0] if found else None


class Clock(Fault):
    """Set the clock by an hour, ahead or back."""

    name = "clock"
    steps: tuple[int, ...] = (-HOUR, HOUR)
    exempt_checkers = {"linearizability": EARLY, "loss reported first": EARLY, "takeover in time": LATE}  # noqa: RUF012

    @classmethod
    def missing(cls) -> str | None:
        return None if library() else "libfaketime is not installed (Debian: apt-get install libfaketime)"

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        """Restart the server with the library preloaded."""
        offset = env.server.folder / "clock"
        self._set(offset, 0)
        env.components["clock"], env.components["offset"] = offset, 0
        env.server.stop()
        env.server.environment |= {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
        }
        env.server.start()
        yield

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        step = rng.choice(self.steps)
        env.components["offset"] += step
        self._set(env.components["clock"], env.components["offset"])
        return {"step": step, "offset": env.components["offset"], "freed": self._release_abandoned(env)}

    def recover(self, env: Environment) -> None:
        until = time.monotonic() + ABANDONED_AFTER + self.afterwards
        while time.monotonic() < until:
            time.sleep(0.5)
            self._release_abandoned(env)

    def _release_abandoned(self, env: Environment) -> int:
        """Force-release the locks that stay held for an hour without a holder, as an operator would; count them."""
        known: dict[tuple[str, int], float] = env.components.setdefault("held for long", {})
        with psycopg.connect(env.direct, autocommit=True) as owner:
            found = owner.execute(
                "SELECT name, token FROM dblock.distributed_locks"
                " WHERE expires_at > clock_timestamp() + interval '1 minute'"
            ).fetchall()
            now = time.monotonic()
            env.components["held for long"] = {one: known.get(one, now) for one in found}
            abandoned = [one for one, since in env.components["held for long"].items() if now - since > ABANDONED_AFTER]
            owner.execute(FORCE_RELEASE, [[name for name, _ in abandoned], [token for _, token in abandoned]])
            owner.execute("SELECT dblock.wake_queue(name) FROM unnest(%s::text[]) AS name", [[n for n, _ in abandoned]])
        return len(abandoned)

    @staticmethod
    def _set(path: Path, seconds: int) -> None:
        """Set the offset of the server's clock from ours, and never leave the file half written."""
        new = path.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        os.chmod(new, 0o644)
        os.replace(new, path)


class ClockAhead(Clock):
    """Set the clock ahead by an hour, repeatedly."""

    name = "clock-ahead"
    steps = (HOUR,)
    exempt_checkers = {"linearizability": EARLY, "loss reported first": EARLY}  # noqa: RUF012


class ClockBack(Clock):
    """Set the clock back by an hour, repeatedly."""

    name = "clock-back"
    steps = (-HOUR,)
    exempt_checkers = {"takeover in time": LATE}  # noqa: RUF012

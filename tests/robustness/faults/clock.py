"""The server's clock is set while it runs: ahead, back, or either.

Only the time of day is; what counts the time since the machine's start goes on, as it does where a real clock is set.
"""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.stages import Stage

HOUR = 3600

EARLY = (
    "when the server's clock is set ahead, leases run out earlier than their holders believe (docs/protocol.md, Whose"
    " clock); what protects the resource is the token"
)
LATE = "when the server's clock is set back, a lock stays held that much longer (docs/protocol.md, Whose clock)"


def library() -> str | None:
    """Find the library that lies to a program about the time."""
    found = sorted(glob.glob("/usr/lib/*/faketime/libfaketime.so.1") + glob.glob("/usr/lib/faketime/libfaketime.so.1"))
    return found[0] if found else None


class Clock(Fault):
    """The clock is set by an hour, ahead or back."""

    name = "clock"
    steps: tuple[int, ...] = (-HOUR, HOUR)
    excuses = {"linearizability": EARLY, "loss told first": EARLY, "takeover in time": LATE}  # noqa: RUF012

    @classmethod
    def missing(cls) -> str | None:
        return None if library() else "libfaketime is not installed (Debian: apt-get install libfaketime)"

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        """Start the server again, with the library before its own."""
        offset = stage.server.folder / "clock"
        self._set(offset, 0)
        stage.props["clock"], stage.props["offset"] = offset, 0
        stage.server.stop()
        stage.server.environment |= {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
        }
        stage.server.start()
        yield

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        step = dice.choice(self.steps)
        stage.props["offset"] += step
        self._set(stage.props["clock"], stage.props["offset"])
        return {"step": step, "offset": stage.props["offset"]}

    @staticmethod
    def _set(path: Path, seconds: int) -> None:
        """Have the server's clock differ from ours by so much; never by a file that is half written."""
        new = path.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        os.chmod(new, 0o644)
        os.replace(new, path)


class ClockAhead(Clock):
    """The clock is set ahead by an hour, again and again."""

    name = "clock-ahead"
    steps = (HOUR,)
    excuses = {"linearizability": EARLY, "loss told first": EARLY}  # noqa: RUF012


class ClockBack(Clock):
    """The clock is set back by an hour, again and again."""

    name = "clock-back"
    steps = (-HOUR,)
    excuses = {"takeover in time": LATE}  # noqa: RUF012

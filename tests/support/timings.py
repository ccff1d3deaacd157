"""Give a client other intervals and patiences than those of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dblock._core import timings
from dblock._core.timings import Timings


def timings_with(**changes: Any) -> Timings:
    """Return the timings of clients in this run, with these fields changed."""
    return replace(timings.default, **changes)


def polls_every(seconds: float) -> Timings:
    """Return timings with which a waiter looks for itself this rarely, so that only a notification wakes it in time."""
    return timings_with(
        early_check=seconds,
        heartbeat_interval=seconds,
        holder_check_interval=seconds,
        poll_interval=seconds,
        poll_interval_of_others=seconds,
    )

"""The slots of a cron expression in a time zone.

The library `cronsim` computes them as Debian's cron does. A job at a fixed time runs exactly once on the days on which
the clocks change: if that time does not exist, at the end of the gap, and if it exists twice, the first time. A job
with a wildcard in its hour or minute follows the time that passes, so a minutely job runs 60 times in each hour.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from dblock._core.options import brief, is_text
from dblock.errors import ConfigurationError, InvalidArgument

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from dblock._core.slots import Plan

AHEAD = 100
"""How many slots after now a plan has, so that a host need not plan again for a while."""

MOST = 20_000
"""How many slots one plan has at most. After a long outage the database asks for several plans."""

FIELDS = "five fields: minute, hour, day of the month, month and day of the week, as in '30 2 * * *'"
"""What a cron expression is made of, for error messages."""

HORIZON = timedelta(days=3650)
"""A plan of rare slots need not reach further than this."""


def planner(name: str, expression: str, tz: str) -> Plan:
    """Check a cron expression and its time zone, and return a function that computes the slots."""
    try:
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigurationError(
            f"Schedule {name!a:.80} has a cron expression, which needs the package cronsim. "
            "Install it: pip install 'dblock[cron]'."
        ) from None
    if not is_text(expression) or len(expression.split()) != 5:
        raise InvalidArgument(f"cron of schedule {name!a:.80} has {FIELDS}; got {brief(expression)}.")
    try:
        zone = ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise InvalidArgument(
            f"tz of schedule {name!a:.80} is a time zone such as 'Europe/Berlin'; got {brief(tz)}. "
            "If this machine has no time zones, install them: pip install 'dblock[cron]'."
        ) from None
    try:
        next(CronSim(expression, datetime.now(zone)))
    except CronSimError as error:
        raise InvalidArgument(
            f"cron of schedule {name!a:.80} cannot be read ({str(error).lower()}): {brief(expression)}. Write {FIELDS}."
        ) from None
    except StopIteration:
        raise InvalidArgument(
            f"cron of schedule {name!a:.80} is {brief(expression)}, which is never due. Change its day or month."
        ) from None
    return functools.partial(slots, expression, zone)


def slots(expression: str, zone: ZoneInfo, after: datetime, now: datetime) -> Sequence[int]:
    """Return the slots after a moment, as seconds since 1970: all up to now, and some after it."""
    from cronsim import CronSim

    found: list[int] = []
    ahead = 0
    last = after
    for local in CronSim(expression, after.astimezone(zone)):
        slot = local.astimezone(timezone.utc)
        if slot <= last:
            # Two times in the gap of a clock change are the same moment, and `after` may lie in a repeated hour.
            continue
        found.append(int(slot.timestamp()))
        last = slot
        ahead += slot > now
        if ahead >= AHEAD or len(found) >= MOST or (ahead >= 2 and slot > now + HORIZON):
            break
    return found

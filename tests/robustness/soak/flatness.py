"""Judge whether a figure stayed flat: compare the end of a soak with its beginning, and check the slope.

The first twelfth of the time is for warming up and is ignored. Then the median of the second and third twelfth is
compared with the median of the last two. In an hour, these are minutes 5 to 15 and minutes 50 to 60. So that a slow
rise shows even if both medians are noisy, the slope is checked too. It is the median of the slopes between all pairs of
points (Theil and Sen), which a few outliers cannot move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

WARM_UP, EARLY, LATE = 1 / 12, 3 / 12, 10 / 12
MOST_POINTS = 240


@dataclass(frozen=True)
class Rule:
    """The most that a figure may change: by a factor, or by an amount that is noise at any level."""

    factor: float
    slack: float
    why: str
    falls: bool = False
    """Whether a fall of the figure is bad, instead of a rise."""


MEMORY = Rule(1.10, 4.0, "an allocator keeps some of what was ever used. A leak continues, and is larger after an hour")
COUNTS = Rule(1.0, 2.0, "a burst may add one or two for a minute. A leak adds up")
CONNECTIONS = Rule(1.0, 4.0, "short-lived clients may or may not be there when the connections are counted")
SIZE = Rule(1.25, 0.5, "the space of deleted rows is reused after a vacuum, which runs once a minute at most")
DEAD = Rule(1.5, 5000.0, "vacuum works in jumps: it waits until a fifth of a table is dead")
RATE = Rule(0.8, 0.0, "the machine does other work as well", falls=True)
P50 = Rule(1.25, 0.05, "the machine does other work as well")
P99 = Rule(1.5, 2.0, "a few slow commits to the disk dominate it")


@dataclass
class Series:
    """One figure over time."""

    name: str
    unit: str
    rule: Rule
    points: list[tuple[float, float]] = field(default_factory=list)
    """Minutes since the start, and the figure at that time."""


@dataclass(frozen=True)
class Verdict:
    """How one figure has changed."""

    name: str
    unit: str
    early: float
    late: float
    slope: float
    """The change over the judged time according to the slope."""
    flat: bool
    rule: Rule

    @property
    def ratio(self) -> float:
        return self.late / self.early if self.early else float(self.late > 0) + 1.0


def judge(series: Series, minutes: float) -> Verdict | None:
    """Judge whether a figure stayed flat; return None if there are too few points."""
    seen = [point for point in series.points if point[0] >= WARM_UP * minutes]
    early = [value for at, value in seen if at < EARLY * minutes]
    late = [value for at, value in seen if at >= LATE * minutes]
    if not early or not late:
        return None
    before, after = median(early), median(late)
    change = slope(seen) * (1 - WARM_UP) * minutes
    rule = series.rule
    if rule.falls:
        flat = after >= before * rule.factor - rule.slack
    else:
        most = before * rule.factor + rule.slack
        flat = after <= most and before + change <= most
    return Verdict(series.name, series.unit, before, after, change, flat, rule)


def slope(points: list[tuple[float, float]]) -> float:
    """Return the median of the slopes between all pairs of points."""
    thinned = points[:: max(len(points) // MOST_POINTS, 1)]
    slopes = [
        (late - early) / (after - before)
        for number, (before, early) in enumerate(thinned)
        for after, late in thinned[number + 1 :]
        if after > before
    ]
    return median(slopes) if slopes else 0.0


def all_series(samples: list[dict[str, Any]]) -> list[Series]:
    """Make series from the samples of a run."""
    made: dict[str, Series] = {}

    def add(name: str, unit: str, rule: Rule, at: float, value: float | None) -> None:
        if value is not None:
            made.setdefault(name, Series(name, unit, rule)).points.append((at, value))

    for sample in samples:
        at = sample["minute"]
        for name, one in sample["processes"].items():
            add(f"memory of {name}", "MB", MEMORY, at, one["memory"])
            add(f"threads of {name}", "", COUNTS, at, one["threads"])
            add(f"files of {name}", "", COUNTS, at, one["files"])
        server, traffic = sample["server"], sample["traffic"]
        add("connections", "", CONNECTIONS, at, server["connections"])
        add("memory of a session", "MB", MEMORY, at, server["memory"] / max(server["connections"], 1))
        for table, one in server["tables"].items():
            add(f"size of {table}", "MB", SIZE, at, one["table"] / 2**20)
            add(f"indexes of {table}", "MB", SIZE, at, one["indexes"] / 2**20)
            add(f"dead rows of {table}", "", DEAD, at, one["dead"])
        add("operations", "/s", RATE, at, traffic["rate"])
        add("p50", "ms", P50, at, traffic["p50"])
        add("p99", "ms", P99, at, traffic["p99"])
        done = traffic["rate"] * sample["seconds"]
        add("WAL per operation", "kB", SIZE, at, server["wal"] / 1024 / done if done else None)
    return list(made.values())

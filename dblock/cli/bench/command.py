"""`dblock bench`: how quick the locks are on this database; shown as a table, ratios and a histogram."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from dblock.cli.context import Asked, command
from dblock.cli.output import table
from dblock.cli.signals import ended_in_order

if TYPE_CHECKING:
    from dblock.cli.bench.measure import Measured, Progress, Timed

SHOWN = {
    "round_trip": "bare round trip (SELECT 1)",
    "commit": "bare durable commit",
    "pair": "acquire and release",
    "many": "acquire and release, {clients} at once",
    "handoff": "hand-off, {waiters} in line",
}
BAR = 40
"""How wide the longest bar of a histogram is."""


@command("bench")
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 600),
    default=10.0,
    show_default=True,
    metavar="S",
    help="How long it may take in all.",
)
@click.option(
    "--clients",
    type=click.IntRange(1, 500),
    default=4,
    show_default=True,
    metavar="N",
    help="How many clients at once, where there are several.",
)
def bench(asked: Asked, seconds: float, clients: int) -> None:
    """Measure how quick the locks are on this database, beside a bare round trip and a bare commit.

    It uses locks of its own, and any role that may lock can run it. docs/reference/bench.md says how to
    read the figures.
    """
    from dblock.cli.bench.measure import measure

    if math.isnan(seconds):
        raise click.BadParameter("it is a number of seconds.", param_hint="'--seconds'")
    with ended_in_order(), _quietly():
        target = asked.installed()
        with _progress() as progress:
            measured = measure(target, asked.schema, seconds, clients, progress)

    def said() -> None:
        click.echo(f"Locks in schema {asked.schema!r} of {target}:\n")
        _show(measured)

    asked.answer(facts(measured), said)


def facts(measured: Measured) -> dict[str, Any]:
    """Return the figures as JSON has them, times in milliseconds."""
    return {
        "clients": measured.clients,
        "waiters": measured.waiters,
        "fsync": measured.fsync,
        **{what: _figures(getattr(measured, what)) for what in SHOWN},
        "pair_in_round_trips": measured.times("round_trip"),
        "pair_in_commits": measured.times("commit"),
        "pair_histogram": [
            {"from_ms": low * 1000, "to_ms": high * 1000, "count": count}
            for low, high, count in buckets(measured.pair.samples if measured.pair else [])
        ],
        "locks_left": f"{measured.prefix}:*",
    }


def _figures(timed: Timed | None) -> dict[str, float] | None:
    if timed is None or not timed.samples:
        return None
    return {
        "count": len(timed.samples),
        "per_second": timed.rate,
        "median_ms": timed.quantile(0.5) * 1000,
        "p90_ms": timed.quantile(0.9) * 1000,
        "p99_ms": timed.quantile(0.99) * 1000,
        "max_ms": timed.quantile(1.0) * 1000,
    }


def _show(measured: Measured) -> None:
    rows = []
    for what, name in SHOWN.items():
        timed: Timed | None = getattr(measured, what)
        said = name.format(clients=measured.clients, waiters=measured.waiters)
        if timed is None or not timed.samples:
            rows.append([said, *["-"] * 5])
        else:
            quantiles = [f"{timed.quantile(part) * 1000:.2f}" for part in (0.5, 0.9, 0.99, 1.0)]
            rows.append([said, *quantiles, f"{timed.rate:.0f}"])
    table(["MILLISECONDS", "MEDIAN", "P90", "P99", "MAX", "A SECOND"], rows)
    trips, commits = measured.times("round_trip"), measured.times("commit")
    in_commits = f" or {commits:.1f} commits" if commits else ""
    if trips:
        click.echo(f"\nA pair takes as long as {trips:.1f} round trips{in_commits}.")
    if not measured.fsync:
        click.echo("This server does not wait for its disk (fsync is off): nothing is durable, and it is quicker so.")
    if measured.pair:
        click.echo("\nHow long a pair of acquire and release took:")
        _draw_histogram(measured.pair.samples)
    click.echo(f"\n{measured.locks} free locks named '{measured.prefix}:…' stay until the reaper takes them.")


def buckets(samples: list[float], most: int = 12) -> list[tuple[float, float, int]]:
    """Count times into buckets that are each as many times the one before: from, below, how many."""
    if not samples:
        return []
    times = [max(one, 1e-6) for one in samples]
    # Each power of two in parts, or several of them as one, so that there are not too many buckets.
    spread, parts = math.log2(max(times) / min(times)), 4.0
    while spread * parts >= most - 1:
        parts /= 2
    places = [math.floor(math.log2(one) * parts) for one in times]
    return [
        (2 ** (place / parts), 2 ** ((place + 1) / parts), places.count(place))
        for place in range(min(places), max(places) + 1)
    ]


def _draw_histogram(samples: list[float]) -> None:
    counted = buckets(samples)
    highest = max(count for _, _, count in counted)
    fine = sys.stdout.isatty() and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
    for low, high, count in counted:
        width = math.ceil(count / highest * BAR)
        said, bar = f"{low * 1000:9.2f} to {high * 1000:8.2f} ms ", ("█" if fine else "#") * width
        if sys.stdout.isatty():
            console.print(Text.assemble(said, (f"{bar} ", "cyan"), (str(count), "dim")))
        else:
            click.echo(f"{said}{bar} {count}".rstrip())


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep to ourselves what the clients find amiss: it is in the figures, or ends in an error."""
    log = logging.getLogger("dblock")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show at a terminal how far it is, on standard error."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:<26}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=8) as bars:
        from dblock.cli.bench.measure import SHARES

        task = bars.add_task("", total=1.0)
        before = {what: sum(list(SHARES.values())[:number]) for number, what in enumerate(SHARES)}

        def show(what: str, part: float) -> None:
            name = SHOWN[what].partition(" (")[0].partition(",")[0]
            bars.update(task, description=name, completed=before[what] + part * SHARES[what])

        yield show

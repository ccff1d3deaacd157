"""`dblock bench`: measure the locks on this database; print a table, ratios and a histogram."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from dblock.cli.context import CommandContext, command
from dblock.cli.output import suppress_warnings, table
from dblock.cli.signals import exit_on_signal

if TYPE_CHECKING:
    from dblock.cli.bench.measure import Progress, Results, Timing

LABELS = {
    "round_trip": "bare round trip (SELECT 1)",
    "commit": "bare durable commit",
    "pair": "acquire and release",
    "many": "acquire and release, {clients} at once",
    "handoff": "hand-off, {waiters} in the queue",
}
BAR_WIDTH = 40
"""The width of the longest bar of the histogram."""


@command("bench")
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 600),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Total duration in seconds.",
)
@click.option(
    "--clients",
    type=click.IntRange(1, 500),
    default=4,
    show_default=True,
    metavar="N",
    help="Number of clients in the concurrent measurements.",
)
def bench(context: CommandContext, seconds: float, clients: int) -> None:
    """Measure the speed of the locks on this database, compared with a bare round trip and a bare commit.

    The benchmark uses its own locks. Any role that may lock can run it. docs/reference/bench.md explains the figures.
    """
    from dblock.cli.bench.measure import measure

    if math.isnan(seconds):
        raise click.BadParameter("must be a number of seconds.", param_hint="'--seconds'")
    with exit_on_signal(), suppress_warnings():
        target = context.installed_target()
        with _progress() as progress:
            results = measure(target, context.schema, seconds, clients, progress)

    def render() -> None:
        click.echo(f"Locks in schema {context.schema!r} of {target}:\n")
        _print_results(results)

    context.output(results_data(results), render)


def results_data(results: Results) -> dict[str, Any]:
    """Return the figures as JSON data, with times in milliseconds."""
    return {
        "clients": results.clients,
        "waiters": results.waiters,
        "fsync": results.fsync,
        **{what: _timing_data(getattr(results, what)) for what in LABELS},
        "pair_in_round_trips": results.ratio("round_trip"),
        "pair_in_commits": results.ratio("commit"),
        "pair_histogram": [
            {"from_ms": low * 1000, "to_ms": high * 1000, "count": count}
            for low, high, count in buckets(results.pair.samples if results.pair else [])
        ],
        "locks_left": f"{results.prefix}:*",
    }


def _timing_data(timing: Timing | None) -> dict[str, float] | None:
    if timing is None or not timing.samples:
        return None
    return {
        "count": len(timing.samples),
        "per_second": timing.rate,
        "median_ms": timing.quantile(0.5) * 1000,
        "p90_ms": timing.quantile(0.9) * 1000,
        "p99_ms": timing.quantile(0.99) * 1000,
        "max_ms": timing.quantile(1.0) * 1000,
    }


def _print_results(results: Results) -> None:
    rows = []
    for what, name in LABELS.items():
        timing: Timing | None = getattr(results, what)
        label = name.format(clients=results.clients, waiters=results.waiters)
        if timing is None or not timing.samples:
            rows.append([label, *["-"] * 5])
        else:
            quantiles = [f"{timing.quantile(part) * 1000:.2f}" for part in (0.5, 0.9, 0.99, 1.0)]
            rows.append([label, *quantiles, f"{timing.rate:.0f}"])
    table(["MILLISECONDS", "MEDIAN", "P90", "P99", "MAX", "PER SECOND"], rows)
    trips, commits = results.ratio("round_trip"), results.ratio("commit")
    in_commits = f" or {commits:.1f} commits" if commits else ""
    if trips:
        click.echo(f"\nAn acquire and release takes as long as {trips:.1f} round trips{in_commits}.")
    if not results.fsync:
        click.echo(
            "This server does not wait for its disk (fsync is off), so nothing is durable and the figures are too good."
        )
    if results.pair:
        click.echo("\nDistribution of acquire and release:")
        _draw_histogram(results.pair.samples)
    click.echo(f"\n{results.locks} free locks named '{results.prefix}:…' remain until the reaper deletes them.")


def buckets(samples: list[float], max_buckets: int = 12) -> list[tuple[float, float, int]]:
    """Count samples into buckets of equal ratio; return the lower and upper bound and the count of each."""
    if not samples:
        return []
    times = [max(one, 1e-6) for one in samples]
    # A bucket is a part of a power of two, or several powers of two, so that there are not too many buckets.
    spread, parts = math.log2(max(times) / min(times)), 4.0
    while spread * parts >= max_buckets - 1:
        parts /= 2
    positions = [math.floor(math.log2(one) * parts) for one in times]
    return [
        (2 ** (position / parts), 2 ** ((position + 1) / parts), positions.count(position))
        for position in range(min(positions), max(positions) + 1)
    ]


def _draw_histogram(samples: list[float]) -> None:
    histogram = buckets(samples)
    highest = max(count for _, _, count in histogram)
    unicode = sys.stdout.isatty() and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
    for low, high, count in histogram:
        width = math.ceil(count / highest * BAR_WIDTH)
        label, bar = f"{low * 1000:9.2f} to {high * 1000:8.2f} ms ", ("█" if unicode else "#") * width
        if sys.stdout.isatty():
            console.print(Text.assemble(label, (f"{bar} ", "cyan"), (str(count), "dim")))
        else:
            click.echo(f"{label}{bar} {count}".rstrip())


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show the progress on standard error, if that is a terminal."""
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
            name = LABELS[what].partition(" (")[0].partition(",")[0]
            bars.update(task, description=name, completed=before[what] + part * SHARES[what])

        yield show

"""A question: what it asks, and the options of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bench.harness import loads
from bench.harness.arena import Arena
from bench.harness.contender import Contender
from bench.harness.loads import Ledger, Pairs, Turns
from bench.harness.rounds import Block, Cost, Measured, Sample, cause, interleave, progress, quantile, say
from bench.harness.table import Table
from bench.harness.workers import Team, WorkerError

T = TypeVar("T")


@dataclass
class Run:
    """The options of a run, and the servers that it has started."""

    arena: Arena
    quick: bool = False
    rounds: int | None = None
    repeat: bool = True
    scratch: Path = field(default_factory=Path)
    failed: dict[str, str] = field(default_factory=dict)
    """What went wrong with contenders in some table of this question."""
    not_started: dict[str, str] = field(default_factory=dict)
    """What went wrong with contenders that are in no table of this question."""

    def pick(self, full: T, quick: T) -> T:
        """Return the size of this run."""
        return quick if self.quick else full

    def interleave(self, blocks: dict[str, Block], rounds: int) -> Measured:
        """Run the blocks in turns, for this number of rounds unless the caller chose another."""
        measured = interleave(blocks, self.rounds or self.pick(rounds, 1), repeat=self.repeat and not self.quick)
        self.failed |= measured.failed
        return measured

    def teams(
        self, stack: ExitStack, contenders: Sequence[Contender], clients: int, kind: str = "process"
    ) -> dict[str, Team]:
        """Start a team for each contender. One whose clients do not start is left out, with a message."""
        ready = {}
        teams = [Team(one, clients, kind) for one in contenders]
        for team in teams:
            stack.callback(team.kill)
            team.start()  # all at once, because each waits most of the time
        for team in teams:
            name = team.contender.name
            progress(f"starting {name}")
            try:
                ready[name] = stack.enter_context(team)
            except WorkerError as error:
                self.not_started[name] = f"its clients did not start: {cause(error)}"
                say(f"{name} is left out: {self.not_started[name]}", error)
        return ready


@dataclass(frozen=True)
class Question:
    """One question."""

    name: str
    asks: str
    measure: Callable[[Run], Sequence[Table]]


def pair_block(team: Team, seconds: float) -> Sample:
    """Run pairs of acquire and release on separate locks, and return their durations, rate and costs."""
    if "pairs" not in team.warm:
        team.warm.add("pairs")
        team.run("pairs", seconds=0.0)  # opens connections and prepares statements
    cost = Cost(team.contender.servers)
    done = team.run("pairs", seconds=seconds)
    lists: list[Pairs] = [value for one in done for value in one.values]
    times = [taken for one in lists for taken in one.times]
    extra = loads.WARM_UP * len(lists)
    return {
        "p50": quantile(times, 0.5) * 1e6,
        "p99": quantile(times, 0.99) * 1e6,
        "rate": sum(len(one.times) / max(sum(one.times), 1e-9) for one in lists),
        "client": sum(one.cpu for one in done) * 1e6 / (len(times) + extra),
        "server": cost.microseconds(len(times) + extra),
    }


def turn_block(
    team: Team, seconds: float, folder: Path, hold: float = 0.0, pause: float = 0.0, *, alternate: bool = False
) -> Sample:
    """Let the clients take turns at one lock, and return the rate, latency and cost of the hand-offs."""
    ledger = Ledger.create(folder / f"ledger-{time.monotonic_ns()}")
    if "turns" not in team.warm:
        team.warm.add("turns")
        team.run("turns", seconds=0.2, ledger=ledger)  # opens the connections that only waiters have
    cost = Cost(team.contender.servers)
    done = team.run("turns", seconds=seconds, ledger=ledger, hold=hold, pause=pause, alternate=alternate)
    clients: list[Turns] = [value for one in done for value in one.values]
    Path(ledger).unlink()
    hand_offs = [taken for one in clients for taken in one.hand_offs]
    counts = [one.grants for one in clients]
    waits = [taken for one in clients for taken in one.waits]
    return {
        "rate": len(hand_offs) / seconds,
        "grants": sum(counts) / seconds,
        "p50": quantile(hand_offs, 0.5) * 1e3,
        "p99": quantile(hand_offs, 0.99) * 1e3,
        "typical wait": quantile(waits, 0.5) * 1e3,
        "wait": quantile(waits, 0.99) * 1e3,
        "longest": max(waits, default=float("nan")) * 1e3,
        "jain": sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts)) if any(counts) else float("nan"),
        "server": cost.microseconds(sum(counts)),
        "client": sum(one.cpu for one in done) * 1e6 / max(sum(counts), 1),
    }

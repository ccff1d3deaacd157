"""Run the blocks of all contenders in turns, and repeat those that other programs disturbed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.harness import usage
from bench.harness.machine import LIMIT, Watch

Sample = dict[str, float]
"""The figures of one block, by column."""

Block = Callable[[], Sample]

ATTEMPTS = 3
"""How often a disturbed block is run, at most. The least disturbed attempt counts."""


@dataclass
class Measured:
    """The figures of all blocks: for each row and each column one value per round."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    blocks: int = 0
    repeated: int = 0
    disturbed: int = 0
    """Blocks that were disturbed in every attempt."""

    def add(self, row: str, sample: Sample) -> None:
        """Add the figures of one block."""
        columns = self.values.setdefault(row, {})
        for column, value in sample.items():
            columns.setdefault(column, []).append(value)

    def join(self, other: Measured) -> None:
        """Add the columns of other blocks of the same rows."""
        for row, columns in other.values.items():
            self.values.setdefault(row, {}).update(columns)
        self.blocks += other.blocks
        self.repeated += other.repeated
        self.disturbed += other.disturbed


def interleave(blocks: Mapping[str, Block], rounds: int, *, repeat: bool = True, limit: float = LIMIT) -> Measured:
    """Run each block once per round. The first of a round is another one each time."""
    measured, names = Measured(), list(blocks)
    for number in range(rounds):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            progress(f"round {number + 1} of {rounds}: {name}")
            measured.blocks += 1
            measured.add(name, _undisturbed(blocks[name], measured, repeat, limit))
    progress("")
    return measured


def _undisturbed(block: Block, measured: Measured, repeat: bool, limit: float) -> Sample:
    attempts: list[tuple[float, Sample]] = []
    for attempt in range(ATTEMPTS if repeat else 1):
        measured.repeated += attempt > 0
        watch = Watch()
        sample = block()
        attempts.append((watch.disturbance(), sample))
        if attempts[-1][0] <= limit:
            break
    disturbance, sample = min(attempts, key=lambda one: one[0])
    measured.disturbed += disturbance > limit
    return sample


class Cost:
    """Measures the processor time of a server, in a block of which `per` is the number of operations."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began, self.wall = pid, usage.cpu(pid) if pid else 0.0, time.monotonic()

    def microseconds(self, per: int) -> float:
        """Return the microseconds of each operation."""
        return (usage.cpu(self._pid) - self._began) * 1e6 / max(per, 1) if self._pid else float("nan")


def progress(text: str) -> None:
    """Show what runs, if a person watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def quantile(values: list[float], part: float) -> float:
    """Return the value below which this part of the values lies."""
    if not values:
        return float("nan")
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]

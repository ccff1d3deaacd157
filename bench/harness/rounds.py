"""Run the blocks of all contenders in turns, and repeat those that other programs disturbed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
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
    failed: dict[str, str] = field(default_factory=dict)
    """What went wrong with a row that could not be measured to the end."""

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
        self.failed |= other.failed

    def apart(self) -> Measured:
        """Return a row for each `row|column` that the blocks have named, instead of a row for each block."""
        found = Measured({}, self.blocks, self.repeated, self.disturbed, self.failed)
        for columns in self.values.values():
            for key, values in columns.items():
                row, _, column = key.rpartition("|")
                found.values.setdefault(row, {})[column] = values
        return found

    def part(self, rows: Iterable[str]) -> Measured:
        """Return some of the rows, those that were measured, with the counts of all blocks."""
        chosen = list(rows)
        values = {row: self.values[row] for row in chosen if row in self.values}
        failed = {row: self.failed[row] for row in chosen if row in self.failed}
        return Measured(values, self.blocks, self.repeated, self.disturbed, failed)


def interleave(blocks: Mapping[str, Block], rounds: int, *, repeat: bool = True, limit: float = LIMIT) -> Measured:
    """Run each block once per round. The first of a round is another one each time.

    A block that fails is not run again. Its rounds before count, and the other blocks go on.
    """
    measured, names = Measured(), list(blocks)
    for number in range(rounds):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            if name in measured.failed:
                continue
            progress(f"round {number + 1} of {rounds}: {name}")
            try:
                sample = _undisturbed(blocks[name], measured, repeat, limit)
            except Exception as error:
                measured.failed[name] = f"it failed in round {number + 1} of {rounds}: {cause(error)}"
                say(f"{name} is left out from here on: {measured.failed[name]}", error)
            else:
                measured.blocks += 1
                measured.add(name, sample)
    progress("")
    return measured


def cause(error: BaseException) -> str:
    """Return the kind and the text of an error in one line: the last one, if it carries the trace of a worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return (lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {lines[0]}").removesuffix(".")


def say(text: str, error: BaseException | None = None) -> None:
    """Tell the person who runs the benchmark, with the trace of an error."""
    progress("")
    if error is not None:
        traceback.print_exception(error, file=sys.stderr)
    print(text, file=sys.stderr, flush=True)


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
    """Measures the processor time of some processes, such as servers, from now on."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._began = usage.cpu(*self._pids)

    def seconds(self) -> float:
        """Return the seconds that they have used."""
        return usage.cpu(*self._pids) - self._began

    def microseconds(self, per: int) -> float:
        """Return the microseconds of each of this number of operations."""
        return self.seconds() * 1e6 / max(per, 1)


def progress(text: str) -> None:
    """Show what runs, if a person watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def quantile(values: list[float], part: float) -> float:
    """Return the value below which this part of the values lies."""
    if not values:
        return float("nan")
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]

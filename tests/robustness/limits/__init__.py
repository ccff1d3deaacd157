"""Measure limits: how far dblock scales, what fails first, and how that shows. Each module has a function `measure`.

A figure that matters is a ratio of two measurements that alternate in one run. A claim is true or false.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from dblock.embedded import Server
from tests.support.servers import private_server

Progress = Callable[[str], None]


def server_with(durable: bool, **settings: str) -> AbstractContextManager[Server]:
    """Start a server: a durable one, or for a quick measurement one in memory that does not wait for the disk."""
    return private_server(settings if durable else {**settings, "fsync": "off"}, in_memory=not durable)


class Failure(NamedTuple):
    """What fails: at which limit, with which symptom, and with which message."""

    limit: str
    symptom: str
    message: str


@dataclass
class Measured:
    """The measurements of one limit."""

    title: str
    figures: dict[str, str] = field(default_factory=dict)
    """The figures for a reader."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The same figures for computation."""
    claims: dict[str, bool] = field(default_factory=dict)
    """What must be true."""
    failures: list[Failure] = field(default_factory=list)

    def markdown(self) -> str:
        """Return a section for a page."""
        rows = [f"| {what} | {value} |" for what, value in self.figures.items()]
        claims = [f"- {'yes' if so else '**NO**'}: {what}" for what, so in self.claims.items()]
        return "\n".join([f"## {self.title}", "", "| | |", "|---|---|", *rows, "", *claims, ""])


def timed(act: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_turns(times: int, *acts: Callable[[], object]) -> list[float]:
    """Alternate between several calls, this number of times, and return the median duration of each in seconds."""
    taken: list[list[float]] = [[] for _ in acts]
    for _ in range(times):
        for seconds, act in zip(taken, acts, strict=True):
            seconds.append(timed(act))
    return [median(seconds) for seconds in taken]


@contextmanager
def in_background(act: Callable[[], object]) -> Iterator[list[float]]:
    """Repeat a call in a thread, and yield the seconds that each took; an error is raised at the end of the block."""
    stop, taken = threading.Event(), []
    trouble: list[BaseException] = []

    def go() -> None:
        try:
            while not stop.is_set():
                taken.append(timed(act))
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()
    if trouble:
        raise trouble[0]


def ms(seconds: float) -> str:
    """Format a duration in milliseconds."""
    return f"{seconds * 1000:.3g} ms"


def table(failures: Sequence[Failure]) -> str:
    """Return the failures as a table."""
    rows = [f"| {one.limit} | {one.symptom} | {one.message} |" for one in failures]
    return "\n".join(["## What breaks first", "", "| limit | symptom | message |", "|---|---|---|", *rows, ""])

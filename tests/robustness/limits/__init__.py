"""Limits: how far it goes, what gives way first, and how that shows. Each is a module with a function `measure`.

A figure that matters is a ratio of two that were taken in one run, in turns. What is claimed besides is so or not.
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
    """Make a server: as a real one, or for a quick look one in memory that waits for no disk."""
    return private_server(settings if durable else {**settings, "fsync": "off"}, in_memory=not durable)


class Break(NamedTuple):
    """What gives way: at which limit, how it shows, and in which words."""

    limit: str
    symptom: str
    message: str


@dataclass
class Measured:
    """What one limit has come to."""

    title: str
    figures: dict[str, str] = field(default_factory=dict)
    """What to tell a reader."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The same for those who compute with it."""
    claims: dict[str, bool] = field(default_factory=dict)
    """What must be so."""
    breaks: list[Break] = field(default_factory=list)

    def markdown(self) -> str:
        """Return a section for a page."""
        rows = [f"| {what} | {value} |" for what, value in self.figures.items()]
        claims = [f"- {'yes' if so else '**NO**'}: {what}" for what, so in self.claims.items()]
        return "\n".join([f"## {self.title}", "", "| | |", "|---|---|", *rows, "", *claims, ""])


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_turns(times: int, *acts: Callable[[], object]) -> list[float]:
    """Do several things in turns, so often, and return the median of the seconds that each took."""
    taken: list[list[float]] = [[] for _ in acts]
    for _ in range(times):
        for seconds, act in zip(taken, acts, strict=True):
            seconds.append(timed(act))
    return [median(seconds) for seconds in taken]


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[list[float]]:
    """Do something again and again in a thread, and yield the seconds that each time took; an error ends the block."""
    over, taken = threading.Event(), []
    trouble: list[BaseException] = []

    def go() -> None:
        try:
            while not over.is_set():
                taken.append(timed(act))
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()
    if trouble:
        raise trouble[0]


def wait_until(what: str, is_so: Callable[[], object], patience: float = 60.0) -> float:
    """Return as soon as it is so, with the seconds that it took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() < began + patience, f"{what}: not within {patience:g} s"
        time.sleep(0.01)
    return time.monotonic() - began


def ms(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds * 1000:.3g} ms"


def table(breaks: Sequence[Break]) -> str:
    """Return what gives way, as a table."""
    rows = [f"| {one.limit} | {one.symptom} | {one.message} |" for one in breaks]
    return "\n".join(["## What gives way first", "", "| limit | symptom | message |", "|---|---|---|", *rows, ""])

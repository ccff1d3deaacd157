"""`dblock watch` without a screen: the state at the start, and then a line for each happening, as it happens."""

from __future__ import annotations

import queue
import select
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import click

from dblock.cli.context import Asked
from dblock.cli.graph.waits import fitting
from dblock.cli.inspect import facts as facts_of_lock
from dblock.cli.output import as_json, print_json_line, shown
from dblock.cli.watch.changes import Happenings, Look
from dblock.cli.watch.messages import facts, said, state
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.cli.watch.poller import Looking

READER_GONE = 0.5
"""Seconds between two looks at whether anybody still reads."""


def follow(asked: Asked, looking: Looking, pattern: str, database: str) -> int | None:
    """Print what happens until told to end; what is in the way at the start is raised."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        look = looking.look()
        happenings = Happenings(look, fitting(pattern))
        _print_state(asked, look, database)
        looking.begin(lambda: None)
        away = False
        while True:
            answer = _next(looking)
            if isinstance(answer, DblockError):
                if not away:
                    away = True
                    why = " ".join(str(answer).split())
                    _warn(asked, f"{why} Going on when it is back.", type(answer).__name__)
                continue
            if away:
                away = False
                _warn(asked, "The database is back.", "back")
            for one in happenings.follow(answer):
                if asked.as_json:
                    print_json_line(facts(one))
                else:
                    click.echo(f"{shown(one.at)}  {shown(one.name)}  {said(one)}")
    finally:
        looking.end()
        signal.signal(signal.SIGTERM, before)


def _next(looking: Looking) -> Look | DblockError:
    """Wait for the next answer, as long as somebody is there to be told."""
    while True:
        try:
            return looking.answers.get(timeout=READER_GONE)
        except queue.Empty:
            pass
        finally:
            if _reader_is_gone():
                raise BrokenPipeError


def _reader_is_gone() -> bool:
    """Tell whether the other end of a pipe was closed, without writing to it: there may be nothing to say."""
    if not hasattr(select, "poll"):
        return False
    try:
        polled = select.poll()
        polled.register(sys.stdout.fileno(), 0)
        return any(what & select.POLLERR for _, what in polled.poll(0))
    except (OSError, ValueError):
        return False


def _print_state(asked: Asked, look: Look, database: str) -> None:
    held = sum(lock.state != "free" for lock in look.locks)
    waiting = sum(lock.waiting for lock in look.locks)
    if asked.as_json:
        begun = {"event": "watching", "at": look.when, "database": database, "held": held, "waiting": waiting}
        print_json_line(begun)
        for lock in look.locks:
            print_json_line({"event": "state", "at": look.when, **facts_of_lock(lock)})
        return
    click.echo(f"{shown(look.when)}  watching {shown(database)}: {held} held, {waiting} waiting")
    for lock in look.locks:
        click.echo(f"{shown(look.when)}  {shown(lock.name)}  {state(lock)}")


def _warn(asked: Asked, what: str, kind: str) -> None:
    text = as_json({"warning": what, "kind": kind}) if asked.as_json else shown(f"dblock: {what}")
    click.echo(text, err=True)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

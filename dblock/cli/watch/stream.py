"""`dblock watch` without a screen: print the state at the start, then one line for each change."""

from __future__ import annotations

import queue
import select
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import click

from dblock.admin.graph.waits import name_matcher
from dblock.cli.context import CommandContext
from dblock.cli.inspect import lock_data
from dblock.cli.output import print_json_line, printable, to_json
from dblock.cli.watch.changes import ChangeTracker, Snapshot
from dblock.cli.watch.messages import change_data, describe, describe_lock
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock.cli.watch.poller import Poller

READER_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether the output still has a reader."""


def follow(context: CommandContext, poller: Poller, pattern: str, database: str) -> int | None:
    """Print changes until a signal ends the command; raise if the first poll fails."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        snapshot = poller.poll()
        tracker = ChangeTracker(snapshot, name_matcher(pattern))
        _print_state(context, snapshot, database)
        poller.start(lambda: None)
        unavailable = False
        while True:
            result = _next_result(poller)
            if isinstance(result, DblockError):
                if not unavailable:
                    unavailable = True
                    why = " ".join(str(result).split())
                    _warn(context, f"{why} Watching continues when the database is back.", type(result).__name__)
                continue
            if unavailable:
                unavailable = False
                _warn(context, "The database is back.", "back")
            for change in tracker.update(result):
                if context.as_json:
                    print_json_line(change_data(change))
                else:
                    click.echo(f"{printable(change.at)}  {printable(change.name)}  {describe(change)}")
    finally:
        poller.stop()
        signal.signal(signal.SIGTERM, before)


def _next_result(poller: Poller) -> Snapshot | DblockError:
    """Wait for the next result; raise BrokenPipeError if the output has lost its reader."""
    while True:
        try:
            return poller.results.get(timeout=READER_CHECK_INTERVAL)
        except queue.Empty:
            pass
        finally:
            if _reader_is_gone():
                raise BrokenPipeError


def _reader_is_gone() -> bool:
    """Return whether the other end of the output pipe is closed, without writing: there may be nothing to print."""
    if not hasattr(select, "poll"):
        return False
    try:
        polled = select.poll()
        polled.register(sys.stdout.fileno(), 0)
        return any(what & select.POLLERR for _, what in polled.poll(0))
    except (OSError, ValueError):
        return False


def _print_state(context: CommandContext, snapshot: Snapshot, database: str) -> None:
    held = sum(lock.state != "free" and lock.held is None for lock in snapshot.locks)
    waiting = sum(lock.waiting for lock in snapshot.locks)
    if context.as_json:
        header = {"event": "watching", "at": snapshot.when, "database": database, "held": held, "waiting": waiting}
        print_json_line(header)
        for lock in snapshot.locks:
            print_json_line({"event": "state", "at": snapshot.when, **lock_data(lock)})
        return
    click.echo(f"{printable(snapshot.when)}  watching {printable(database)}: {held} held, {waiting} waiting")
    for lock in snapshot.locks:
        click.echo(f"{printable(snapshot.when)}  {printable(lock.name)}  {describe_lock(lock)}")


def _warn(context: CommandContext, what: str, kind: str) -> None:
    text = to_json({"warning": what, "kind": kind}) if context.as_json else printable(f"dblock: {what}")
    click.echo(text, err=True)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

"""The keeper: a process that holds the lock for a migrator in another process.

A migration in Python may hold the interpreter for longer than the ttl, and no thread of that process could renew the
lease then. So the migrator's process starts this one, which waits, renews, ends stale sessions and keeps the ledger.
The keeper holds the lock only while its parent works:

- If the parent dies, the keeper ends the sessions of the run, records the run as killed, and releases the lock.
- While the parent is stopped (SIGSTOP), the keeper does not renew. The lease expires after its ttl, and the keeper and
  all other replicas end the sessions of the run.

The two processes exchange lines of JSON: the keeper's standard input carries requests, its standard output replies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dblock._core import clock
from dblock.errors import (
    DatabaseAhead,
    DblockError,
    LeaseLost,
    LockTimeout,
    MigrationFailed,
    SessionsRemain,
    Unavailable,
)
from dblock.lease import Lease
from dblock.recipes.migrations.turn import Plan, Turn

TICK = 0.2
"""Seconds between two looks at the parent."""

RETRY_INTERVAL = 0.5
"""Seconds between two tries to record the end of a run."""

ERRORS: tuple[type[DblockError], ...] = (DatabaseAhead, LeaseLost, LockTimeout, MigrationFailed, SessionsRemain)
"""The errors that the parent raises as they are. Others reach it as their text."""


def main() -> int:
    """Serve one parent: read its plan, take the turn, and hold the lock until the parent has finished."""
    requests = _Requests(sys.stdin.fileno(), os.getppid())
    first = requests.read(None)
    if first is None:
        return 0
    try:
        with Turn(
            first["dsn"],
            Plan(**first["plan"]),
            schema=first["schema"],
            holder=first["holder"],
            listen_dsn=first["listen_dsn"],
            keep_alive=False,
            report_wait=lambda text: _reply(waiting=text),
            is_done=lambda: _ask_parent(turn, requests),
        ) as turn:
            with requests.exit_if_parent_dies():
                has_turn = turn.take()
            if not has_turn:
                _reply(decision="done")
                return 0
            _reply(decision="run", token=turn.lease.token, mark=turn.mark, run=turn.run)
            _hold(turn, requests)
    except DblockError as error:
        _reply(**_described(error))
    return 0


class _Requests:
    """The parent's requests, and whether the parent is there and running."""

    def __init__(self, fd: int, parent: int) -> None:
        self._fd = fd
        self._parent = parent
        self._inbox = b""
        self._lines: list[bytes] = []

    def read(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next request; {} if none comes in time, and None if the parent is gone."""
        while not self._lines:
            if os.getppid() != self._parent:
                return None
            if not select.select([self._fd], [], [], timeout)[0]:
                return {}
            part = os.read(self._fd, 65536)
            if not part:
                return None
            *self._lines, self._inbox = (self._inbox + part).split(b"\n")
        request: dict[str, Any] = json.loads(self._lines.pop(0))
        return request

    @contextlib.contextmanager
    def exit_if_parent_dies(self) -> Iterator[None]:
        """End this process if the parent dies during the body, which waits for the lock.

        The server then sees the connection end, and the ticket and the grant of this process go to the next replica.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(TICK):
                if self._parent_is_gone():
                    os._exit(0)

        watcher = threading.Thread(target=watch, name="dblock-parent-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _parent_is_gone(self) -> bool:
        pipe = select.poll()
        pipe.register(self._fd, 0)
        return os.getppid() != self._parent or any(event & select.POLLHUP for _, event in pipe.poll(0))

    def parent_is_stopped(self) -> bool:
        """Return whether the parent has been stopped by a signal, where the system shows it."""
        try:
            return Path(f"/proc/{self._parent}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False


class _Renewals:
    """Renews the lease of a turn, but not while the parent is stopped."""

    def __init__(self, turn: Turn, requests: _Requests) -> None:
        self._lease = turn.lease
        self._requests = requests
        self._due = clock.now()  # the wait for old sessions may have used up a part of the lease

    def renew_if_due(self) -> None:
        if clock.now() >= self._due and not self._requests.parent_is_stopped():
            with contextlib.suppress(DblockError):
                # A lease that is lost stays lost. The parent learns it when it proves the lease or ends the run.
                self._lease.renew()
            self._due = clock.now() + self._lease.ttl / 3


def _ask_parent(turn: Turn, requests: _Requests) -> bool:
    """Return whether the parent finds that there is nothing to do, now that this process holds the lock."""
    if turn.plan.ledger_decides:
        return False
    _reply(look=True)
    renewals = _Renewals(turn, requests)
    while not (found := requests.read(TICK)):
        if found is None:
            os._exit(0)
        renewals.renew_if_due()
    turn.revision = found["revision"]
    return bool(found["done"])


def _hold(turn: Turn, requests: _Requests) -> None:
    renewals = _Renewals(turn, requests)
    while True:
        request = requests.read(TICK)
        if request is None:
            with contextlib.suppress(DblockError):
                turn.end_own_sessions()
            turn.finish("killed")
            return
        if "revision" in request:
            turn.note_revision(request["revision"])
        if "end" in request:
            # A migrator whose connection was cut off does not know whether that came from the loss of its lease.
            is_lost = request["end"] == "killed" and _is_lost(turn.lease)
            _reply(ended=_finished(turn, request | ({"end": "lost"} if is_lost else {})), lost=is_lost)
            return
        renewals.renew_if_due()


def _finished(turn: Turn, request: dict[str, Any]) -> str:
    """Record how the run ended, and return what the ledger has. Try for as long as the lease lasts."""
    while True:
        try:
            return turn.finish(request["end"], request.get("error"), request.get("last_revision"))
        except Unavailable:
            if not turn.lease.remaining():
                raise
            time.sleep(RETRY_INTERVAL)


def _is_lost(lease: Lease) -> bool:
    try:
        lease.renew()
    except LeaseLost:
        return True
    except DblockError:
        return False
    return False


def _reply(**reply: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _described(error: DblockError) -> dict[str, Any]:
    kind = type(error)
    if kind in ERRORS:
        reduced: Any = error.__reduce__()
        return {"error": kind.__name__, "arguments": [_plain(argument) for argument in reduced[1]], "text": str(error)}
    return {"error": kind.__name__, "arguments": None, "text": str(error)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)


if __name__ == "__main__":
    sys.exit(main())

"""A gate around a migration that runs in this process. A keeper process holds the lock for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from dblock import errors
from dblock._core.options import quoted
from dblock.errors import DatabaseError, DblockError, LeaseLost
from dblock.recipes.migrations.keeper import ERRORS
from dblock.recipes.migrations.turn import Plan

logger = logging.getLogger("dblock")

START_KEEPER = "import sys; sys.path[:] = sys.argv[1:]; from dblock.recipes.migrations.keeper import main; main()"
"""With -m, a module of the working directory would stand in for one of the standard library, such as queue.py."""

END_MARGIN = 15.0
"""Seconds after the ttl within which a keeper has recorded the end of a run, or has given up."""


class Gate:
    """One replica's passage: `enter`, then the migration, then `leave`."""

    def __init__(
        self,
        dsn: str,
        plan: Plan,
        *,
        schema: str = "dblock",
        holder: str | None = None,
        listen_dsn: str | None = None,
        look: Callable[[], tuple[bool, str | None]] = lambda: (False, None),
    ) -> None:
        """Set what to run. Nothing is started yet.

        `look` returns whether there is nothing to do, and where the migration begins. If the plan's `ledger_decides` is
        False, `look` is called under the lock, when no session of an earlier grant is left.
        """
        self._look = look
        self.plan = plan
        self._schema = schema
        self._request: dict[str, Any] = {
            "dsn": dsn,
            "plan": asdict(plan),
            "schema": schema,
            "holder": holder or f"{socket.gethostname()} pid {os.getpid()} ({plan.migrator})",
            "listen_dsn": listen_dsn,
        }
        self._keeper: subprocess.Popen[str] | None = None
        self.token = 0
        """The token of the run: one from the first statement to the last."""
        self.mark = ""
        """The application_name that every session of the run must carry."""

    @property
    def is_open(self) -> bool:
        """Whether this process has the turn."""
        return self._keeper is not None

    @property
    def proof(self) -> str:
        """The expression that proves the lease in a transaction. It is false if the lease is lost."""
        return f"{quoted(self._schema)}.assert_held('{_literal(self.plan.name)}', {self.token})"

    @property
    def recognition(self) -> str:
        """The query that returns, in a session with the mark, whether other replicas find that session."""
        return (
            f"SELECT count(*) FROM {quoted(self._schema)}.migration_sessions('{_literal(self.plan.name)}') AS s"
            f" WHERE s.pid = pg_backend_pid() AND s.mark = '{_literal(self.mark)}'"
        )

    def enter(self) -> bool:
        """Wait for the turn. Return whether this process has to migrate; see Turn.take for the errors."""
        keeper = subprocess.Popen(
            [sys.executable, "-c", START_KEEPER, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for this process, and the keeper sees its end
        )
        try:
            self._send(keeper, self._request)
            reply = self._reply(keeper)
            while "waiting" in reply or "look" in reply:
                if "waiting" in reply:
                    logger.info("%s", reply["waiting"])
                else:
                    done, revision = self._look()
                    self._send(keeper, {"done": done, "revision": revision})
                reply = self._reply(keeper)
        except BaseException:
            _close(keeper)
            raise
        if reply.get("decision") != "run":
            _close(keeper)
            _raise_reported(reply)
            return False
        self._keeper, self.token, self.mark = keeper, reply["token"], reply["mark"]
        return True

    def note_revision(self, revision: str) -> None:
        """Record how far the migration has come."""
        if self._keeper is not None:
            self._send(self._keeper, {"revision": revision})

    def leave(self, outcome: str, error: str | None = None, revision: str | None = None) -> bool:
        """Record how the migration ended, and release the lock. Raise LeaseLost if a success came too late.

        Raise DatabaseError if the keeper has died or does not reply. Return whether a migration that ended as `killed`
        had lost its lease, and was cut off for that reason.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return False
        try:
            self._send(keeper, {"end": outcome, "error": error, "last_revision": revision})
            reply = self._reply(keeper, within=self.plan.ttl + END_MARGIN)
        finally:
            _close(keeper)
        if outcome == "succeeded" and reply.get("ended") != "succeeded":
            _raise_reported(reply)
            raise self.lost()
        return bool(reply.get("lost"))

    def lost(self) -> LeaseLost:
        """Return the error for a lease that was lost during the migration."""
        return LeaseLost(self.plan.name, "superseded", datetime.now(timezone.utc), self.token)

    def _send(self, keeper: subprocess.Popen[str], request: dict[str, Any]) -> None:
        assert keeper.stdin is not None
        try:
            keeper.stdin.write(json.dumps(request) + "\n")
            keeper.stdin.flush()
        except BrokenPipeError:
            raise self._keeper_ended() from None

    def _reply(self, keeper: subprocess.Popen[str], within: float | None = None) -> dict[str, Any]:
        assert keeper.stdout is not None
        if within is not None and not select.select([keeper.stdout], [], [], within)[0]:
            keeper.kill()  # it was stopped, and must not renew or end anything when it continues
        line = keeper.stdout.readline()
        if not line:
            raise self._keeper_ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _keeper_ended(self) -> DatabaseError:
        return DatabaseError(
            f"The process that holds the lock of migration {self.plan.name!r} has ended. Run the migrator again: a run "
            "whose end was not recorded counts as killed, and may be repeated."
        )


def _close(keeper: subprocess.Popen[str]) -> None:
    for stream in (keeper.stdin, keeper.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    try:
        keeper.wait(10)
    except subprocess.TimeoutExpired:
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()


def _raise_reported(reply: dict[str, Any]) -> None:
    """Raise the error that the keeper reported, if there is one."""
    name = reply.get("error")
    if name is None:
        return
    kind = getattr(errors, name, DblockError)
    if reply["arguments"] is not None and kind in ERRORS and kind is not LeaseLost:
        raise kind(*reply["arguments"])
    error = Exception.__new__(kind)
    error.args = (reply["text"],)
    raise error


def _literal(text: str) -> str:
    return text.replace("'", "''")

"""What the runners for threads and for asyncio share: where to connect, and how to handle an error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from dblock._core import clock
from dblock._core.effects import Call, Row
from dblock._core.listener_failures import ServerState
from dblock._core.outage import Outage
from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock._core.statements import Statements
from dblock._core.timings import Timings, chosen
from dblock._core.waiters import LocalWaiter
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import is_overdue, is_refusal_for_now, server_states
from dblock._runtime.home import Home
from dblock._runtime.isolation import Remedy, remedy
from dblock._runtime.pool import AsyncPool, Pool
from dblock._runtime.target import Target
from dblock.errors import DblockError, SchemaMissing, SchemaOutdated, Unavailable

logger = logging.getLogger("dblock")


class RunnerBase:
    """What both runners share: where to connect, and how to handle an error."""

    _pool: Pool | AsyncPool
    _home: Home | None

    def __init__(self, target: Target, schema: str, patience: float, prepares: bool, timings: Timings | None) -> None:
        self.target = target
        self.timings = chosen(timings)
        """The intervals and patiences of the client."""
        self.reply_within = max(patience, self.timings.least_patience)
        self.schema = schema
        self.prepares = prepares
        self.installation = ""
        """The ID of the installation, to tell it from one in another database."""
        self.join_queue: Callable[[str, str], LocalWaiter] = _cannot_wait
        """Registers a waiter for a lock, under its attempt; set once there is a listener to wake it."""
        self.statements = Statements(schema)
        self.opening = Outage("runner: connections can be opened again", logging.INFO)
        self.terminated_at = -math.inf
        """When the server last ended one of its sessions with a message, on the clock of dblock._core.clock."""
        self.refused: tuple[dict[str, ServerState], float] = {}, -math.inf
        """In which states servers last refused a connection, by their addresses, and when."""

    def giving_up(self, call: Call) -> float:
        """Return the seconds to cancel a call that got no reply, and as many again to see it end."""
        return min(call.giving_up, self.timings.give_up_within)

    @property
    def _borrows(self) -> bool:
        """Whether a call is under way over the home."""
        return self._home is not None and self._home.in_use

    def make_ready(self, raw: RawConnection, backend: Row | None) -> None:
        """Decide how to send statements over a new connection, given the backend that serves it."""
        if backend is None or backend[0] != str(raw.connection.info.backend_pid):
            if remedy(raw.connection, backend) is Remedy.BEGIN:
                self.target.needs_transactions = True
            self.stop_preparing("there is a pooler before the database")
        raw.prepares = self.prepares

    def is_refusal(self, error: BaseException | None) -> bool:
        """Return whether the server refused a connection because it ends or starts, and record that."""
        if not is_refusal_for_now(error):
            return False
        self.refused = server_states(error), clock.now()
        return True

    def must_borrow(self, refused: Unavailable, trouble: CallRetry) -> bool:
        """Return whether a call has only the home left, because no connection could be opened for it."""
        cause = refused.__cause__  # None if connections are open, and busy
        gone = trouble.broken or is_overdue(cause) or cause is None or self.is_refusal(cause)
        return self._home is not None and self._home.has_any and not gone

    def stop_preparing(self, why: str) -> None:
        if self.prepares:
            logger.info("runner: %s, statements are not prepared from here on", why)
            self.prepares = False

    def must_install(self, error: DblockError) -> bool:
        """Return whether to install the schema: only into the embedded server, which is dblock's own.

        A missing schema of another name may be a mistyped one, so it is not installed.
        """
        missing = isinstance(error, SchemaMissing) and self.schema == DEFAULT_SCHEMA
        return self.target.embedded and (missing or isinstance(error, SchemaOutdated))


def _cannot_wait(name: str, attempt: str) -> LocalWaiter:
    raise NotImplementedError("this runner has no listener to wake its waiters")

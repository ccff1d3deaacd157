"""What both kinds of client are told at the start, and how they look after what is theirs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dblock._core.acquire import LockFlows
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import DEFAULT_PRESENCE, Seconds, brief, check_presence, check_seconds, is_text
from dblock._runtime.forks import call_after_fork, importing
from dblock._runtime.target import Target, resolve
from dblock.errors import ClientClosed, InvalidArgument

if TYPE_CHECKING:
    from dblock._runtime.target import Where

MOST_PATIENT = 86_400.0


class ClientBase:
    """What both kinds of client are told at the start."""

    _keepalive: Any
    _listener: Any
    _installation = ""

    def __init__(
        self,
        where: Where = None,
        *,
        schema: str = "dblock",
        holder: str | None = None,
        pool_size: int = 4,
        patience: Seconds = 5.0,
        listen_dsn: str | None = None,
        presence: Seconds | None = DEFAULT_PRESENCE,
    ) -> None:
        """Name the database; nothing is opened yet.

        `where` is a DSN (several hosts are fine), a SQLAlchemy Engine or AsyncEngine, or nothing: then $DBLOCK_DSN
        says, and without that it is the embedded Postgres. `holder` is what others see of this client,
        by default the machine and process. `patience` bounds the wait for a free connection, and then for the
        database's answer, which gets a second at least.

        `listen_dsn` leads to the same database past a pooler, for the one connection over which waiters are woken.
        `presence` is how long others wait, once that connection has ended, before they take what this process holds;
        None for as long as the leases last.
        """
        with importing:
            from dblock._core.schema_version import check_name

        if holder is not None and (not is_text(holder) or len(holder.encode()) > 512):
            raise InvalidArgument(f"A holder is text of at most 512 bytes without NUL; got {holder!a:.80}.")
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
            raise InvalidArgument(f"pool_size is a number of connections from 1; got {brief(pool_size)}.")
        with importing:  # psycopg, which reads a DSN
            self._target = resolve(where)
        self._flows = LockFlows(check_name(schema), _default_holder() if holder is None else holder)
        self._schema = schema
        self._pool_size = pool_size
        self._patience = check_seconds("patience", patience)
        if not 0 <= self._patience <= MOST_PATIENT:
            raise InvalidArgument(f"The patience is from 0 s to a day; got {self._patience:g} s.")
        self._listen_target = self._target if listen_dsn is None else _listen_target(listen_dsn)
        if presence is not None:
            presence = check_presence(presence)
        self._grace = presence
        self._closed = False
        self.reset_after_fork()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        raise NotImplementedError

    def _keep(self, state: LeaseState) -> None:
        """Hand a lease to the keep-alive, which renews it if it is kept alive and releases it in the end."""
        with state.presence.lock if state.presence else contextlib.nullcontext():
            self._keepalive.add(state)
            if state.presence is not None and (state.presence.ended or state.in_doubt):
                # While the grant was on its way. Whether it was taken in that time, nobody has asked.
                state.lose(Reason.UNREACHABLE)
        if self._grace is not None:
            self._listener.start()
        if self._closed:
            # Closed while the grant was on its way. Looked at after adding, so that one of the two sees the other.
            self._keepalive.discard(state)
            state.let_go()
            closed = ClientClosed()
            closed.granted = True
            raise closed

    def _defer_cleanup(self, name: str, attempt: str) -> None:
        """Have what could not be given up now given up later."""
        listener = getattr(self, "_listener", None)
        if listener is not None and not self._closed:
            listener.start()
            listener.waiters.defer_cleanup(name, attempt)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("A client, its locks and its leases belong to one process. Make a client in the other one.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target}{' closed' if self._closed else ''}>"


def _default_holder() -> Callable[[], str]:
    host = socket.gethostname()
    return lambda: f"{host} pid {os.getpid()}"


def _listen_target(listen_dsn: str) -> Target:
    try:
        return resolve(listen_dsn)
    except InvalidArgument as error:
        raise InvalidArgument(f"listen_dsn: {error}") from None
